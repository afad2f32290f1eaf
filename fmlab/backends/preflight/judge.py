"""What the watched steps mean on a chip."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import zip_longest

from fmlab.backends.preflight.finding import Finding
from fmlab.backends.preflight.limits import Limits
from fmlab.backends.preflight.watch import BF16_EXACT, Record, Seen


def judge(records: Sequence[Record], limits: Limits) -> list[Finding]:
    """Findings of the last step, which is a usual one, and of what changed from the one before."""
    usual = records[-1]
    doubles, why = limits.doubles
    found = [
        *_each(
            usual.reads,
            lambda seen: Finding(
                "warning",
                "host read",
                f"{seen.what} makes the host wait for the device and cuts the program in two",
                seen.place(),
                "keep it a tensor (torch.where, torch.clamp), or read it every hundred steps, after the step",
            ),
        ),
        *_each(
            usual.shaped,
            lambda seen: Finding(
                limits.shaped,
                "data-dependent shape",
                f"the result of {seen.what} is as long as the numbers say: no fixed program computes it",
                seen.place(),
                "keep the full shape and mask: torch.where, multiplication by the mask, labels of -100",
            ),
        ),
        *_each(
            usual.doubles,
            lambda seen: Finding(
                doubles,
                "dtype",
                f"{seen.what} gives float64: {why}",
                seen.place(),
                "use float32; a Python float or numpy array that meets a tensor may be where it comes from",
            ),
        ),
        *_each(
            usual.narrow,
            lambda seen: Finding(
                "warning",
                "dtype",
                f"{seen.what}: its 8 significant bits hold integers up to {BF16_EXACT}, so that the loss "
                "moves in steps",
                seen.place(),
                "compute the loss in float32: logits.float()",
            ),
        ),
        *_each(usual.infinite, _mask),
        *_each(
            usual.nans,
            lambda seen: Finding(
                "error",
                "mask",
                "softmax of a row that is masked completely gives NaN",
                seen.place(),
                "mask with a large finite number of the dtype, or zero such rows afterwards by torch.where",
            ),
        ),
        *_attention(usual.queries, limits),
    ]
    return found + _changing(records[-2], usual)


def _each(seen: Counter[Seen], finding: Callable[[Seen], Finding]) -> list[Finding]:
    """One finding for each line of the program, whichever modules run it."""
    lines: dict[tuple[str, str], list[Seen]] = {}
    for one in seen:
        lines.setdefault((one.what, one.where), []).append(one)
    found = []
    for same in lines.values():
        first, more = same[0], len({one.module for one in same}) - 1
        if more:
            first = replace(first, module=f"{first.module or 'the step'} and {more} more")
        found.append(replace(finding(first), times=sum(seen[one] for one in same)))
    return found


def _mask(seen: Seen) -> Finding:
    bare = seen.what == "-inf"
    return Finding(
        "note" if bare else "warning",
        "mask",
        "-inf as a number of the program: 0 * -inf and a row of -inf give NaN" if bare
        else f"a mask of {seen.what} where the tensor is bf16",
        seen.place(),
        "use torch.finfo(tensor.dtype).min of the tensor that is masked",
    )  # fmt: skip


def _attention(queries: Counter[int], limits: Limits) -> list[Finding]:
    if limits.attention is None:
        return []
    odd = sorted(length for length in queries if length % limits.attention)
    if not odd:
        return []
    return [
        Finding(
            "note",
            "tiles",
            f"attention over {', '.join(map(str, odd))} queries does not take the fused NKI kernel, which "
            f"wants multiples of {limits.attention}; the scores are held in full",
            "scaled_dot_product_attention",
            f"train with rows of {limits.attention} tokens or a multiple, where the model has them",
        )
    ]


def _changing(before: Record, after: Record) -> list[Finding]:
    """A step that is another program although the shapes are the same: a Python number that changes."""
    for (name, was), (other, now) in zip_longest(before.program, after.program, fillvalue=("nothing", "")):
        if (name, was) != (other, now):
            changed = f"{name}({was}) became {other}({now})" if name == other else f"{name} became {other}"
            return [
                Finding(
                    "error",
                    "changing program",
                    f"two steps on one batch are two programs: {changed}",
                    after.places.get((other, now), "the step"),
                    "a number that changes from step to step must be a tensor: "
                    "torch.tensor(value), made outside",
                )
            ]
    return []
