"""A run of `fmlab.train` against that of transformers' or diffusers' own trainer, in the same process.

Both sides see the same shapes, batches made while they run, the same fused optimizer and no evaluation. What
a step costs beside the model (data, masks, schedule, clipping, logging) is what this adds to `family-step`.
"""

from collections.abc import Iterator
from importlib import import_module

from fmlab.bench import Result, interleaved

#: families, each a module of fmlab.bench.training with NAME and make_run(side) -> a run, to be called
FAMILIES: tuple[str, ...] = ("bert", "gpt", "unet")


def run(quick: bool) -> Iterator[Result]:
    """The speed of every family's run; in a pair both sides make the same number of steps."""
    for name in FAMILIES:
        module = import_module(f"fmlab.bench.training.{name}")
        ratio = interleaved(
            module.make_run("fmlab"), module.make_run("reference"), pairs=3 if quick else 8, warmup=1
        )
        yield Result(f"{module.NAME}: speed", ratio.median, "x", ">= 1.0", detail=str(ratio))
