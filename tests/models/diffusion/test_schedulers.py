"""Schedulers: the whole trajectory of each equals diffusers', and the exact solution where there is one."""

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from fmlab.models.diffusion.schedule import NoiseSchedule
from fmlab.models.diffusion.schedulers import DDIM, DDPM, DPMSolver2M, Euler, Scheduler, Threshold, denoise
from tests.models.diffusion.scheduler_reference import noise, our_way, their_way

SD = NoiseSchedule("scaled_linear")
ZERO = NoiseSchedule("scaled_linear", zero_terminal_snr=True)
COUNTS = (1, 4, 7, 30)  # 7 and 30 do not divide 1000

# Each with the arguments of diffusers' step, and how near the float64 trajectories must be. diffusers' Euler
# and DPM-Solver hold their sigmas in float32.
METHODS: dict[str, tuple[Scheduler, dict[str, Any], float]] = {
    "ddpm": (DDPM(SD), {"generator": None}, 1e-8),  # diffusers adds noise of variance 1e-20 at the end
    "ddpm-large": (DDPM(SD, variance="fixed_large", clip=1.5), {"generator": None}, 1e-8),
    "ddim": (DDIM(SD, stride="constant", final="first"), {}, 1e-12),
    "ddim-eta": (DDIM(SD, stride="constant", eta=0.7), {"eta": 0.7, "variance_noise": None}, 1e-12),
    "euler": (Euler(SD), {}, 1e-6),
    "dpm-solver": (DPMSolver2M(SD), {}, 1e-6),
    "dpm-solver-first": (DPMSolver2M(SD, final="first"), {}, 1e-6),
}


def worst(ours: list[Tensor], theirs: list[Tensor]) -> float:
    assert len(ours) == len(theirs)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("spacing", ["leading", "trailing", "linspace"])
@pytest.mark.parametrize("prediction", ["epsilon", "v", "x0"])
@pytest.mark.parametrize("method", METHODS)
def test_the_whole_trajectory_equals_diffusers(method: str, prediction: str, spacing: str) -> None:
    scheduler, step, near = METHODS[method]
    scheduler = replace(scheduler, prediction=prediction, spacing=spacing)
    for count in COUNTS:
        offset = 1 if spacing == "leading" and count > 1 else 0
        ours = replace(scheduler, offset=offset)
        exact = (our_way(ours, count, torch.float64), their_way(ours, count, torch.float64, True, step))
        if method == "ddpm-large":  # diffusers noises the finished sample: see the test below
            exact = exact[0][:-1], exact[1][:-1]
        assert not exact[0] or worst(*exact) < near, count
    count = 30
    single = (
        our_way(scheduler, count, torch.float32),
        their_way(scheduler, count, torch.float32, False, step),
    )
    assert all(sample.dtype == torch.float32 for sample in single[0])
    assert worst(single[0][:-1], single[1][:-1]) < 2e-5


@pytest.mark.parametrize("kind", ["linear", "cosine"])
@pytest.mark.parametrize("method", ["ddpm", "ddim", "euler", "dpm-solver"])
def test_other_noise_schedules_equal_diffusers(method: str, kind: str) -> None:
    scheduler, step, near = METHODS[method]
    # 1 / sqrt(abar) is 2e4 at the end of the cosine: the error of float32 sigmas counts for more there.
    ours = replace(scheduler, schedule=NoiseSchedule(kind), prediction="v")
    assert worst(our_way(ours, 10, torch.float64), their_way(ours, 10, torch.float64, True, step)) < near


@pytest.mark.parametrize("method", METHODS)
def test_zero_terminal_snr_equals_diffusers_with_v_and_refuses_epsilon(method: str) -> None:
    scheduler, step, near = METHODS[method]
    with pytest.raises(ValueError, match="zero terminal SNR cannot go with epsilon"):
        replace(scheduler, schedule=ZERO)
    ours = replace(scheduler, schedule=ZERO, prediction="v", spacing="trailing")
    got, want = our_way(ours, 12, torch.float64), their_way(ours, 12, torch.float64, True, step)
    assert worst(got[:-1], want[:-1]) < near


def test_limits_of_the_predicted_image_equal_diffusers() -> None:
    threshold = Threshold(quantile=0.9, most=1.4)
    for scheduler, step in [
        (DDPM(SD, clip=0.5), {"generator": None}),
        (DDPM(SD, threshold=threshold), {"generator": None}),
        (DDIM(SD, clip=0.5), {}),
        (DDIM(SD, clip=0.5, rederive=True), {"use_clipped_model_output": True}),
        (DDIM(SD, threshold=threshold), {}),
        (DPMSolver2M(SD, threshold=threshold), {}),
    ]:
        got, want = our_way(scheduler, 10, torch.float64), their_way(scheduler, 10, torch.float64, True, step)
        assert worst(got, want) < 1e-6, scheduler
        unlimited = replace(scheduler, rederive=False) if isinstance(scheduler, DDIM) else scheduler
        unlimited = replace(
            unlimited, threshold=None, **({} if isinstance(scheduler, DPMSolver2M) else {"clip": None})
        )
        assert worst(got, our_way(unlimited, 10, torch.float64)) > 0.01, "the limit did nothing"


def test_the_last_step_of_ddpm_adds_no_noise() -> None:
    """Ho et al., algorithm 2: z = 0 in the last step. diffusers looks whether t > 0, not whether it is the
    last step: with leading timesteps and Stable Diffusion's offset of 1 it noises the finished image.
    """
    scheduler = DDPM(SD, variance="fixed_large", offset=1)
    ours = our_way(scheduler, 10, torch.float64)
    theirs = their_way(scheduler, 10, torch.float64, True, {"generator": None})
    assert worst(ours[:-1], theirs[:-1]) < 1e-8
    first_level = math.sqrt(float(1 - SD.alphas_cumprod[1]))
    torch.testing.assert_close(ours[-1] + first_level * noise(9), theirs[-1], rtol=0, atol=1e-8)


# ---- where the solution is known ---------------------------------------------------------------------------

# Of the data, which is normal: then the best prediction and the solution of the equation are formulas.
MEAN, STD = 0.3, 0.5


def best_epsilon(schedule: NoiseSchedule, scheduler: Scheduler) -> Any:
    """The noise that a perfect model predicts for normal data, at any level."""

    def predict(sample: Tensor, timesteps: Tensor) -> Tensor:
        t = int(timesteps[0])
        abar = float(schedule.alphas_cumprod[t])
        variance = abar * STD**2 + 1 - abar
        return math.sqrt(1 - abar) * (sample - math.sqrt(abar) * MEAN) / variance

    return predict


def error_on_normal_data(scheduler: Scheduler, count: int) -> float:
    """Distance of the sample from the probability-flow equation's exact solution.

    The flow keeps each point at the same number of standard deviations from the mean at every level.
    """
    start = torch.linspace(-2, 2, 9, dtype=torch.float64).reshape(9, 1)
    steps = scheduler.steps(count)
    got = denoise(best_epsilon(scheduler.schedule, scheduler), scheduler, count, start)
    if isinstance(scheduler, Euler):
        got = got * math.sqrt(scheduler.final_abar)
        start = scheduler.model_input(scheduler.start(start, steps), steps, 0)

    def at(abar: float) -> tuple[float, float]:
        return math.sqrt(abar) * MEAN, math.sqrt(abar * STD**2 + 1 - abar)

    (mean0, std0), (mean1, std1) = at(steps.before[0]), at(scheduler.final_abar)
    return float((got - (mean1 + std1 * (start - mean0) / std0)).abs().max())


@pytest.mark.parametrize(("method", "order"), [(DDIM, 1), (Euler, 1), (DPMSolver2M, 2)])
def test_the_order_of_convergence_is_that_of_the_method(method: type[Scheduler], order: int) -> None:
    scheduler = method(NoiseSchedule("cosine"), spacing="trailing", final="first")
    errors = [error_on_normal_data(scheduler, count) for count in (25, 50, 100)]
    measured = [math.log2(a / b) for a, b in pairwise(errors)]
    assert all(abs(m - order) < 0.15 for m in measured), (errors, measured)


def test_euler_is_ddim_in_other_coordinates() -> None:
    euler, ddim = Euler(SD, offset=1), DDIM(SD, offset=1)
    after = euler.steps(10).after
    for a, b, abar in zip(*(our_way(s, 10, torch.float64) for s in (euler, ddim)), after, strict=True):
        torch.testing.assert_close(a * math.sqrt(abar), b, rtol=0, atol=1e-10)


def test_a_step_of_ddim_ends_where_the_next_one_begins() -> None:
    """Song et al., equation 12 on a subsequence of timesteps. diffusers goes T // n further: with 600
    trailing steps by 1 timestep where the next is 5/3 away, and more noise is left
    than the model is told.
    """
    right, theirs = DDIM(SD, spacing="trailing"), DDIM(SD, spacing="trailing", stride="constant")
    assert error_on_normal_data(right, 600) < 0.01
    assert error_on_normal_data(theirs, 600) > 0.3
    for spacing in ("leading", "trailing"):  # where they coincide: all that Stable Diffusion uses
        pair = [DDIM(SD, spacing=spacing, stride=stride) for stride in ("next", "constant")]
        assert pair[0].steps(20).after == pair[1].steps(20).after


def test_ddim_with_eta_1_is_ddpm() -> None:
    a = our_way(DDIM(SD, eta=1.0), 20, torch.float64)
    b = our_way(DDPM(SD), 20, torch.float64)
    assert worst(a, b) < 1e-12


# ---- files and refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_configs_go_to_diffusers_and_back(method: str) -> None:
    diffusers = pytest.importorskip("diffusers")
    scheduler, _, _ = METHODS[method]
    if isinstance(scheduler, DDIM):
        scheduler = replace(scheduler, stride="next", eta=0.0)  # both are no part of the file
    fields = scheduler.to_fields()
    theirs = getattr(diffusers, fields["_class_name"]).from_config(fields)
    assert type(scheduler).from_fields(dict(theirs.config)) == scheduler


def test_a_config_of_another_method_gives_what_both_know() -> None:
    fields = DDIM(SD, "v", offset=1, final="first").to_fields()
    assert DPMSolver2M.from_fields(fields) == DPMSolver2M(SD, "v", "leading", 1)
    with pytest.raises(ValueError, match="use_karras_sigmas=True"):
        Euler.from_fields(fields | {"use_karras_sigmas": True})
    with pytest.raises(ValueError, match="flow_prediction"):
        Euler.from_fields(fields | {"prediction_type": "flow_prediction"})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DDIM(SD, spacing="even"), "leading, trailing, linspace"),
        (lambda: DDIM(SD, spacing="trailing", offset=1), "leading spacing only"),
        (lambda: DDIM(SD, eta=1.5), r"\[0, 1\]"),
        (lambda: DDIM(SD, clip=1.0, threshold=Threshold()), "give one"),
        (lambda: DDIM(SD, rederive=True), "does nothing"),
        (lambda: DDPM(SD, final="first"), "leave final out"),
        (lambda: DDIM(SD).steps(0), "from 1 to 1000"),
        (lambda: DDIM(SD).steps(1001), "from 1 to 1000"),
        (lambda: DDIM(SD, offset=1).steps(1000), "beyond 0 ... 999"),
        (lambda: denoise(lambda x, t: x, DDPM(SD), 3, torch.zeros(1, 2)), "pass source"),
    ],
)
def test_bad_settings_are_refused_with_the_reason(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
