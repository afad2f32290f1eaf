"""Every strategy by hand against the production engine that has it, on real ranks of one pool.

Both sides train the same model from the same weights on the same batches with the same fused AdamW and the
same clipping, alternately in one process. gloo carries the messages of both ("same collective underneath").
Where ours can also be told to use its own collectives, a second line has those against the peer as it is
shipped. On a machine with few cores communication and computation share them, so the ratio is the result,
not the seconds.
"""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fmlab.bench import Ratio, Result
from fmlab.bench.ddp import CONFIG, build, slowest, timed
from fmlab.bench.parallel_growth import activation_rows, growth_rows
from fmlab.meter import wire
from fmlab.models import GPT, GPTConfig
from fmlab.parallel import Layout
from fmlab.parallel.fsdp import cost as fsdp_cost
from fmlab.parallel.tensor import cost as tensor_cost
from fmlab.parallel.zero import cost as zero_cost
from fmlab.parallel.zero.memory import held_bytes, state_bytes
from fmlab.ranks import Ranks

ROWS, LENGTH = 8, 128  # of each place on the data axis
QUICK: dict[str, Any] = {**CONFIG, "vocab_size": 2048, "num_layers": 4, "hidden_size": 128, "num_heads": 4}
ADAMW_FP32 = {"k": 8.0, "parameter_bytes": 4.0, "gradient_bytes": 4.0}

KEPT = (
    "; as it comes, DeepSpeed keeps what its third stage has gathered for the backward pass while fewer than "
    "10^9 parameters are there: it gathers once, and holds them all"
)


@dataclass(frozen=True)
class Contest:
    """A layout by hand, and who else runs it."""

    name: str
    peer: str
    layout: Layout
    engine: str
    peer_layout: Layout | None = None  # where theirs needs other words for the same
    theory: Callable[[nn.Module, Layout], float] | None = None
    own_collectives: bool = False
    note: str = ""
    shape: dict[str, Any] = field(default_factory=dict)  # of the model, where the usual one cannot be divided

    @property
    def theirs(self) -> Layout:
        return self.peer_layout or self.layout


@dataclass
class Side:
    """What one rank measured of one side."""

    seconds: list[float] = field(default_factory=list)
    sent: int | None = None
    state: float = 0.0


def _zero_bytes(model: nn.Module, layout: Layout) -> float:
    parameters = sum(p.numel() for p in model.parameters())
    return zero_cost.sent_bytes(parameters, layout.data, layout.zero, layout.micro_batches)["total"]


def _tensor_bytes(model: nn.Module, layout: Layout) -> float:
    config: Any = model.config
    payload = tensor_cost.language_model_payload(
        config.num_layers, ROWS, LENGTH, config.hidden_size, layout.tensor
    )
    return tensor_cost.wire_bytes(payload, layout.tensor)


def _pipeline_bytes(model: nn.Module, layout: Layout) -> float:
    """The stream forth or its gradient back, and the tied table between the first and the last stage."""
    config: Any = model.config
    stream = ROWS * LENGTH * config.hidden_size * 4
    table = config.vocab_size * config.hidden_size * 4
    return stream + table


def contests(ranks: int) -> list[Contest]:
    """What is measured on so many ranks."""
    deepspeed = [
        Contest(
            f"zero={stage}",
            f"DeepSpeed ZeRO-{stage}",
            Layout(data=ranks, zero=stage),
            "deepspeed",
            theory=_zero_bytes,
            own_collectives=True,
            note=KEPT if stage == 3 else "",
        )
        for stage in (1, 2, 3)
    ]
    shape = {"num_heads": 8} if CONFIG["num_heads"] % ranks else {}
    return [
        *(deepspeed if find_spec("deepspeed") else []),
        Contest(
            "fsdp",
            "FSDP2",
            Layout(data=ranks, fsdp=True),
            "torch",
            theory=fsdp_cost.expected_bytes,
            own_collectives=True,
        ),
        Contest("tensor", "DTensor", Layout(tensor=ranks), "torch", theory=_tensor_bytes, shape=shape),
        Contest(
            "tensor with sequence parallel",
            "DTensor",
            Layout(tensor=ranks, sequence_parallel=True),
            "torch",
            shape=shape,
        ),
        Contest(
            "pipeline, 1F1B",
            "torch pipelining",
            Layout(pipeline=ranks, micro_batches=2 * ranks),
            "torch",
            theory=_pipeline_bytes if ranks == 2 else None,
        ),
    ]


def run(quick: bool = False) -> Iterator[Result]:
    """Step times as ratios, bytes on the wire beside theory, model state beside ZeRO's formulas."""
    usual, pairs = (QUICK, 6) if quick else (CONFIG, 12)
    for ranks in (2,) if quick else (2, 4):
        with Ranks(ranks, timeout=600) as pool:
            for contest in contests(ranks):
                config = usual | contest.shape
                with torch.device("meta"):
                    model = GPT(GPTConfig(**config))
                sides = pool.run(measure, config, contest, pairs)
                yield from _results(contest, sides, model, ranks)
                if contest.own_collectives and not quick:
                    ours = replace(contest.layout, collectives="fmlab")
                    own = replace(contest, layout=ours, peer_layout=contest.theirs)
                    yield from _own(own, pool.run(measure, config, own, pairs))
            if ranks == 2:
                yield from activation_rows(pool, usual, ranks)
    yield from growth_rows()


def _results(contest: Contest, sides: list[list[Side]], model: nn.Module, ranks: int) -> Iterator[Result]:
    ratio = _ratio(sides)
    size = f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters, {ranks} ranks"
    yield Result(
        f"{contest.name} against {contest.peer}, gloo under both",
        ratio.median,
        "x",
        ">= 1",
        detail=f"{size}; {ratio}",
    )
    ours, theirs = (statistics.mean(rank[which].sent or 0 for rank in sides) for which in (0, 1))
    if sides[0][0].sent is not None:
        theory = None if contest.theory is None else contest.theory(model, contest.layout)
        beside = "" if theory is None else f", by ring formula {theory:,.0f}"
        yield Result(
            "  bytes on the wire against the peer's",
            ours / theirs,
            "x",
            detail=f"a rank sends {ours:,.0f}, with {contest.peer} {theirs:,.0f}{beside}{contest.note}",
        )
    if contest.layout.zero:
        parameters = sum(p.numel() for p in model.parameters())
        formula = state_bytes(parameters, ranks, contest.layout.zero, **ADAMW_FP32).total
        held = statistics.mean(rank[0].state for rank in sides)
        yield Result(
            "  model state of a rank against ZeRO's formula",
            held / formula,
            "x",
            "<= 1.02",
            detail=f"{held:,.0f} bytes held after a step, {formula:,.0f} by formula",
        )


def _own(contest: Contest, sides: list[list[Side]]) -> Iterator[Result]:
    ratio = _ratio(sides)
    yield Result(
        f"{contest.name} on our collectives against {contest.peer} as shipped",
        ratio.median,
        "x",
        detail=f"{ratio}; a rank sends {statistics.mean(rank[0].sent or 0 for rank in sides):,.0f}",
    )


def _ratio(sides: list[list[Side]]) -> Ratio:
    times = [{"seconds": [side.seconds for side in rank]} for rank in sides]
    return Ratio.of(slowest(times, 0), slowest(times, 1))


# region measure
def measure(config: dict[str, Any], contest: Contest, pairs: int) -> list[Side]:
    """One rank's part: [ours, theirs], their steps alternating."""
    theirs: Any = contest.engine
    if theirs == "deepspeed":
        from fmlab.parallel.engines.deepspeed_engine import DeepSpeedEngine

        theirs = partial(DeepSpeedEngine, keep_gradients=False)
    engines = [build(config, contest.layout, "fmlab"), build(config, contest.theirs, theirs)]
    data = batches(config["vocab_size"], contest.layout)
    sides = [Side(), Side()]
    for pair in range(-2, pairs):
        for which in (0, 1) if pair % 2 == 0 else (1, 0):
            seconds = timed(partial(engines[which].step, data))
            if pair >= 0:
                sides[which].seconds.append(seconds)
    for engine, side in zip(engines, sides, strict=True):
        dist.barrier()
        with wire(required=False) as line:
            engine.step(data)
        side.sent = line.sent
        dist.barrier()
    sides[0].state = held_bytes(engines[0]).device.total if contest.layout.zero else 0.0
    for engine in engines:
        engine.close()
    return sides


# endregion


def batches(vocabulary: int, layout: Layout) -> list[dict[str, torch.Tensor]]:
    """Random tokens, other ones at each place of the data axis."""
    generator = torch.Generator().manual_seed(layout.data_rank(dist.get_rank()))
    ids = torch.randint(vocabulary, (ROWS, LENGTH + 1), generator=generator)
    whole = {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
    return Layout(micro_batches=layout.micro_batches).split(whole, 0)
