"""What all schedulers share: which timesteps are visited, and the loop from noise to image.

A scheduler here holds settings only. What changes while sampling is passed in and handed back:

    steps = scheduler.steps(20)                       # timesteps and the noise level before and after each
    sample = scheduler.start(noise, steps)
    for i, timestep in enumerate(steps.timesteps):
        output = model(scheduler.model_input(sample, steps, i), timestep)
        sample, memory = scheduler.step(output, sample, steps, i, memory, noise_i)

Levels are written as abar, the image's share of the variance (see schedule.py). Coefficients are Python
floats, float64, so that no tensor is read back from a device and the sample keeps its dtype.

Shapes: b images, n steps of sampling, T timesteps of training.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor

from fmlab.models.diffusion.prediction import THEIR_PREDICTIONS, check_prediction
from fmlab.models.diffusion.schedule import NoiseSchedule

S = TypeVar("S", bound="Scheduler")
SPACINGS = ("leading", "trailing", "linspace")

#: (model input [b, ...], timesteps [b]) -> what the model predicts, [b, ...].
Predictor = Callable[[Tensor, Tensor], Tensor]
#: index of a step -> standard normal noise [b, ...].
NoiseSource = Callable[[int], Tensor]


@dataclass(frozen=True)
class Steps:
    """The way from noise to image: step i runs the model at timesteps[i] and goes from before[i] to after[i].

    The levels `before` and `after` are abar; all three have length n. Timesteps are whole, except Euler's
    with linspace spacing.
    """

    timesteps: tuple[float, ...]
    before: tuple[float, ...]
    after: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.timesteps)


@dataclass(frozen=True)
class Threshold:
    """Dynamic thresholding of predicted pixels (Saharia et al. 2022, Imagen, arXiv:2205.11487, section 2.3).

    Values beyond the `quantile` of an image's own absolute values are cut there, and the image is divided by
    it, if it is above 1 (at most `most`). For pixels only: latents have no range.
    """

    quantile: float = 0.995
    most: float = 1.0

    def __call__(self, clean: Tensor) -> Tensor:
        size = clean.float() if clean.dtype in (torch.float16, torch.bfloat16) else clean
        limit = torch.quantile(size.abs().flatten(1), self.quantile, dim=1).clamp(1.0, self.most)
        limit = limit.reshape(-1, *[1] * (clean.dim() - 1))
        return (torch.maximum(torch.minimum(size, limit), -limit) / limit).to(clean.dtype)


@dataclass(frozen=True)
class Scheduler:
    """Settings of a sampling method.

    schedule:    the noise schedule that the model was trained on
    prediction:  what the model predicts: "epsilon", "v" or "x0"
    spacing:     which timesteps n steps visit. "leading": 0, T/n, 2T/n, ..., so never the noisiest, T - 1;
                 "trailing": T/n - 1, 2T/n - 1, ..., T - 1; "linspace": evenly from 0 to T - 1
                 (Lin et al. 2023, arXiv:2305.08891, table 2)
    offset:      added to leading timesteps (Stable Diffusion: 1)
    final:       the level that the last step goes to: "clean" is abar = 1, "first" that of timestep 0
                 (DDIM in Stable Diffusion)

    Raises ValueError for settings that cannot go together or would do nothing.
    """

    #: diffusers' name of the class.
    THEIRS: ClassVar[str]
    #: The spacing that diffusers' class has by default, for files that do not say.
    THEIR_SPACING: ClassVar[str] = "leading"
    #: Whether each step but the last adds noise.
    stochastic: ClassVar[bool] = False

    schedule: NoiseSchedule = field(default_factory=NoiseSchedule)
    prediction: str = "epsilon"
    spacing: str = "leading"
    offset: int = 0
    final: str = "clean"

    def __post_init__(self) -> None:
        check_prediction(self.schedule, self.prediction)
        if self.spacing not in SPACINGS:
            raise ValueError(f"unknown spacing {self.spacing!r}; legal: {', '.join(SPACINGS)}")
        if self.final not in ("clean", "first"):
            raise ValueError(f"final must be 'clean' or 'first', got {self.final!r}")
        if self.offset and self.spacing != "leading":
            raise ValueError(
                f"offset={self.offset} is for leading spacing only; leave it out with {self.spacing}"
            )

    # ---- the interface -------------------------------------------------------------------------------------

    def steps(self, count: int) -> Steps:
        """The way in `count` steps. Raises ValueError unless 1 <= count <= T and all timesteps exist."""
        timesteps = self.timesteps(count)
        before = [float(self.schedule.alphas_cumprod[int(t)]) for t in timesteps]
        return Steps(tuple(timesteps), tuple(before), (*before[1:], self.final_abar))

    def start(self, noise: Tensor, steps: Steps) -> Tensor:
        """The first sample, from standard normal noise [b, ...]."""
        return noise

    def model_input(self, sample: Tensor, steps: Steps, i: int) -> Tensor:
        """What the model sees of the sample at step i: of unit variance, as in training."""
        return sample

    def step(
        self,
        output: Tensor,
        sample: Tensor,
        steps: Steps,
        i: int,
        memory: Any = None,
        noise: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        """Go from steps.before[i] to steps.after[i]; returns the new sample and what the next step remembers.

        output: of the model, for model_input(sample, steps, i).  memory: from the step before, None at first.
        noise: standard normal [b, ...], for the methods that add some.
        """
        raise NotImplementedError

    # ---- shared --------------------------------------------------------------------------------------------

    @property
    def final_abar(self) -> float:
        return 1.0 if self.final == "clean" else float(self.schedule.alphas_cumprod[0])

    def timesteps(self, count: int) -> list[float]:
        """Timesteps of `count` steps, from noisy to clean."""
        return spaced_timesteps(self.schedule.steps, count, self.spacing, self.offset)

    # ---- diffusers' config ---------------------------------------------------------------------------------

    def to_fields(self) -> dict[str, Any]:
        """The fields of diffusers' scheduler_config.json."""
        return dict(
            _class_name=self.THEIRS,
            **self.schedule.to_fields(),
            prediction_type=THEIR_PREDICTIONS[self.prediction],
            timestep_spacing=self.spacing,
            steps_offset=self.offset,
        )

    @classmethod
    def from_fields(cls: type[S], fields: dict[str, Any]) -> S:
        """From such fields, also those of another class: what both know is taken over."""
        ours = {theirs: name for name, theirs in THEIR_PREDICTIONS.items()}
        prediction = fields.get("prediction_type", "epsilon")
        if prediction not in ours:
            raise ValueError(f"prediction_type {prediction!r} is not supported; legal: {', '.join(ours)}")
        spacing = fields.get("timestep_spacing", cls.THEIR_SPACING)
        scheduler = cls(
            NoiseSchedule.from_fields(fields),
            ours[prediction],
            spacing,
            # Stable Diffusion's files keep steps_offset=1 whatever the spacing; there it does nothing.
            offset=fields.get("steps_offset", 0) if spacing == "leading" else 0,
        )
        return replace(scheduler, **cls._own_fields(fields))

    @classmethod
    def _own_fields(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """Our settings that only this class has, from diffusers' fields."""
        return {}


def spaced_timesteps(total: int, count: int, spacing: str, offset: int = 0) -> list[float]:
    """`count` of the timesteps 0 to total - 1, descending; whole numbers. See Scheduler.

    Raises ValueError when there are not that many, or the offset leads beyond the last.
    """
    check_count(count, total)
    timesteps: Any
    if spacing == "leading":
        timesteps = np.arange(count)[::-1] * (total // count) + offset
    elif spacing == "trailing":
        timesteps = np.round(total - np.arange(count) * (total / count)) - 1
    else:
        timesteps = np.round(np.linspace(0, total - 1, count))[::-1]
    return checked_timesteps(timesteps, total)


def check_count(count: int, total: int) -> None:
    """Raise ValueError unless 1 <= count <= total."""
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= total:
        raise ValueError(f"the number of sampling steps must be from 1 to {total}, got {count!r}")


def checked_timesteps(timesteps: Any, total: int) -> list[float]:
    """As a list. Raises ValueError for a timestep that the schedule does not have."""
    values = [float(t) for t in timesteps]
    if max(values) > total - 1 or min(values) < 0:
        raise ValueError(
            f"the offset moves timesteps to {min(values):.0f} ... {max(values):.0f}, beyond 0 ... {total - 1}"
            "; use fewer steps or no offset"
        )
    return values


@torch.no_grad()
def denoise(
    predict: Predictor,
    scheduler: Scheduler,
    count: int,
    noise: Tensor,
    source: NoiseSource | None = None,
    on_step: Callable[[int, Tensor], None] | None = None,
) -> Tensor:
    """From standard normal noise [b, ...] to a sample, in `count` steps.

    source: the noise of each step, for schedulers that add some (ValueError if it is missing there).
    on_step: called with the step's index and the sample after it.
    """
    if scheduler.stochastic and source is None:
        raise ValueError(f"{type(scheduler).__name__} adds noise at each step; pass source=step -> noise")
    # region loop
    steps = scheduler.steps(count)
    sample, memory = scheduler.start(noise, steps), None
    for i, timestep in enumerate(steps.timesteps):
        whole = timestep == int(timestep)
        times = torch.full((len(noise),), int(timestep) if whole else timestep, device=noise.device)
        output = predict(scheduler.model_input(sample, steps, i), times)
        fresh = source(i) if source is not None and scheduler.stochastic else None
        sample, memory = scheduler.step(output, sample, steps, i, memory, fresh)
        if on_step is not None:
            on_step(i, sample)
    return sample
    # endregion
