"""Our collectives give torch.distributed's results on real ranks, and send what their schedules say."""

import itertools
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fmlab import Ranks
from fmlab.collectives import (
    ALGORITHMS,
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    reduce,
    reduce_scatter,
    schedule,
)
from fmlab.meter import LinkTraffic, link_traffic, traffic, wire

pytestmark = pytest.mark.multirank

SIZES = (0, 1, 3, 13, 1000)  # nothing, fewer than ranks, not divisible
TYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64)


@pytest.fixture(scope="module")
def ranks8() -> Iterator[Ranks]:
    with Ranks(8, timeout=120) as ranks:
        yield ranks


def options_of(collective: str, algorithm: str, n: int) -> dict[str, object] | None:
    """The options that an algorithm needs on n ranks; None where it cannot run there."""
    if algorithm in ("torus", "hierarchical") and n == 8:
        return {"dims": (2, 2, 2)}
    if algorithm == "hierarchical":
        return {"dims": (2, n // 2)} if n % 2 == 0 else None
    return {}


def values(elements: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, (elements,), generator=generator).to(dtype)  # exact in every type, any order


def by_torch(x: torch.Tensor, whole: torch.Tensor, root: int, group: Any) -> dict[str, torch.Tensor]:
    """What torch.distributed leaves in each collective's result."""
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    summed, largest, copied, everything = x.clone(), x.clone(), x.clone(), whole.clone()
    gathered = [torch.empty_like(x) for _ in range(n)]
    swapped = torch.empty_like(whole)
    dist.all_reduce(summed, group=group)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    dist.broadcast(copied, group_src=root, group=group)
    dist.all_gather(gathered, x, group=group)
    dist.all_to_all_single(swapped, whole, group=group)
    dist.all_reduce(everything, group=group)
    return {
        "all_reduce": summed,
        "all_reduce max": largest,
        "reduce": summed if rank == root else x,
        "broadcast": copied,
        "all_gather": torch.cat(gathered),
        "reduce_scatter": everything[rank * len(x) : (rank + 1) * len(x)],
        "all_to_all": swapped,
    }


def by_hand(
    name: str, algorithm: str, x: torch.Tensor, whole: torch.Tensor, root: int, group: Any, **options: Any
) -> torch.Tensor:
    """The same collective by a schedule of ours."""
    if name == "reduce":
        return reduce(x.clone(), root, "sum", group, algorithm, **options)
    if name == "broadcast":
        return broadcast(x.clone(), root, group, algorithm, **options)
    if name == "all_gather":
        return all_gather(torch.empty_like(whole), x, group, algorithm, **options)
    if name == "reduce_scatter":
        return reduce_scatter(torch.empty_like(x), whole, "sum", group, algorithm, **options)
    if name == "all_to_all":
        return all_to_all(torch.empty_like(whole), whole, group, algorithm, **options)
    return all_reduce(x.clone(), "max" if "max" in name else "sum", group, algorithm, **options)


def disagreements(n: int, sizes: tuple[int, ...], types: tuple[torch.dtype, ...]) -> list[str]:
    """Every collective by every algorithm beside torch.distributed, in the group of the first n ranks."""
    group = dist.new_group(list(range(n)))
    if dist.get_rank() >= n:
        return []
    rank, wrong = dist.get_rank(group), []
    for dtype, size in itertools.product(types, sizes):
        x, whole, root = values(size, dtype, rank), values(size * n, dtype, 100 + rank), size % n
        for name, right in by_torch(x, whole, root, group).items():
            collective = name.split()[0]
            for algorithm in ALGORITHMS[collective]:
                options = options_of(collective, algorithm, n)
                if options is not None:
                    got = by_hand(name, algorithm, x, whole, root, group, **options)
                    if not torch.equal(got, right):
                        wrong.append(f"{name} by {algorithm}, {n} ranks, {size} x {dtype}")
    for algorithm in ALGORITHMS["barrier"]:
        barrier(group, algorithm)
    return wrong


@pytest.mark.parametrize("n", [2, 3, 4])
def test_results_are_torchs(ranks4: Ranks, n: int) -> None:
    assert ranks4.run(disagreements, n, SIZES, TYPES) == [[]] * 4


@pytest.mark.parametrize("n", [5, 6, 7, 8])
def test_results_are_torchs_on_more_ranks(ranks8: Ranks, n: int) -> None:
    assert ranks8.run(disagreements, n, (3, 13), (torch.bfloat16,)) == [[]] * 8


def averages_and_shapes() -> list[bool]:
    rank = dist.get_rank()
    x = torch.full((3, 5), float(rank))
    mean = all_reduce(x.clone(), "avg")
    part = x.t()[1:4]  # not contiguous
    low = all_reduce(part, "min")
    row = torch.full((8,), float(rank))
    all_reduce(row[::2])
    swapped = torch.empty(4)
    all_to_all(swapped, torch.arange(8.0)[::2] + rank)
    large = torch.randn(700_001, generator=torch.Generator().manual_seed(rank))  # several pieces a chunk
    ours, theirs = large.clone(), large.clone()
    all_reduce(ours, algorithm="ring")
    dist.all_reduce(theirs)
    return [
        torch.equal(mean, torch.full((3, 5), 1.5)),
        low is part and torch.equal(x[:, 1:4], torch.zeros(3, 3)) and float(x[0, 0]) == rank,
        torch.allclose(ours, theirs, atol=1e-5),
        row.tolist() == [6.0, float(rank)] * 4 and swapped.tolist() == [2.0 * rank + r for r in range(4)],
    ]


def test_averages_strides_and_many_pieces(ranks4: Ranks) -> None:
    assert ranks4.run(averages_and_shapes) == [[True] * 4] * 4


def same_bits(algorithm: str) -> bool:
    x = torch.randn(1001, generator=torch.Generator().manual_seed(dist.get_rank())).bfloat16()
    options = {"dims": (2, 2)} if algorithm == "hierarchical" else {}
    all_reduce(x, algorithm=algorithm, **options)
    first = x.clone()
    dist.broadcast(first, 0)
    return torch.equal(x, first)


def test_all_ranks_get_the_same_bits(ranks4: Ranks) -> None:
    for algorithm in ALGORITHMS["all_reduce"]:
        if algorithm != "one_shot":  # there each rank adds up in its own order
            assert ranks4.run(same_bits, algorithm) == [True] * 4, algorithm


def counted(collective: str, algorithm: str, elements: int) -> tuple[dict[tuple[int, int], int], int]:
    n = dist.get_world_size()
    whole, block = torch.ones(elements, dtype=torch.bfloat16), torch.ones(elements // n, dtype=torch.bfloat16)
    options = {"dims": (2, 2)} if algorithm in ("torus", "hierarchical") else {}
    calls = {
        "all_reduce": lambda: all_reduce(whole, algorithm=algorithm, **options),
        "broadcast": lambda: broadcast(whole, 1, algorithm=algorithm),
        "reduce": lambda: reduce(whole, 1, algorithm=algorithm),
        "all_gather": lambda: all_gather(whole, block, algorithm=algorithm, **options),
        "reduce_scatter": lambda: reduce_scatter(block, whole, algorithm=algorithm, **options),
        "all_to_all": lambda: all_to_all(torch.empty_like(whole), whole, algorithm=algorithm, **options),
    }
    with link_traffic() as links, traffic() as sent:
        calls[collective]()
    return dict(links.bytes), sent.bytes("send")


def test_each_link_carries_what_the_schedule_predicts(ranks4: Ranks) -> None:
    for collective, algorithms in ALGORITHMS.items():
        for algorithm in algorithms if collective != "barrier" else ():
            sides = ranks4.run(counted, collective, algorithm, 4_004)
            options: dict[str, object] = {"dims": (2, 2)} if algorithm in ("torus", "hierarchical") else {}
            options |= {"root": 1} if collective in ("broadcast", "reduce") else {}
            plan = schedule(collective, algorithm, 4, **options)  # type: ignore[arg-type]
            assert LinkTraffic.merged([links for links, _ in sides]) == plan.link_bytes(4_004, 2)
            assert [total for _, total in sides] == plan.sent_by(4_004, 2)


def on_the_wire(elements: int) -> tuple[int | None, int | None]:
    whole, block = torch.ones(elements), torch.ones(elements // dist.get_world_size())
    dist.barrier()
    with wire() as ours:
        reduce_scatter(block, whole, algorithm="ring")
        dist.barrier()
    with wire() as theirs:
        dist.reduce_scatter(block, list(whole.chunk(dist.get_world_size())))
        dist.barrier()
    return ours.sent, theirs.sent


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="TCP_INFO is Linux's")
def test_a_ring_reduce_scatter_sends_half_of_what_gloos_does(ranks4: Ranks) -> None:
    payload = 4 * 1_000_000
    for ours, theirs in ranks4.run(on_the_wire, 1_000_000):
        assert ours is not None
        assert theirs is not None
        assert ours == pytest.approx(0.75 * payload, rel=0.01)
        assert theirs == pytest.approx(1.5 * payload, rel=0.01)


def refused() -> list[str]:
    found = []
    for call in (
        lambda: all_reduce(torch.ones(4), "prod"),
        lambda: all_reduce(torch.ones(4, dtype=torch.int64), "avg"),
        lambda: all_reduce(torch.ones(4, dtype=torch.bool)),
        lambda: all_reduce(torch.ones(4), algorithm="rin"),
        lambda: all_gather(torch.ones(7), torch.ones(4)),
        lambda: all_gather(torch.ones(8, dtype=torch.int64), torch.ones(4)),
        lambda: reduce_scatter(torch.ones(2), torch.ones(5)),
        lambda: all_to_all(torch.ones(5), torch.ones(5)),
        lambda: broadcast(torch.ones(4), 2),
        lambda: all_reduce(torch.ones(1).expand(4)),
        lambda: all_reduce(torch.ones(4, device="meta")),
        lambda: all_reduce(torch.ones(4).to(torch.float8_e4m3fn)),
    ):
        try:
            call()
        except ValueError as error:
            found.append(str(error))
    return found


def test_bad_input_is_refused_before_anything_is_sent(ranks2: Ranks) -> None:
    first, second = ranks2.run(refused)
    assert first == second
    words = ["sum, avg, max", "floating", "number type", "legal: ring", "does not fit", "make them equal"]
    words += ["does not fit", "blocks must be equal", "none of the ranks 0..1"]
    words += ["several elements in one place", "meta device", "sum of torch.float8_e4m3fn is not defined"]
    for word, message in zip(words, first, strict=True):
        assert word in message
