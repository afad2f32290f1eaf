"""Noise schedules against published ends and diffusers' tables; predictions; min-SNR weights."""

import warnings

import pytest
import torch

from fmlab.models.diffusion.prediction import (
    PREDICTIONS,
    check_prediction,
    clean_from,
    min_snr_weight,
    noise_from,
    target,
    velocity_from,
)
from fmlab.models.diffusion.schedule import NoiseSchedule, rescale_zero_terminal_snr


@pytest.mark.parametrize(
    ("kind", "abar"), [("linear", 4.0358e-5), ("scaled_linear", 4.6601e-3), ("cosine", 2.43e-9)]
)
def test_what_is_left_of_the_image_at_the_last_timestep(kind: str, abar: float) -> None:
    assert float(NoiseSchedule(kind).alphas_cumprod[-1]) == pytest.approx(abar, rel=1e-3)


def test_tables_equal_diffusers_up_to_their_float32() -> None:
    diffusers = pytest.importorskip("diffusers")
    for kind in ("linear", "scaled_linear", "cosine"):
        for zero in (False, True):
            schedule = NoiseSchedule(kind, zero_terminal_snr=zero)
            theirs = diffusers.DDIMScheduler(**schedule.to_fields())
            torch.testing.assert_close(
                schedule.alphas_cumprod.float(), theirs.alphas_cumprod, rtol=1e-4, atol=1e-6
            )
            assert NoiseSchedule.from_fields(dict(theirs.config)) == schedule


def test_zero_terminal_snr_equals_diffusers_rescaling_and_ends_at_exactly_zero() -> None:
    ddim = pytest.importorskip("diffusers.schedulers.scheduling_ddim")
    betas = NoiseSchedule("scaled_linear").betas
    ours = rescale_zero_terminal_snr(betas)
    torch.testing.assert_close(ours, ddim.rescale_zero_terminal_snr(betas), rtol=1e-12, atol=1e-14)
    schedule = NoiseSchedule("scaled_linear", zero_terminal_snr=True)
    assert float(schedule.alphas_cumprod[-1]) == 0.0
    assert float(schedule.betas[0]) == pytest.approx(0.00085)  # the first level stays


def test_other_numbers_of_steps_scale_the_betas_or_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kind in ("linear", "scaled_linear", "cosine"):
            thousand = float(NoiseSchedule(kind).alphas_cumprod[-1])
            hundred = float(NoiseSchedule(kind, steps=100).alphas_cumprod[-1])
            assert hundred < 0.01
            assert kind == "cosine" or hundred == pytest.approx(thousand, rel=0.6)
    with pytest.warns(UserWarning, match=r"abar_T = 0\.3636 .* scaled to 100 steps"):
        NoiseSchedule("linear", steps=100, beta_start=1e-4, beta_end=0.02)
    with pytest.raises(ValueError, match=r"10 steps are too few .* at least 21"):
        NoiseSchedule("linear", steps=10)


def test_noise_is_added_by_the_definition_and_as_diffusers_does() -> None:
    schedule = NoiseSchedule("scaled_linear")
    clean, noise = torch.randn(2, 4, 2, 3, 3, dtype=torch.float64).unbind()
    timesteps = torch.tensor([0, 10, 500, 999])
    got = schedule.add_noise(clean, noise, timesteps)
    for i, t in enumerate(timesteps.tolist()):
        abar = 1.0
        for beta in schedule.betas[: t + 1].tolist():
            abar *= 1 - beta
        expected = abar**0.5 * clean[i] + (1 - abar) ** 0.5 * noise[i]
        torch.testing.assert_close(got[i], expected, rtol=1e-12, atol=1e-13)
    diffusers = pytest.importorskip("diffusers")
    theirs = diffusers.DDPMScheduler(**schedule.to_fields())
    abar = schedule.abar(timesteps, clean)
    torch.testing.assert_close(got, theirs.add_noise(clean, noise, timesteps), rtol=1e-5, atol=1e-5)
    velocity = theirs.get_velocity(clean, noise, timesteps)
    torch.testing.assert_close(target("v", clean, noise, abar), velocity, rtol=1e-5, atol=1e-5)


def test_each_prediction_gives_the_other_two() -> None:
    clean, noise = torch.randn(2, 3, 2, 4, 4, dtype=torch.float64).unbind()
    schedule = NoiseSchedule("scaled_linear")
    timesteps = torch.tensor([3, 400, 999])
    abar, sample = schedule.abar(timesteps, clean), schedule.add_noise(clean, noise, timesteps)
    for prediction in PREDICTIONS:
        output = target(prediction, clean, noise, abar)
        close = dict(rtol=0, atol=1e-11)
        torch.testing.assert_close(clean_from(prediction, output, sample, abar), clean, **close)
        torch.testing.assert_close(noise_from(prediction, output, sample, abar), noise, **close)
        velocity = target("v", clean, noise, abar)
        torch.testing.assert_close(velocity_from(prediction, output, sample, abar), velocity, **close)


def test_min_snr_weights_are_one_loss_written_for_three_targets() -> None:
    """Hang et al.: with these weights the three losses of one wrong prediction are the same number."""
    schedule = NoiseSchedule("scaled_linear")
    clean, noise, wrong = torch.randn(3, 5, 2, 4, 4, dtype=torch.float64).unbind()
    timesteps = torch.tensor([0, 50, 300, 700, 999])
    abar, sample = schedule.abar(timesteps, clean), schedule.add_noise(clean, noise, timesteps)
    losses = {}
    for prediction in PREDICTIONS:
        # The same wrong image, as this prediction would have it.
        implied = noise_from("x0", wrong, sample, abar)
        output = target(prediction, wrong, implied, abar)
        error = (output - target(prediction, clean, noise, abar)) ** 2
        losses[prediction] = (min_snr_weight(prediction, abar) * error).flatten(1).sum(1)
    torch.testing.assert_close(losses["epsilon"], losses["x0"], rtol=1e-10, atol=0)
    torch.testing.assert_close(losses["v"], losses["x0"], rtol=1e-10, atol=0)
    snr = schedule.snr[timesteps]
    expected = torch.minimum(snr, torch.tensor(5.0))
    torch.testing.assert_close(min_snr_weight("x0", schedule.alphas_cumprod[timesteps]), expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(kind="quadratic"), "linear, scaled_linear, cosine"),
        (dict(steps=1), "at least 2"),
        (dict(beta_start=0.03, beta_end=0.02), "rising"),
        (dict(kind="cosine", beta_end=0.02), "no beta_start"),
    ],
)
def test_schedules_that_cannot_be_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NoiseSchedule(**settings)  # type: ignore[arg-type]


def test_predictions_and_timesteps_that_cannot_be_are_refused() -> None:
    zero = NoiseSchedule("scaled_linear", zero_terminal_snr=True)
    with pytest.raises(ValueError, match="x_t is the noise itself"):
        check_prediction(zero, "epsilon")
    check_prediction(zero, "v")
    with pytest.raises(ValueError, match="epsilon, v, x0"):
        check_prediction(zero, "noise")
    images = torch.zeros(2, 1, 2, 2)
    for timesteps, message in [
        (torch.tensor([0, 1000]), "from 0 to 999"),
        (torch.tensor([0.5, 1.0]), "whole numbers"),
        (torch.tensor([1]), r"must be \[2\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            zero.add_noise(images, images, timesteps)
    with pytest.raises(ValueError, match="positive"):
        min_snr_weight("v", zero.alphas_cumprod, gamma=0)
    with pytest.raises(ValueError, match="sigmoid"):
        NoiseSchedule.from_fields({"beta_schedule": "sigmoid"})
