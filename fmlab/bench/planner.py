"""How fast plans are made, and how near they are to the other opinion: a dry run of the same step."""

import time
from collections.abc import Iterator
from statistics import median
from typing import Any

from fmlab.bench import Ratio, Result, interleaved
from fmlab.parallel import Layout
from fmlab.parallel.grid import divisors
from fmlab.planner import Calibration, gpt_shape, plan, search
from fmlab.planner.hardware import hardware
from fmlab.sim import dry_run

CHIPS = 3072
BATCH = 3072
HOST = "p4de.24xlarge"
STEP: dict[str, Any] = dict(tensor=8, pipeline=16, data=8, micro_batches=24)


def layouts() -> list[Layout]:
    """Ways to divide a model of 128 layers and 160 heads among 3,072 chips, with and without ZeRO."""
    found = []
    for tensor in (1, 2, 4, 8, 16):
        for pipeline in (one for one in divisors(CHIPS // tensor) if one <= 128):
            data = CHIPS // tensor // pipeline
            for rows in (1, 2, 4):
                for zero in (0, 1) if data > 1 else (0,):
                    if BATCH % (data * rows) == 0:
                        batches = BATCH // data // rows
                        found.append(
                            Layout(
                                data=data, tensor=tensor, pipeline=pipeline, micro_batches=batches, zero=zero
                            )
                        )
    return found


def run(quick: bool) -> Iterator[Result]:
    """Milliseconds a plan over many layouts of 10^12 parameters; a plan against a dry run of GPT-3 175B."""
    shape = gpt_shape(layers=128, hidden=25600, heads=160, vocab=51200, positions=2048)
    machine, several = hardware("a100-80gb", calibration=Calibration()), layouts()

    def every() -> None:
        for layout in several:
            one = plan(shape, machine=machine, layout=layout, global_batch=BATCH, seq_len=2048)
            assert one.step_seconds > 0
            assert one.fits is not None

    every()  # what layouts have in common is worked out once
    took = []
    for _ in range(3 if quick else 10):
        start = time.perf_counter()
        every()
        took.append((time.perf_counter() - start) / len(several) * 1e3)
    yield Result(
        "planner: a plan of 10^12 parameters on 3,072 chips",
        median(took),
        "ms",
        "<= 1",
        detail=f"median of {len(took)} times {len(several)} layouts; the fastest {min(took):.2f} ms",
    )
    yield _searched(quick)
    ratio: Ratio = interleaved(
        _planned,
        lambda: dry_run("gpt3-175b", host=HOST, global_batch=192, seq_len=2048, **STEP),
        2 if quick else 5,
    )
    yield Result(
        "planner: a dry run of GPT-3 175B on 1,024 chips takes so many plans of it",
        ratio.median,
        "x",
        detail="dry run and plan take the same arguments",
    )


def _searched(quick: bool) -> Result:
    """Seconds to look at every layout of 10^12 parameters, with nothing known of the shape before."""
    took = []
    for _ in range(2 if quick else 5):
        shape = gpt_shape(layers=128, hidden=25600, heads=160, vocab=51200, positions=2048)
        start = time.perf_counter()
        found = search(shape, chip="a100-80gb", chips=CHIPS, global_batch=BATCH, seq_len=2048)
        took.append(time.perf_counter() - start)
    return Result(
        "planner: a search over all layouts of 10^12 parameters on 3,072 chips",
        median(took),
        "s",
        "<= 1",
        detail=f"{found.layouts:,} layouts, {found.too_slow:,} too slow by a bound, {found.too_large:,} too "
        f"large by one, {found.priced:,} worked out; median of {len(took)}, the fastest {min(took):.2f} s",
    )


def _planned() -> None:
    one = plan("gpt3-175b", host=HOST, layout=Layout(**STEP), global_batch=192, seq_len=2048)
    assert one.step_seconds > 0
