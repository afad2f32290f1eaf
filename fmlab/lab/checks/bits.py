"""Exercises of 1.15, bits."""

import math
from collections.abc import Callable
from typing import Any

from fmlab.lab.exercises import Answer, NotYet, exercise


def _buggy() -> dict[str, tuple[Callable[[Any], Any], str]]:
    """Roundings to bf16 with one bug each, and a hint at where it shows."""
    import torch

    def bits(x: Any) -> Any:
        return x.view(torch.int32)

    def back(b: Any) -> Any:
        return (b & -65536).view(torch.float32)

    def half_up(x: Any) -> Any:
        return back(bits(x) + 0x8000)

    def truncated(x: Any) -> Any:
        return back(bits(x))

    def saturated(x: Any) -> Any:
        largest = torch.finfo(torch.bfloat16).max
        return x.bfloat16().float().clamp(-largest, largest)

    def flushed(x: Any) -> Any:
        rounded = x.bfloat16().float()
        return torch.where(rounded.abs() < 2.0**-126, 0.0, rounded)

    def one_sided(x: Any) -> Any:
        """Ties of negative numbers go up, as floor(steps + 1/2) has it."""
        down = back(bits(x))
        return torch.where((x < 0) & ((bits(x) & 0xFFFF) == 0x8000), down, x.bfloat16().float())

    return {
        "truncates": (truncated, "what lies in the upper half of a gap"),
        "half-up": (half_up, "ties: exactly in the middle of a gap"),
        "one-sided": (one_sided, "ties of negative numbers"),
        "saturates": (saturated, "what is larger than the largest bf16 number rounds to infinity"),
        "flushes": (flushed, "subnormal numbers, below 2^-126"),
    }


@exercise("1.15.1", "find the rounding bug", returns=float)
def find_bug(answer: Answer) -> str:
    import torch

    bugs = _buggy()
    for rounding, hint in bugs.values():
        got = answer(rounding)
        if math.isnan(got):
            raise NotYet(
                "a rounding with a bug passed your search",
                f"where did you not look? {hint}",
                "build candidates from bits: random ones, and upper halves followed by 0x8000 (ties)",
            )
        x = torch.tensor([got], dtype=torch.float32)
        if not math.isfinite(got) or float(x) != got:
            raise NotYet(f"got {got!r}", "the answer is a finite fp32 number, an input of the rounding")
        if torch.equal(rounding(x), x.bfloat16().float()):
            raise NotYet(
                f"at {got!r} this rounding is right: {float(rounding(x))!r}",
                "return the input for which the result is wrong, not the result",
                "compare rounding(x) with x.bfloat16().float(), which is right",
            )
    got = answer(lambda x: x.bfloat16().float())
    if not math.isnan(got):
        raise NotYet(
            f"a rounding without a bug was accused, at {got!r}",
            "return nan when no candidate is wrong",
            "not-a-number is unequal to itself: leave it out of the candidates",
        )
    return f"{len(bugs)} bugs found, and one rounding acquitted"


@exercise("1.15.2", "round by chance")
def stochastic(answer: Answer) -> str:
    import torch

    draws = torch.arange(65536, dtype=torch.int32)
    numbers = [1.0 + 2**-10, 0.1, -3.14159, 1024.5, -1e-30]
    for number in numbers:
        x = torch.full((65536,), number)
        got = answer(x.clone(), draws)
        if not isinstance(got, torch.Tensor) or got.dtype not in (torch.bfloat16, torch.float32):
            raise NotYet(f"got {type(got).__name__}", "the result is a tensor in bfloat16 or float32")
        values = got.double()
        inside = (x.view(torch.int32) & -65536).view(torch.float32).double()
        gap = inside.abs().log2().floor().exp2() * 2**-7
        step = (values - inside).abs() / gap
        if not bool(((step == 0) | (step == 1)).all()):
            raise NotYet(
                f"{number} became {float(values[(step != 0) & (step != 1)][0])!r}",
                "the result is one of the two bf16 numbers around x: the low 16 bits are 0",
            )
        if len(values.unique()) == 1:
            raise NotYet(f"{number} always became {float(values[0])!r}", "the draws must decide")
        mean, exact = float(values.mean()), float(x[0].double())
        if mean != exact:
            what = f"over all draws {number} became {mean!r} on average"
            share = float((step == 1).double().mean())
            if abs(share - 0.5) < 0.01:
                raise NotYet(
                    what, "not a coin: the probability is how far x is on the way to the next number"
                )
            if abs(share + abs(exact - float(inside[0])) / float(gap[0]) - 1) < 1e-3:
                raise NotYet(what, "the probabilities of the two ends are exchanged")
            raise NotYet(
                what,
                "close, but not exact: every draw counts once, 0 and 65535 too",
                "away from zero if draw + low 16 bits reach 65536",
            )
    return f"{len(numbers)} numbers, each exactly right on average over all 65,536 draws"


@exercise("1.15.3", "a block that shares its scale")
def mx_block(answer: Answer) -> str:
    import torch

    from fmlab.train.precision import mx_format, mx_round, round_to

    torch.manual_seed(5)
    blocks = [torch.randn(32) * size for size in (1.0, 1e-4, 3e5, 1.0)]
    blocks += [torch.zeros(32), torch.full((32,), 1.9), torch.eye(32)[3] * 8]
    for name in ("mxfp4", "mxfp8-e4m3"):
        fmt = mx_format(name)
        element = fmt.element
        for block in blocks:
            right = mx_round(block, fmt)
            got = answer(block.clone(), fmt.max_exponent, lambda x, e=element: round_to(x, e, saturate=True))
            if not isinstance(got, torch.Tensor) or got.shape != block.shape:
                raise NotYet(f"got {got!r:.80}", "the result is a tensor of the 32 numbers")
            if torch.equal(got.float(), right):
                continue
            raise _wrong_block(block, got.float(), right, fmt)
    return "7 blocks in MXFP4 and MXFP8, zeros and powers of two among them"


def _wrong_block(block: Any, got: Any, right: Any, fmt: Any) -> NotYet:
    from fmlab.train.precision import round_to

    off = float((got - right).abs().max())
    what = f"a block whose largest is {float(block.abs().max()):.4g} is off by {off:.3g}"
    if bool(got.isnan().any()):
        return NotYet(what + " (nan)", "a block of zeros has no logarithm: it stays zero")
    fitted = float(block.abs().max()) / fmt.max
    if bool(((round_to(block / fitted, fmt.element, saturate=True) * fitted - got).abs() < 1e-6).all()):
        return NotYet(what, "the scale is a power of two: eight bits of exponent and no mantissa")
    return NotYet(
        what,
        "the scale's exponent is floor(log2(largest)) minus that of the element format's largest",
        "neither rounded nor up: what does not fit saturates",
    )
