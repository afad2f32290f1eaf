"""Checkers of notebook 3.2."""

import random
from typing import Any

from fmlab.lab.exercises import Answer, NotYet, exercise

EPOCHS = (
    ([40, 90, 130, 20, 90, 33, 100, 5, 60], 2, [64, 128, 256]),
    ([10] * 17, 8, [16, 32]),
    ([100, 30, 64, 65, 10, 12, 200, 7], 2, [64, 128, 256]),
    ([5, 9, 300, 2], 4, [8, 512]),
)


def _shapes(lengths: list[int], size: int, buckets: list[int]) -> list[tuple[int, int]]:
    batches = [lengths[start : start + size] for start in range(0, len(lengths), size)]
    return [(len(batch), next(b for b in buckets if b >= max(batch))) for batch in batches]


@exercise("3.2.1", "count the compilations", returns=int)
def compilations(answer: Answer) -> str:
    for lengths, size, buckets in EPOCHS:
        shapes = _shapes(lengths, size, buckets)
        right = len(set(shapes))
        got = answer(list(lengths), size, list(buckets))
        if got == right:
            continue
        what = f"got {got} and not {right} for lengths {lengths} in batches of {size}, buckets {buckets}"
        whole = [shape for shape in shapes if shape[0] == size]
        batches = [lengths[start : start + size] for start in range(0, len(lengths), size)]
        if got == len({(len(batch), max(batch)) for batch in batches}):
            raise NotYet(
                what, "round the longest sentence up to a bucket", "the smallest bucket that holds it"
            )
        if got == len(shapes):
            raise NotYet(what, "a shape that came before is not compiled again", "collect shapes in a set")
        if len(lengths) % size and got == len({length for _, length in shapes}):
            raise NotYet(
                what,
                "a shape is more than its length",
                "the last batch may have fewer rows, and rows are part of the shape",
            )
        if len(lengths) % size and got == len(set(whole)):
            raise NotYet(what, "count all batches", "the last batch is not dropped, only smaller")
        raise NotYet(what, "write down (rows, padded length) of each batch of the first epoch by hand")
    return f"{len(EPOCHS)} epochs, with small last batches and repeated shapes"


@exercise("3.2.2", "clip without asking the host", returns=list)
def clip(answer: Answer) -> str:
    import torch

    from fmlab.backends.preflight.watch import Watch
    from fmlab.backends.preflight.where import Modules

    torch.manual_seed(322)
    for size, limit in ((5.0, 1.0), (0.01, 1.0), (1.0, 0.3)):
        gradients = [torch.randn(4, 3) * size, torch.randn(7) * size * 0.2]
        norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        right = [gradient * min(1.0, limit / norm.item()) for gradient in gradients]
        with Watch(Modules(torch.nn.Identity())) as record:
            got = answer([gradient.clone() for gradient in gradients], limit)
        wrong = _wrong_clip(got, gradients, right, norm.item(), limit)
        if wrong is not None:
            raise wrong
        if record.reads:
            read = next(iter(record.reads)).what
            raise NotYet(
                f"the values are right, and the host read a number: {read}",
                "min(1, limit / norm) can be computed on tensors",
                "torch.clamp(limit / norm, max=1.0) is a tensor, and nobody looks at it",
            )
    return "large, small and medium gradients; nothing was read by the host"


def _wrong_clip(got: Any, gradients: list[Any], right: list[Any], norm: float, limit: float) -> NotYet | None:
    import torch

    same = [torch.is_tensor(a) and a.shape == b.shape for a, b in zip(got, right, strict=False)]
    if len(got) != len(right) or not all(same):
        return NotYet(f"got {len(got)} values", "return one gradient for each, of the same shape")
    if all(torch.allclose(a, b, rtol=1e-3, atol=1e-7) for a, b in zip(got, right, strict=True)):
        return None
    total = torch.cat([gradient.flatten() for gradient in got]).norm().item()
    what = f"a norm of {norm:.3g} with limit {limit} became {total:.3g}"
    if norm <= limit:
        return NotYet(what, "small gradients must stay as they are", "scale by min(1, limit / norm)")
    factors = [(a / b).flatten() for a, b in zip(got, gradients, strict=True)]
    if all(factor.std() < 1e-3 for factor in factors):
        return NotYet(
            what,
            "one norm over all gradients, and one factor for all",
            "the root of the sum of squares of the norms: torch.stack(norms).norm()",
        )
    return NotYet(what, "the direction changed: clip the norm, not each number", "multiply all by one factor")


@exercise("3.2.3", "which fault is it?", returns=str)
def diagnose(answer: Answer) -> str:
    rng = random.Random(323)
    for kind in ("sound", "untied", "scaled", "rounding", "untied", "scaled", "rounding", "sound"):
        report = _report(rng, kind)
        got = answer(dict(report))
        if got == kind:
            continue
        what = f"got {got!r} for {_short(report)}"
        if kind == "sound":
            raise NotYet(what, "nothing differs by more than 1e-4", "compare with a tolerance, not with ==")
        if kind == "untied":
            raise NotYet(
                what, "only one parameter differs, and it is the tied one", "ask first whether it is embed"
            )
        if kind == "rounding":
            raise NotYet(
                what,
                "look at the cosine too: a factor would leave it at 1",
                "rounding turns gradients a little",
            )
        raise NotYet(
            what, "the ratio of the norms is the same for all", "a loss divided twice scales all gradients"
        )
    return "sound, untied, scaled and rounded gradients"


def _report(rng: random.Random, kind: str) -> dict[str, tuple[float, float, float]]:
    factor = rng.choice([0.25, 0.5, 2.0, 8.0])
    report = {}
    for name in ("embed", "attention", "mlp", "norm"):
        norm = rng.uniform(0.1, 3.0)
        ported, cosine = norm * (1 + rng.uniform(-2e-5, 2e-5)), 1 - rng.uniform(1e-7, 1e-5)
        if kind == "untied" and name == "embed":
            ported, cosine = norm * rng.uniform(0.3, 0.8), rng.uniform(0.5, 0.95)
        elif kind == "scaled":
            ported *= factor
        elif kind == "rounding":
            ported, cosine = (
                norm * (1 + rng.choice([-1, 1]) * rng.uniform(2e-3, 1e-2)),
                rng.uniform(0.985, 0.999),
            )
        report[name] = (norm, ported, cosine)
    return report


def _short(report: dict[str, tuple[float, float, float]]) -> str:
    return ", ".join(f"{name} x{b / a:.4f} cosine {c:.4f}" for name, (a, b, c) in report.items())
