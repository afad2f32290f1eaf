"""A wrong collective is named by rank, call and line, on every rank, and nobody hangs."""

import time

import pytest
import torch
import torch.distributed as dist

from fmlab import Ranks
from fmlab.collectives import Mismatch, all_reduce, checked

pytestmark = pytest.mark.multirank


def shape(rank: int) -> None:
    dist.all_reduce(torch.ones(4 + (rank == 2)))


def every_shape(rank: int) -> None:
    dist.all_reduce(torch.ones(4 + rank))


def element_type(rank: int) -> None:
    all_reduce(torch.ones(4, dtype=torch.float64 if rank == 1 else torch.float32), algorithm="tree")


def order(rank: int) -> None:
    if rank == 3:
        dist.broadcast(torch.ones(2), 0)
    dist.all_reduce(torch.ones(2))
    if rank != 3:
        dist.broadcast(torch.ones(2), 0)


def operation(rank: int) -> None:
    dist.all_reduce(torch.ones(4), dist.ReduceOp.MAX if rank == 0 else dist.ReduceOp.SUM)


def root(rank: int) -> None:
    dist.broadcast(torch.ones(4), rank // 2)


def one_less(rank: int) -> None:
    if rank != 2:
        dist.all_reduce(torch.ones(4))


def late(rank: int) -> None:
    if rank == 1:
        time.sleep(1.5)
    dist.barrier()


def fails(rank: int) -> None:
    if rank == 1:
        raise KeyError("no batch")
    dist.all_gather([torch.ones(2)] * 4, torch.ones(2))


def in_backward(rank: int) -> None:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
    loss = model(torch.ones(1, 3)).sum()
    if rank != 0:
        loss.backward()  # the reducer's all-reduce comes from C++


def run(wrong, timeout: float) -> tuple[str, str, int]:
    start, message, kind, calls = time.perf_counter(), "", "", 0
    try:
        with checked(timeout=timeout):
            dist.all_reduce(torch.ones(3))
            all_reduce(torch.ones(3))
            wrong(dist.get_rank())
    except Exception as error:
        message, kind, calls = str(error), type(error).__name__, len(getattr(error, "calls", ()))
    assert time.perf_counter() - start < 10
    return kind, message, calls


CASES = [
    (
        shape,
        ["#3 of the group", "rank 2 differs from the others in the shape", "rank 2: all_reduce float32[5]"],
    ),
    (every_shape, ["all ranks differ in the shape", "rank 3: all_reduce float32[7]"]),
    (element_type, ["rank 1 differs from the others in the type", "fmlab all_reduce float64[4], op sum"]),
    (order, ["rank 3 differs from the others in the call", "rank 3: broadcast float32[2], root 0"]),
    (operation, ["rank 0 differs from the others in the arguments", "op max", "ranks 1, 2, 3"]),
    (root, ["one half (ranks 2, 3) and the other differ in the arguments", "root 1"]),
    (one_less, ["rank 2 did not come to collective #3", "rank 2: left the block after 2 collectives"]),
    (
        late,
        ["rank 1 did not come to collective #3", "within 1 s", "last seen in: fmlab all_reduce #2"],
    ),
    (fails, ["rank 1 did not come", "rank 1: left the block by KeyError: 'no batch'"]),
    (in_backward, ["rank 0 did not come to", "ranks 1, 2, 3: all_reduce float32[8]", "backward()"]),
]


@pytest.mark.parametrize(("wrong", "words"), CASES, ids=[case[0].__name__ for case in CASES])
def test_the_wrong_rank_and_call_are_named_on_every_rank(ranks4: Ranks, wrong, words: list[str]) -> None:
    found = ranks4.run(run, wrong, 1.0)
    messages = [message for kind, message, _ in found if kind == "Mismatch"]
    assert len(messages) == (3 if wrong is fails else 4)
    assert len(set(messages)) == 1
    for word in words:
        assert word in messages[0]
    assert messages[0].count("test_checked.py:") >= 1


def agreeing() -> tuple[float, str]:
    group = dist.new_group([0, 1])
    with checked(timeout=20):
        for _ in range(3):
            x = torch.ones(5)
            all_reduce(x, algorithm="tree")
            dist.all_to_all_single(torch.empty(4), torch.ones(4))
            if dist.get_rank() < 2:
                dist.all_reduce(x, group=group)  # ranks outside of a group have nothing to do with it
    with checked(group, timeout=20):
        dist.all_reduce(torch.ones(1 + dist.get_rank() * 0))
    try:
        with checked(timeout=0):
            pass
    except ValueError as error:
        return float(x[0]), str(error)
    return float(x[0]), ""


def test_what_agrees_runs_and_gives_the_same(ranks2: Ranks) -> None:
    values = ranks2.run(agreeing)
    assert [value for value, _ in values] == [4.0, 4.0]
    assert "positive number of seconds" in values[0][1]


def test_there_must_be_a_group() -> None:
    with pytest.raises(ValueError, match="init_process_group"), checked():
        pass
    assert issubclass(Mismatch, RuntimeError)
