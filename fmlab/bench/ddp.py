"""Data parallelism by hand against torch's DistributedDataParallel, on two real ranks of one pool.

Both sides train the same model from the same weights on the same batches, with the same fused AdamW, the
same gloo and the same bucket size, alternately in one process. On a machine with few cores communication
and computation share them, so the ratio is the result, not the seconds.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fmlab.bench import Ratio, Result
from fmlab.meter import traffic, wire
from fmlab.models import GPT, GPTConfig
from fmlab.objectives import CausalLM
from fmlab.parallel import Engine, Layout, parallelize
from fmlab.parallel.ddp import ring_bytes
from fmlab.parallel.ddp.cost import gradient_bytes
from fmlab.parallel.engines.torch_ddp import TorchDataParallel
from fmlab.ranks import Ranks

RANKS = 2
ROWS, LENGTH = 4, 128  # of each rank
BUCKET_MB = 8  # a third of the usual, for a model that is smaller than usual
CONFIG: dict[str, Any] = {
    "vocab_size": 8192,
    "max_positions": 256,
    "num_layers": 6,
    "hidden_size": 384,
    "num_heads": 6,
}
QUICK: dict[str, Any] = {**CONFIG, "num_layers": 4, "hidden_size": 256, "num_heads": 4}
Batch = dict[str, torch.Tensor]


def run(quick: bool = False) -> list[Result]:
    """Time, payload, bytes on the wire, and how much communication the backward pass hides."""
    pairs = 10 if quick else 20
    with Ranks(RANKS, timeout=300) as ranks:
        plain = ranks.run(measure, QUICK if quick else CONFIG, 1, pairs)
        accumulated = ranks.run(measure, QUICK if quick else CONFIG, 4, pairs)
    first = plain[0]
    ratio, ratio_4 = (Ratio.of(slowest(side, 0), slowest(side, 1)) for side in (plain, accumulated))
    model = f"{first['parameters'] / 1e6:.1f}M parameters, {RANKS} ranks, {ROWS} x {LENGTH} tokens each"
    results = [
        Result("step by hand against torch DDP", ratio.median, "x", ">= 0.95", detail=f"{model}; {ratio}"),
        Result("  the same with 4 micro-batches", ratio_4.median, "x", ">= 0.95", detail=str(ratio_4)),
        Result(
            "gradient payload against 4 bytes a parameter",
            first["payload"] / first["gradients"],
            "x",
            "<= 1",
            detail=f"{first['payload']:,} bytes in {first['buckets']} buckets; torch sends "
            f"{first['torch payload']:,}",
        ),
        Result(
            "communication hidden behind the backward pass",
            statistics.median(first["hidden"]),
            "of 1",
            detail=f"share of the time with a bucket under way, median of {len(first['hidden'])} steps; "
            f"{first['sent early']} of {first['buckets']} buckets sent before the last gradient",
        ),
    ]
    if first["wire"] is not None:
        ideal = ring_bytes("all_reduce", first["payload"], RANKS)
        sides = f"by hand {first['wire']:,}, torch {first['torch wire']:,}, ring formula {ideal:,.0f}"
        name = "bytes on the wire against 2(n-1)/n of the payload"
        results.append(Result(name, first["wire"] / ideal, "x", "<= 1.01", detail=f"{sides} bytes a rank"))
    return results


def slowest(sides: list[dict[str, Any]], which: int) -> list[float]:
    """A step has ended when it has on every rank."""
    return [max(times) for times in zip(*(side["seconds"][which] for side in sides), strict=True)]


def measure(config: dict[str, Any], micro_batches: int, pairs: int) -> dict[str, Any]:
    """One rank's part: alternate the two engines, then count bytes and record events."""
    layout = Layout(data=RANKS, micro_batches=micro_batches, bucket_mb=BUCKET_MB)
    data = batches(config["vocab_size"], micro_batches)
    by_hand = build(config, layout, "fmlab")
    by_torch = build(config, layout, partial(TorchDataParallel, search_unused=False))
    sides: list[Callable[[], Any]] = [partial(by_hand.step, data), partial(by_torch.step, data)]
    seconds: list[list[float]] = [[], []]
    for pair in range(-2, pairs):
        for which in (0, 1) if pair % 2 == 0 else (1, 0):
            elapsed = timed(sides[which])
            if pair >= 0:
                seconds[which].append(elapsed)
    payload, sent = counted(sides[0])
    torch_payload, torch_sent = counted(sides[1])
    timelines = []
    for _ in range(5):
        timelines.append(by_hand.record_next_step())  # type: ignore[attr-defined]
        sides[0]()
    result = {
        "seconds": seconds,
        "parameters": sum(p.numel() for p in by_hand.model.parameters()),
        "gradients": gradient_bytes(by_hand.model.parameters()),
        "payload": payload,
        "wire": sent,
        "torch payload": torch_payload,
        "torch wire": torch_sent,
        "buckets": len(timelines[-1].of("sent")),
        "hidden": [timeline.hidden_share for timeline in timelines],
        "sent early": timelines[-1].sent_before_last_gradient,
    }
    by_hand.close()
    return result


def batches(vocabulary: int, micro_batches: int) -> list[Batch]:
    """Random tokens, other ones on each rank; ROWS rows altogether."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    ids = torch.randint(vocabulary, (ROWS, LENGTH + 1), generator=generator)
    whole = {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
    return Layout(micro_batches=micro_batches).split(whole, 0)


def build(config: dict[str, Any], layout: Layout, engine: Any) -> Engine:
    """An engine on the same weights."""
    torch.manual_seed(0)
    model: nn.Module = GPT(GPTConfig(**config))
    return parallelize(
        model,
        layout,
        CausalLM(),
        lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-4, fused=True),
        engine,
        max_grad_norm=1.0,
    )


def timed(call: Callable[[], Any]) -> float:
    """Seconds of a call that all ranks begin together."""
    dist.barrier()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def counted(call: Callable[[], Any]) -> tuple[int, int | None]:
    """(payload of the gradients' all-reduces, bytes this rank sent if the system counts them) in one step."""
    dist.barrier()
    with wire(required=False) as line, traffic() as sent:
        call()
    dist.barrier()
    return sum(c.bytes for c in sent.calls if c.op == "all_reduce" and c.bytes > 10_000), line.sent
