"""What a layout keeps, counted, and what it costs as ranks are added, modelled."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from fmlab.bench import Result
from fmlab.bench.ddp import build
from fmlab.meter import saved_activations
from fmlab.models import GPT, GPTConfig
from fmlab.parallel import Layout, activations
from fmlab.ranks import Ranks
from fmlab.sim import dry_run

ROWS, LENGTH = 4, 256
HOST, MODEL, SEQ_LEN, RANKS = "p4de.24xlarge", "gpt2-medium", 1024, (1, 2, 4, 8)
#: Rows a chip and step; a strategy that divides the model keeps the rows of the whole step instead.
ROWS_A_CHIP = 8


def activation_rows(pool: Ranks, config: dict[str, Any], ranks: int) -> Iterator[Result]:
    """Bytes a rank keeps of the layers of a forward, beside the sum of our formula."""
    for layout in (
        Layout(tensor=ranks),
        Layout(tensor=ranks, sequence_parallel=True),
        Layout(data=ranks, fsdp=True),
        Layout(data=ranks, fsdp=True, recompute="full"),
    ):
        counted, formula = pool.run(kept_of_a_layer, config, layout)[0]
        degrees = ", ".join(f"{k}={v}" for k, v in _given(layout).items())
        yield Result(
            f"activations of a layer, {degrees}",
            abs(counted / formula - 1) * 100,
            "% off",
            "<= 5",
            detail=f"{counted:,.0f} bytes kept on a rank, {formula:,.0f} by formula; {ROWS} x {LENGTH}",
        )


def kept_of_a_layer(config: dict[str, Any], layout: Layout) -> tuple[float, float]:
    """One rank's part: bytes that two more layers add, halved, and what the formula says of one."""
    generator = torch.Generator().manual_seed(layout.data_rank(dist.get_rank()))
    ids = torch.randint(config["vocab_size"], (ROWS, LENGTH + 1), generator=generator)
    batch = {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
    with torch.device("meta"):
        shape = activations.layer_shape(GPT(GPTConfig(**config)).blocks[1])
    peaks = []
    for layers in (2, 4):
        engine: Any = build({**config, "num_layers": layers}, layout, "fmlab")
        with saved_activations(exclude=engine.model) as saved:
            engine.model(**batch)
        peaks.append(saved.peak)
        engine.close()
    run = activations.Run(
        ROWS,
        LENGTH,
        tensor=layout.tensor,
        sequence_parallel=layout.sequence_parallel,
        recompute=layout.recompute,
    )
    return (peaks[1] - peaks[0]) / 2, sum(activations.kept(shape, run).values())


def growth_rows() -> Iterator[Result]:
    """Chip seconds of a token on 2 to 8 simulated chips over those on one."""
    for name, degrees in (
        ("data", lambda n: dict(data=n)),
        ("zero=3", lambda n: dict(data=n, zero=3 if n > 1 else 0)),
        ("tensor", lambda n: dict(tensor=n)),
        ("tensor with sequence parallel", lambda n: dict(tensor=n, sequence_parallel=n > 1)),
        ("pipeline, 1F1B, 32 micro-batches", lambda n: dict(pipeline=n, micro_batches=32)),
    ):
        cost = []
        for n in RANKS:
            rows = ROWS_A_CHIP * (n if name.startswith(("data", "zero")) else max(RANKS))
            step = dry_run(MODEL, host=HOST, global_batch=rows, seq_len=SEQ_LEN, **degrees(n))
            cost.append(step.seconds * n / (rows * SEQ_LEN))
        yield Result(
            f"cost of a token on 8 chips over 1: {name}",
            cost[-1] / cost[0],
            "x",
            kind="modelled",
            detail=f"{MODEL} on {HOST}, peak rates; on 2, 4, 8 chips "
            + ", ".join(f"{one / cost[0]:.2f}x" for one in cost[1:]),
        )


def _given(layout: Layout) -> dict[str, Any]:
    """The fields of a layout that differ from the default, `data` apart."""
    plain = Layout()
    fields = ("tensor", "sequence_parallel", "fsdp", "recompute")
    return {f: getattr(layout, f) for f in fields if getattr(layout, f) != getattr(plain, f)}
