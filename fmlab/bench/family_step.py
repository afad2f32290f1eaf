"""A training step of each model family against transformers or diffusers, in the same run.

Both sides have the same shapes, data and fused AdamW. Speed is timed alternately; memory is that of a process
of its own for each side.
"""

import gc
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType

from fmlab.bench import Result, interleaved
from fmlab.bench.peak import peak_memory_mb

#: families, each a module of fmlab.bench.steps
FAMILIES: tuple[str, ...] = ("bert", "t5", "clip", "unet")
PRECISIONS = ("fp32", "bf16")


def run(quick: bool) -> Iterator[Result]:
    """Speed and peak memory of every family against its reference, in fp32 and bf16."""
    for name in FAMILIES:
        yield from one_family(import_module(f"fmlab.bench.steps.{name}"), quick)


def one_family(module: ModuleType, quick: bool) -> Iterator[Result]:
    """The results of one module of fmlab.bench.steps."""
    for precision in PRECISIONS:
        ratio = interleaved(
            module.make_step("fmlab", precision),
            module.make_step("reference", precision),
            pairs=4 if quick else 12,
            warmup=2,
        )
        name = f"{module.NAME}, {precision}"
        yield Result(f"{name}: speed", ratio.median, "x", ">= 1.0", detail=str(ratio))
        gc.collect()
        ours, theirs = (peak_memory_mb(module.__name__, side, precision) for side in ("fmlab", "reference"))
        for what, mine, reference in (
            ("peak memory", ours.resident, theirs.resident),
            ("peak of tensors", ours.tensors, theirs.tensors),
        ):
            detail = f"{mine:.0f} MB against {reference:.0f} MB"
            yield Result(f"{name}: {what}", mine / reference, "x", "<= 1.0", detail=detail)
