"""The noise schedule: how much of an image and how much noise there is at each timestep of training.

The forward process mixes a clean image x_0 with Gaussian noise (Ho et al. 2020, arXiv:2006.11239, eq. 4):

    x_t = sqrt(abar_t) * x_0 + sqrt(1 - abar_t) * noise,      abar_t = (1 - beta_1) ... (1 - beta_t)

`abar` (alphas_cumprod) falls from nearly 1 to nearly 0. Its square root is the *signal*, sqrt(1 - abar) the
*noise level*, and abar / (1 - abar) the signal-to-noise ratio. Timesteps count from 0, as in all files.

Tables are float64: they are made of a product of 1000 factors, and 1 / sqrt(abar) magnifies its error near
the end. What multiplies a tensor is cast to that tensor's dtype, once, last.

Shapes: b images, T timesteps of training, ... any shape of an image.
"""

import math
import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

KINDS = ("linear", "scaled_linear", "cosine")
_DEFAULT_BETAS = {"linear": (1e-4, 0.02), "scaled_linear": (0.00085, 0.012)}  # for 1000 steps
_MAX_BETA = 0.999
#: Above this, what is left of the image at the last timestep is worth a warning.
MOST_TERMINAL_ABAR = 0.01
# Their names in diffusers' scheduler_config.json.
_THEIR_KINDS = {"linear": "linear", "scaled_linear": "scaled_linear", "cosine": "squaredcos_cap_v2"}


@dataclass(frozen=True)
class NoiseSchedule:
    """The betas of a diffusion model and all that follows from them.

    kind:
        "linear"        betas on a line (Ho et al. 2020); abar_T = 4.0358e-5
        "scaled_linear" square roots of betas on a line (Stable Diffusion); abar_T = 4.6601e-3
        "cosine"        abar a squared cosine (Nichol & Dhariwal 2021, arXiv:2102.09672, equation 17), betas
                        capped at 0.999; abar_T = 2.43e-9
    steps: timesteps of training, T.
    beta_start, beta_end: of the two linear kinds. Left out, they are those published for 1000 steps times
        1000 / T: the same betas over fewer steps would leave most of the image standing.
    zero_terminal_snr: rescale, so that nothing at all of the image is left at the last timestep.

    Raises ValueError for what cannot be; warns when abar_T > 0.01: sampling starts from pure noise, which a
    model trained on such a schedule has never seen.
    """

    kind: str = "scaled_linear"
    steps: int = 1000
    beta_start: float | None = None
    beta_end: float | None = None
    zero_terminal_snr: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"unknown noise schedule {self.kind!r}; legal: {', '.join(KINDS)}")
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 2:
            raise ValueError(
                f"a schedule needs at least 2 timesteps, as a whole number; got steps={self.steps!r}"
            )
        if self.kind == "cosine":
            if self.beta_start is not None or self.beta_end is not None:
                raise ValueError("the cosine schedule has no beta_start or beta_end; leave them out")
        else:
            self._settle_betas()
        left = float(self.alphas_cumprod[-1])
        if left > MOST_TERMINAL_ABAR:
            warnings.warn(
                f"the last timestep keeps abar_T = {left:.4f} of the image's variance (more than "
                f"{MOST_TERMINAL_ABAR}), but sampling starts from pure noise; leave beta_start and beta_end "
                f"out, so that they are scaled to {self.steps} steps, or set zero_terminal_snr=True",
                stacklevel=3,
            )

    def _settle_betas(self) -> None:
        """Fill in the default betas, scaled to the number of steps, and check them."""
        first, last = _DEFAULT_BETAS[self.kind]
        scale = 1000 / self.steps
        if self.beta_start is None:
            object.__setattr__(self, "beta_start", first * scale)
        if self.beta_end is None:
            object.__setattr__(self, "beta_end", last * scale)
        if last * scale >= 1 and self.beta_end == last * scale:
            least = math.floor(1000 * last) + 1
            raise ValueError(
                f"{self.steps} steps are too few for the {self.kind} schedule: its largest beta, scaled to "
                f"them, would be {last * scale:.2f}; use at least {least} steps, or the cosine schedule"
            )
        if not 0 < self.beta_start <= self.beta_end < 1:  # type: ignore[operator]
            raise ValueError(
                f"betas must be rising between 0 and 1, got {self.beta_start} to {self.beta_end}"
            )

    # ---- tables, float64 [T] -------------------------------------------------------------------------------

    @cached_property
    def betas(self) -> Tensor:
        """beta_t, the variance of the noise that step t adds; float64 [T]."""
        betas = self._betas()
        return rescale_zero_terminal_snr(betas) if self.zero_terminal_snr else betas

    def _betas(self) -> Tensor:
        if self.kind == "cosine":
            return _cosine_betas(self.steps)
        first, last = self.beta_start, self.beta_end
        assert first is not None
        assert last is not None
        if self.kind == "linear":
            return torch.linspace(first, last, self.steps, dtype=torch.float64, device="cpu")
        return (
            torch.linspace(math.sqrt(first), math.sqrt(last), self.steps, dtype=torch.float64, device="cpu")
            ** 2
        )

    @cached_property
    def alphas_cumprod(self) -> Tensor:
        """abar_t, the image's share of the variance; float64 [T]."""
        return torch.cumprod(1 - self.betas, dim=0)

    @cached_property
    def snr(self) -> Tensor:
        """Signal-to-noise ratio abar_t / (1 - abar_t), of variances; float64 [T]."""
        return self.alphas_cumprod / (1 - self.alphas_cumprod)

    # ---- the forward process -------------------------------------------------------------------------------

    def abar(self, timesteps: Tensor, like: Tensor) -> Tensor:
        """abar of each image, float64, shaped to multiply `like` [b, ...].

        Raises ValueError for timesteps [b] that are not whole numbers from 0 to T - 1.
        """
        check_timesteps(timesteps, like, self.steps)
        table = self.alphas_cumprod.to(like.device)
        return table[timesteps.long()].reshape(-1, *[1] * (like.dim() - 1))

    def add_noise(self, clean: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """x_t from x_0 [b, ...], noise of the same shape and timesteps [b]."""
        abar = self.abar(timesteps, clean)
        return abar.sqrt().to(clean.dtype) * clean + (1 - abar).sqrt().to(clean.dtype) * noise

    # ---- diffusers' config ---------------------------------------------------------------------------------

    def to_fields(self) -> dict[str, Any]:
        """The schedule's fields of a diffusers scheduler_config.json."""
        betas = {} if self.kind == "cosine" else dict(beta_start=self.beta_start, beta_end=self.beta_end)
        return dict(
            beta_schedule=_THEIR_KINDS[self.kind],
            num_train_timesteps=self.steps,
            rescale_betas_zero_snr=self.zero_terminal_snr,
            trained_betas=None,
            **betas,
        )

    @classmethod
    def from_fields(cls, config: dict[str, Any]) -> "NoiseSchedule":
        """From a scheduler_config.json. Absent fields have diffusers' defaults (linear, 0.0001 to 0.02)."""
        theirs = config.get("beta_schedule", "linear")
        ours = {name: kind for kind, name in _THEIR_KINDS.items()}
        if theirs not in ours or config.get("trained_betas") is not None:
            raise ValueError(
                f"scheduler_config.json has beta_schedule={theirs!r} and trained_betas="
                f"{config.get('trained_betas')!r}; supported: {', '.join(ours)}, without trained_betas"
            )
        betas = (None, None)
        if theirs != "squaredcos_cap_v2":
            betas = (config.get("beta_start", 1e-4), config.get("beta_end", 0.02))
        return cls(
            ours[theirs],
            config.get("num_train_timesteps", 1000),
            *betas,
            zero_terminal_snr=config.get("rescale_betas_zero_snr", False),
        )


def _cosine_betas(steps: int) -> Tensor:
    """beta_t = 1 - f(t + 1) / f(t) with f the squared cosine from 0 to T, shifted by 0.008."""
    time = torch.arange(steps + 1, dtype=torch.float64, device="cpu") / steps
    share = torch.cos((time + 0.008) / 1.008 * math.pi / 2) ** 2
    return (1 - share[1:] / share[:-1]).clamp(max=_MAX_BETA)


def rescale_zero_terminal_snr(betas: Tensor) -> Tensor:
    """Betas [T] whose last signal is exactly 0: sqrt(abar) is shifted to end at 0, scaled to begin as before.

    Lin et al. 2023, arXiv:2305.08891, algorithm 1. The last beta becomes 1.
    """
    signal = torch.cumprod(1 - betas, dim=0).sqrt()
    first, last = signal[0], signal[-1]
    abar = ((signal - last) * first / (first - last)) ** 2
    kept = torch.cat([abar[:1], abar[1:] / abar[:-1]])
    return 1 - kept


def check_timesteps(timesteps: Tensor, like: Tensor, steps: int) -> None:
    """Raise ValueError unless timesteps are [b], one for each image of `like`, whole, and of the schedule.

    Values are looked at on the CPU only: elsewhere that would wait for the device in every step.
    """
    if timesteps.shape != like.shape[:1]:
        raise ValueError(
            f"timesteps must be [{like.shape[0]}], one for each image, got {list(timesteps.shape)}"
        )
    if timesteps.is_floating_point() or timesteps.is_complex():
        raise ValueError(f"timesteps of training are whole numbers, got {timesteps.dtype}")
    if timesteps.device.type == "cpu" and timesteps.numel() and not torch.compiler.is_compiling():
        low, high = int(timesteps.min()), int(timesteps.max())
        if low < 0 or high >= steps:
            raise ValueError(f"timesteps must be from 0 to {steps - 1}, got {low} to {high}")
