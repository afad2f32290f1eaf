"""Checkers of notebook 1.6."""

import math
from typing import TYPE_CHECKING, Any

from fmlab.lab.exercises import Answer, NotYet, exercise

if TYPE_CHECKING:
    from torch import Tensor

LEVELS = (0.9, 0.5, 0.02)


@exercise("1.6.1", "image and noise from v", returns=tuple)
def image_and_noise(answer: Answer) -> str:
    import torch

    generator = torch.Generator().manual_seed(11)
    for abar in LEVELS:
        clean, noise = torch.randn(2, 2, 3, 4, 4, generator=generator, dtype=torch.float64)
        signal, level = abar**0.5, (1 - abar) ** 0.5
        sample, v = signal * clean + level * noise, signal * noise - level * clean
        got = answer(sample.clone(), v.clone(), abar)
        image, found = _two_tensors(got, sample)
        what = f"at abar = {abar}"
        if _same(image, clean) and _same(found, noise):
            continue
        if _same(image, noise) and _same(found, clean):
            raise NotYet(f"{what} the two are swapped", "the image comes first, the noise second")
        if _same(image, abar * sample - (1 - abar) * v):
            raise NotYet(
                f"{what} the image is off by up to {_off(image, clean):.2g}",
                "abar is a share of the variance: which power of it multiplies the picture?",
                "its square root",
            )
        if _same(image, level * sample - signal * v):
            raise NotYet(
                f"{what} the image is off by up to {_off(image, clean):.2g}",
                "signal and noise level are swapped",
                "put in v = signal · noise - level · image and collect: signal² + level² = 1",
            )
        if not _same(image, clean):
            raise NotYet(
                f"{what} the image is off by up to {_off(image, clean):.2g}",
                "solve two equations for two unknowns: multiply one by signal, the other by noise level",
                "signal · sample - level · v",
            )
        raise NotYet(
            f"{what} the image is right, the noise off by up to {_off(found, noise):.2g}",
            "multiply the other way round, and mind the sign",
            "level · sample + signal · v",
        )
    return f"{len(LEVELS)} noise levels, exact"


@exercise("1.6.2", "one step of DDIM")
def ddim_step(answer: Answer) -> str:
    import torch

    generator = torch.Generator().manual_seed(12)
    for before, after in ((0.02, 0.3), (0.5, 0.7), (0.9, 1.0)):
        sample, noise = torch.randn(2, 2, 3, 4, 4, generator=generator, dtype=torch.float64)
        clean = (sample - (1 - before) ** 0.5 * noise) / before**0.5
        right = after**0.5 * clean + (1 - after) ** 0.5 * noise
        got = answer(sample.clone(), noise.clone(), before, after)
        if not isinstance(got, torch.Tensor) or got.shape != right.shape:
            raise NotYet(
                f"got {list(getattr(got, 'shape', [])) or type(got).__name__}",
                "return the new sample, as large",
            )
        if _same(got, right):
            continue
        what = f"from abar = {before} to {after}: off by up to {_off(got, right):.2g}"
        if _same(got, clean):
            raise NotYet(
                what,
                "that is the predicted image: the new sample still has noise",
                "mix image and noise again, now at the level `after`",
            )
        if _same(got, after**0.5 * clean):
            raise NotYet(what, "the noise of the new level is missing", "add sqrt(1 - after) · noise")
        if _same(got, after**0.5 * clean + (1 - before) ** 0.5 * noise):
            raise NotYet(what, "the new sample still has the old level of noise", "sqrt(1 - after)")
        if _same(got, after * clean + (1 - after) * noise):
            raise NotYet(what, "abar is a share of the variance", "mix with square roots")
        wrong = (sample - (1 - after) ** 0.5 * noise) / after**0.5
        if _same(got, after**0.5 * wrong + (1 - after) ** 0.5 * noise) or _same(got, sample):
            raise NotYet(
                what,
                "the sample has the level `before`: take the noise of that level out of it",
                "(sample - sqrt(1 - before) · noise) / sqrt(before)",
            )
        raise NotYet(
            what,
            "first the image that the noise implies, then both mixed at the new level",
            "sqrt(after) · image + sqrt(1 - after) · noise",
        )
    return "three steps, the last one to a clean image"


@exercise("1.6.3", "no signal at the end")
def zero_terminal(answer: Answer) -> str:
    import torch

    from fmlab.models.diffusion import NoiseSchedule

    for kind, steps in (("scaled_linear", 1000), ("linear", 300)):
        signal = NoiseSchedule(kind, steps).alphas_cumprod.sqrt()
        right = (signal - signal[-1]) * signal[0] / (signal[0] - signal[-1])
        got = answer(signal.clone())
        if not isinstance(got, torch.Tensor) or got.shape != signal.shape:
            raise NotYet("that is no tensor of as many numbers", "return the new signal, as long as the old")
        got = got.double()
        if _same(got, right, 1e-6):
            continue
        first, last = float(got[0]), float(got[-1])
        what = f"first {first:.5f} (it was {float(signal[0]):.5f}), last {last:.5f}"
        if abs(last) > 1e-9:
            raise NotYet(what, "the last must be exactly 0", "subtract what the last one is from all of them")
        if abs(first - float(signal[0])) > 1e-6:
            raise NotYet(
                what,
                "the first has moved: where noise is least, nothing may change",
                "multiply by first / (first - last) after subtracting",
            )
        if _same(got[:-1], signal[:-1], 1e-9):
            raise NotYet(
                what,
                "only the last has changed: from one step to the next, nearly all noise would have to go",
                "move every one of them down by the same amount, then scale",
            )
        raise NotYet(
            what,
            "work on the signal itself, not on its square",
            "(signal - last) · first / (first - last)",
        )
    return "two schedules, first kept and last 0"


def _two_tensors(got: Any, like: "Tensor") -> "tuple[Tensor, Tensor]":
    import torch

    if len(got) != 2 or not all(isinstance(t, torch.Tensor) and t.shape == like.shape for t in got):
        raise NotYet("that is not a pair of tensors as large as the sample", "return image, noise")
    return got[0].double(), got[1].double()


def _same(a: "Tensor", b: "Tensor", most: float = 1e-5) -> bool:
    return bool(math.isfinite(_off(a, b)) and _off(a, b) < most)


def _off(a: "Tensor", b: "Tensor") -> float:
    return float((a - b).abs().max())
