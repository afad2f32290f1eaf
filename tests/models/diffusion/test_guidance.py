"""Classifier-free guidance: one batch equals two calls, rescaling equals diffusers'."""

import pytest
import torch
from torch import Tensor

from fmlab.models.diffusion.guidance import guide, guided_predictor


def model(sample: Tensor, timesteps: Tensor, condition: Tensor) -> Tensor:
    return torch.tanh(sample * condition[:, :, None, None] + timesteps.reshape(-1, 1, 1, 1) / 100)


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    sample = torch.randn(3, 2, 4, 4, generator=generator, dtype=torch.float64)
    condition, empty = torch.randn(2, 3, 2, generator=generator, dtype=torch.float64).unbind()
    return sample, torch.tensor([5, 5, 5]), condition, empty


def test_one_batch_of_two_equals_two_calls() -> None:
    sample, timesteps, condition, empty = inputs()
    for rescale in (0.0, 0.7):
        both = [
            guided_predictor(model, condition, empty, 7.5, rescale, one_batch)(sample, timesteps)
            for one_batch in (True, False)
        ]
        assert torch.equal(*both)
    want = -6.5 * model(sample, timesteps, empty) + 7.5 * model(sample, timesteps, condition)
    got = guided_predictor(model, condition, empty, 7.5)(sample, timesteps)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_scale_1_runs_the_model_once_and_scale_0_ignores_the_caption() -> None:
    sample, timesteps, condition, empty = inputs()
    calls: list[int] = []

    def counted(x: Tensor, t: Tensor, c: Tensor) -> Tensor:
        calls.append(len(x))
        return model(x, t, c)

    got = guided_predictor(counted, condition, empty, 1.0)(sample, timesteps)
    assert calls == [3]
    assert torch.equal(got, model(sample, timesteps, condition))
    got = guided_predictor(model, condition, empty, 0.0)(sample, timesteps)
    assert torch.equal(got, model(sample, timesteps, empty))


def test_rescaling_equals_diffusers_and_restores_the_deviation() -> None:
    pipeline = pytest.importorskip("diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion")
    sample, timesteps, condition, empty = inputs()
    without, with_caption = model(sample, timesteps, empty), model(sample, timesteps, condition)
    theirs = pipeline.rescale_noise_cfg(guide(without, with_caption, 7.5), with_caption, 0.7)
    torch.testing.assert_close(guide(without, with_caption, 7.5, 0.7), theirs, rtol=1e-12, atol=1e-12)
    whole = guide(without, with_caption, 7.5, 1.0)
    torch.testing.assert_close(whole.std((1, 2, 3)), with_caption.std((1, 2, 3)))


@pytest.mark.parametrize(
    ("scale", "rescale", "message"),
    [(-1, 0, "at least 0"), (7.5, 2, "from 0 to 1"), (1, 0.7, "does nothing")],
)
def test_bad_scales_are_refused(scale: float, rescale: float, message: str) -> None:
    _, _, condition, empty = inputs()
    with pytest.raises(ValueError, match=message):
        guided_predictor(model, condition, empty, scale, rescale)
