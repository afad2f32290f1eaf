"""Denoising diffusion: predict what was mixed into an image, at a random level of noise.

What is random belongs to the image, not to the process that happens to train on it: each image of a batch
brings a seed ("noise_seed" [b]), and its timestep, its noise and whether its caption is dropped follow from
that seed alone. So one device, two ranks, any micro-batches and a resumed run all compute the same loss.

Shapes: b images, c channels, h height, w width; ... the rest of a condition, such as l tokens.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fmlab.data.batch import Batch
from fmlab.models.diffusion.prediction import check_prediction, min_snr_weight, target
from fmlab.models.diffusion.schedule import NoiseSchedule
from fmlab.objectives.terms import LossTerms, Term

_OURS = ("noise_seed", "timesteps", "noise")


@dataclass(frozen=True)
class Draws:
    """What is random about each image of a batch.

    timesteps: int64 [b], uniform over the schedule. noise: standard normal [b,c,h,w].
    dropping: float64 [b], uniform in [0, 1): the caption is dropped where it is below the probability.
    """

    timesteps: Tensor
    noise: Tensor
    dropping: Tensor


def draw(seeds: Tensor, like: Tensor, steps: int) -> Draws:
    """Draws for images of the shape, dtype and device of `like` [b,c,h,w], from their seeds int64 [b].

    Drawn on the CPU whatever the device, one generator an image, so that every machine draws the same.
    """
    if seeds.shape != like.shape[:1] or seeds.is_floating_point():
        raise ValueError(
            f"noise_seed must hold a whole number for each of the {like.shape[0]} images, got {seeds.dtype} "
            f"{list(seeds.shape)}"
        )
    timesteps, noises, dropping = [], [], []
    for seed in seeds.tolist():
        generator = torch.Generator().manual_seed(seed)
        timesteps.append(torch.randint(steps, (), generator=generator))
        dropping.append(torch.rand((), generator=generator, dtype=torch.float64))
        noises.append(torch.randn(like.shape[1:], generator=generator))
    if not noises:
        return Draws(seeds, like, seeds.double())
    return Draws(
        torch.stack(timesteps).to(like.device),
        torch.stack(noises).to(like),
        torch.stack(dropping).to(like.device),
    )


class Denoising:
    """Mean squared error of a diffusion model's prediction, as one loss term named "denoising".

    The model is called as model(sample=noisy [b,c,h,w], timestep=[b], **conditions) and returns a mapping
    with "sample" [b,c,h,w]. Conditions are all other tensors of the batch, such as
    "encoder_hidden_states" or "input_ids".

    Count is the number of images, sum adds up each image's mean over its elements (times its weight): with
    images of one size the loss is torch's mse_loss.

    schedule:       the noise schedule; prediction: "epsilon", "v" or "x0"
    min_snr_gamma:  weigh timesteps by min-SNR with this gamma (the paper's is 5); None weighs them equally
    empty:          what stands for no caption: name of a condition -> one row of it, such as input_ids [l]
    drop_probability: of replacing all these conditions, for classifier-free guidance; 0.1 if `empty` is given
    image:          name of the clean images in the batch
    encode:         images -> latents, without gradients; applied once, here

    A batch has "noise_seed" [b], see NoiseSeeds; "timesteps" [b] and "noise" [b,c,h,w] may be given instead,
    or to replace one of the two draws. Raises ValueError for zero terminal SNR with epsilon prediction, and
    for settings that would do nothing.
    """

    name = "denoising"

    def __init__(
        self,
        schedule: NoiseSchedule,
        prediction: str = "epsilon",
        min_snr_gamma: float | None = None,
        empty: Mapping[str, Tensor] | None = None,
        drop_probability: float | None = None,
        image: str = "pixel_values",
        encode: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        check_prediction(schedule, prediction)
        if min_snr_gamma is not None and min_snr_gamma <= 0:
            raise ValueError(f"min_snr_gamma must be positive, got {min_snr_gamma}")
        if drop_probability is None:
            drop_probability = 0.1 if empty else 0.0
        if not 0 <= drop_probability <= 1:
            raise ValueError(f"drop_probability must be from 0 to 1, got {drop_probability}")
        if bool(empty) != bool(drop_probability):
            raise ValueError(
                f"drop_probability={drop_probability} and empty={'given' if empty else None} do nothing "
                "without each other: say what stands for no caption, or leave both out"
            )
        self.schedule, self.prediction, self.min_snr_gamma = schedule, prediction, min_snr_gamma
        self.empty, self.drop_probability = dict(empty or {}), drop_probability
        self.image, self.encode = image, encode

    def __call__(self, model: Any, batch: Batch) -> LossTerms:
        """Run the model and return {"denoising": Term}."""
        # region step
        clean = self._clean(batch)
        draws = self._draws(batch, clean)
        noisy = self.schedule.add_noise(clean, draws.noise, draws.timesteps)
        conditions = self._conditions(batch, draws.dropping)
        output = model(sample=noisy, timestep=draws.timesteps, **conditions)["sample"]
        abar = self.schedule.abar(draws.timesteps, clean)
        wanted = target(self.prediction, clean, draws.noise, abar)
        if output.shape != wanted.shape:
            raise ValueError(f"the model predicts {list(output.shape)}, the images are {list(wanted.shape)}")
        # Squares add up in fp32 at least, also under autocast.
        precise = torch.promote_types(output.dtype, torch.float32)
        error_b = (output.to(precise) - wanted.to(precise)).square().flatten(1).mean(1)
        if self.min_snr_gamma is not None:
            weight = min_snr_weight(self.prediction, abar, self.min_snr_gamma)
            error_b = error_b * weight.flatten().to(precise)
        return {self.name: Term(sum=error_b.sum(), count=self.counts(batch)[self.name])}
        # endregion

    def counts(self, batch: Batch) -> dict[str, Tensor]:
        """How many images the batch has."""
        return {self.name: torch.tensor(batch[self.image].shape[0])}

    def _clean(self, batch: Batch) -> Tensor:
        """The clean images or latents."""
        if self.image not in batch:
            raise ValueError(f"the batch has no {self.image!r}; it holds {sorted(batch)}")
        if self.encode is None:
            return batch[self.image]
        with torch.no_grad():
            return self.encode(batch[self.image])

    def _draws(self, batch: Batch, clean: Tensor) -> Draws:
        """What the seeds give, or the batch itself."""
        given = {name: batch[name] for name in ("timesteps", "noise") if name in batch}
        if "noise_seed" in batch:
            drawn = draw(batch["noise_seed"], clean, self.schedule.steps)
        elif len(given) < 2 or self.drop_probability:
            raise ValueError(
                "the batch needs noise_seed, one whole number an image (wrap the sampler in NoiseSeeds); "
                "without captions to drop, timesteps and noise will do"
            )
        else:
            drawn = Draws(given["timesteps"], given["noise"], torch.ones(len(clean), dtype=torch.float64))
        noise = given.get("noise", drawn.noise)
        if noise.shape != clean.shape:
            raise ValueError(f"noise must be {list(clean.shape)}, as the images, got {list(noise.shape)}")
        return Draws(given.get("timesteps", drawn.timesteps), noise, drawn.dropping)

    def _conditions(self, batch: Batch, dropping: Tensor) -> Batch:
        """The other tensors of the batch, with those of dropped captions replaced."""
        conditions = {name: t for name, t in batch.items() if name not in (*_OURS, self.image)}
        for name, row in self.empty.items():
            if name not in conditions or conditions[name].shape[1:] != row.shape:
                got = f"{list(conditions[name].shape[1:])}" if name in conditions else "absent"
                raise ValueError(
                    f"empty[{name!r}] is {list(row.shape)}, so each row of the batch's must be, but is {got}"
                )
            dropped = (dropping < self.drop_probability).reshape(-1, *[1] * row.dim())
            conditions[name] = torch.where(dropped, row.to(conditions[name]), conditions[name])
        return conditions


class Sampler(Protocol):
    """What NoiseSeeds needs of the sampler that it wraps; those of fmlab.data have it."""

    batch_size: int
    rank: int
    world_size: int
    windows_per_epoch: int
    step: int

    def batch(self, step: int) -> Batch: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class NoiseSeeds:
    """A sampler with "noise_seed" [b] in each batch: a function of (seed, step, place in the global batch).

    An image that comes again in a later epoch gets another seed; the number of ranks changes nothing.
    """

    def __init__(self, sampler: Sampler, seed: int = 0) -> None:
        self.sampler, self.seed = sampler, seed
        self.batch_size, self.rank, self.world_size = sampler.batch_size, sampler.rank, sampler.world_size
        self.windows_per_epoch = sampler.windows_per_epoch

    @property
    def step(self) -> int:
        return self.sampler.step

    @step.setter
    def step(self, step: int) -> None:
        self.sampler.step = step

    def batch(self, step: int) -> Batch:
        """This rank's part of the batch of step `step`, in any order of calls."""
        return {**self.sampler.batch(step), "noise_seed": self.seeds(step)}

    def seeds(self, step: int) -> Tensor:
        """The seeds of this rank's part of the batch of step `step`, int64 [b]."""
        share = self.batch_size // self.world_size
        first = step * self.batch_size + self.rank * share
        return torch.tensor([noise_seed(self.seed, first + i) for i in range(share)])

    def __iter__(self) -> Iterator[Batch]:
        """Endless batches from the current step on."""
        while True:
            batch = self.batch(self.step)
            self.step += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """What resuming needs."""
        return {**self.sampler.state_dict(), "noise_seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at a saved step. Raises ValueError when the data or the seed of the noise has changed."""
        state = dict(state)
        saved = state.pop("noise_seed", None)
        if saved != self.seed:
            raise ValueError(
                f"cannot resume with other noise; noise_seed: {saved!r} saved, {self.seed!r} now"
            )
        self.sampler.load_state_dict(state)


_64 = (1 << 64) - 1


def noise_seed(seed: int, index: int) -> int:
    """A seed of 63 bits from two counters, mixed so that neighbours have nothing in common.

    SplitMix64's finaliser (Steele, Lea & Flood 2014, "Fast splittable pseudorandom number generators").
    """
    mixed = (seed * 0xD1342543DE82EF95 + (index + 1) * 0x9E3779B97F4A7C15) & _64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _64
    return (mixed ^ (mixed >> 31)) >> 1
