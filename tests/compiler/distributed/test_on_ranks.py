"""Graphs with collectives on two real ranks, against one device with all rows."""

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fmlab import Ranks
from fmlab.compiler import Bucket, Compiled, InsertGradientSums, Overlap, compile, default_passes
from tests.compiler.families import step


class Events(TorchDispatchMode):
    """(operator, seconds) of everything that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, float]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append((func._schema.name.rpartition("::")[2], time.perf_counter()))
        return func(*args, **(kwargs or {}))


def batch() -> dict[str, Tensor]:
    """Four rows; the first two have 3 targets together, the others 12."""
    _, inputs = step("gpt")
    ids = torch.cat([inputs["input_ids"], inputs["input_ids"].flip(1)])
    labels = torch.cat([inputs["labels"], inputs["labels"].flip(1)])
    labels[0, 1:] = labels[1, 2:] = -100
    return dict(input_ids=ids, labels=labels)


def gradients(run: Any, model: Any, inputs: dict[str, Tensor], count: int) -> dict[str, Tensor]:
    model.zero_grad()
    (run(**inputs)[0] / count).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def data_parallel(nbytes: float, overlap: bool) -> tuple[dict[str, Tensor], list[str], int]:
    """This rank's gradients, what its backward pass ran, and how many collectives there were."""
    whole = batch()
    mine = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    local = {name: rows[mine].clone() for name, rows in whole.items()}
    model, _ = step("gpt")
    passes = [*default_passes(), InsertGradientSums(lambda: dist.group.WORLD), Bucket(nbytes)]
    compiled = compile(model, kwargs=local, passes=[*passes, Overlap()] if overlap else passes)
    assert isinstance(compiled, Compiled)
    with Events() as events:
        found = gradients(compiled, model, local, int((whole["labels"] != -100).sum()))
    names = [name for name, _ in events.seen]
    return found, names, names.count("all_reduce")


def test_data_parallel_gradients_are_those_of_one_device(ranks2: Ranks) -> None:
    model, _ = step("gpt")
    whole = batch()
    count = int((whole["labels"] != -100).sum())
    assert [int((half != -100).sum()) for half in whole["labels"].split(2)] == [3, 12]
    want = gradients(model, model, whole, count)
    for found, names, collectives in ranks2.run(data_parallel, 8192, True):
        assert set(found) == set(want)
        for name, gradient in want.items():
            error = float((found[name] - gradient).norm() / gradient.norm())
            assert error < 1e-12, (name, error)
        assert 1 < collectives < len(want) / 2
        first_wait, last_start = names.index("wait_tensor"), _last(names, "all_reduce")
        assert last_start < first_wait
        assert names[names.index("all_reduce") : first_wait].count("mm") > 3


def test_without_overlap_every_wait_follows_its_start(ranks2: Ranks) -> None:
    for _, names, collectives in ranks2.run(data_parallel, 8192, False):
        starts = [i for i, name in enumerate(names) if name == "all_reduce"]
        assert collectives == len(starts) > 1
        assert all(names[i + 1] == "wait_tensor" for i in starts)


def _last(names: list[str], name: str) -> int:
    return len(names) - 1 - names[::-1].index(name)
