"""Checkers of notebook 3.2."""

import random
from typing import Any

from fmlab.lab.exercises import Answer, NotYet, exercise

TOLERANCE = 1e-3
#: Norm of each gradient on the CPU. The key's bias has none but rounding; the norm's bias is small and real.
NORMS = {"embed": 3.0, "query": 0.5, "key.bias": 1e-10, "mlp": 1.0, "norm.bias": 1e-4}

#: (what is wrong on the chip: parameter -> factor of its gradient, what to say first and then)
FAULTS: tuple[tuple[dict[str, float], str, str], ...] = (
    (
        {},
        "a gradient that is rounding alone has another direction on each device",
        "divide by the norm or by 1e-6 of the global norm, whichever is larger",
    ),
    (
        {"query": -1.0},
        "norms alone do not see a direction",
        "take the norm of the difference, not the difference of the norms",
    ),
    (
        {"norm.bias": 1.5},
        "a small gradient may differ by much of itself",
        "each difference is measured against its own gradient",
    ),
    (
        {"mlp": float("nan")},
        "NaN is neither larger nor smaller than anything",
        "`not off <= tolerance` is true for NaN, `off > tolerance` is not",
    ),
    (
        {"key.bias": 1e9},
        "what is tiny on the CPU may be large on the chip",
        "a small gradient is compared with the floor, not left out",
    ),
    ({"embed": 0.5, "mlp": 1.01}, "more than one may differ", "return every name, not the worst"),
)


@exercise("3.2.1", "which gradients differ?", returns=list)
def differing(answer: Answer) -> str:
    import torch

    draw = torch.Generator().manual_seed(321)
    for factors, hint, more in FAULTS:
        cpu, chip = {}, {}
        for name, norm in NORMS.items():
            direction = torch.randn(6, 5, generator=draw)
            cpu[name] = direction * (norm / direction.norm())
            rounding = torch.randn(6, 5, generator=draw)
            noise = rounding * (max(1e-5 * norm, 1e-10) / rounding.norm())
            chip[name] = (cpu[name] + noise) * factors.get(name, 1.0)
        copies = [{name: gradient.clone() for name, gradient in side.items()} for side in (cpu, chip)]
        got = answer(*copies, TOLERANCE)
        if len(got) == len(factors) and set(got) == set(factors):
            continue
        fault = ", ".join(f"{name} times {factor:g}" for name, factor in factors.items())
        raise NotYet(f"got {got} where the chip had {fault or 'rounding alone'}", hint, more)
    return f"{len(FAULTS)} ports: a turned, a small, a missing number, one that should be zero"


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
