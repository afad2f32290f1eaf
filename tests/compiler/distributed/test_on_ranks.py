"""Graphs with collectives on two real ranks, against one device with all rows."""

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fmlab import Ranks
from fmlab.compiler import (
    Bucket,
    Compiled,
    InsertGradientSums,
    Overlap,
    PassManager,
    Program,
    Shard,
    TensorParallel,
    capture,
    check_collectives,
    compile,
    default_passes,
    local_part,
    shard_parameters,
)
from fmlab.compiler.distributed.placement import placed
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


def cut_of(model: nn.Module) -> dict[str, int | Shard]:
    """Megatron's cut of every block of a GPT; embeddings and norms whole."""
    kinds = {"qkv": Shard(0, 3), "up": Shard(0), "output.weight": Shard(1), "down.weight": Shard(1)}
    named = [name for name, _ in model.named_parameters()]
    return {name: shard for name in named for kind, shard in kinds.items() if f".{kind}" in name}


def tensor_parallel() -> tuple[dict[str, Tensor], float, list[str], dict[str, tuple[int, ...]]]:
    """This rank's gradients, its loss, what its backward pass ran, and the shapes of its weights."""
    model, inputs = step("gpt")
    cut = cut_of(model)
    group = dist.group.WORLD
    assert group is not None
    passes = [TensorParallel(group, cut), *default_passes(), Overlap()]
    compiled = compile(model, kwargs=inputs, passes=passes)
    assert isinstance(compiled, Compiled)
    shard_parameters(model, cut, dist.get_rank(), dist.get_world_size())
    loss = compiled(**inputs)[0]
    with Events() as events:
        loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    return found, float(loss.detach()), [name for name, _ in events.seen], shapes


def test_a_tensor_parallel_model_is_that_of_one_device(ranks2: Ranks) -> None:
    model, inputs = step("gpt")
    cut = placed(cut_of(model), dict(model.named_parameters()))
    assert len(cut) == 2 * 6
    whole = gradients(model, model, inputs, 1)
    loss = float(model(**inputs)[0].detach())
    for rank, (found, mine, names, shapes) in enumerate(ranks2.run(tensor_parallel)):
        assert abs(mine / loss - 1) < 1e-12
        assert set(found) == set(whole)
        for name, gradient in whole.items():
            want = local_part(gradient, cut.get(name, "replicated"), rank, 2)
            assert tuple(want.shape) == shapes[name]
            error = float((found[name] - want).norm() / want.norm())
            assert error < 1e-12, (name, error)
        assert names.count("all_reduce") == 2 * 2  # f of two layers, two in each
        first = names.index("all_reduce")
        assert "mm" in names[first : names.index("wait_tensor")]  # a weight's gradient, while it travels


def both(inner: int) -> dict[str, Tensor]:
    """Gradients on one of four ranks: tensor groups of `inner` neighbours, data groups across them."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tensor_groups = [dist.new_group(range(r, r + inner)) for r in range(0, ranks, inner)]
    data_groups = [dist.new_group(range(r, ranks, inner)) for r in range(inner)]
    tensor, data = tensor_groups[rank // inner], data_groups[rank % inner]
    whole = batch()
    mine = slice(2 * (rank // inner), 2 * (rank // inner) + 2)
    local = {name: rows[mine].clone() for name, rows in whole.items()}
    model, _ = step("gpt")
    cut = cut_of(model)
    passes = [
        TensorParallel(tensor, cut),
        *default_passes(),
        InsertGradientSums(data),
        Bucket(8192),
        Overlap(),
    ]
    compiled = compile(model, kwargs=local, passes=passes)
    assert isinstance(compiled, Compiled)
    assert check_collectives(compiled.program, tensor) == 2 * 2 * 2  # f and g, two layers, two in each
    assert check_collectives(compiled.program, data) > 1
    shard_parameters(model, cut, rank % inner, inner)
    return gradients(compiled, model, local, int((whole["labels"] != -100).sum()))


def test_both_ways_to_divide_a_step_go_together(ranks4: Ranks) -> None:
    model, _ = step("gpt")
    cut = placed(cut_of(model), dict(model.named_parameters()))
    whole = batch()
    want = gradients(model, model, whole, int((whole["labels"] != -100).sum()))
    for rank, found in enumerate(ranks4.run(both, 2)):
        for name, gradient in want.items():
            piece = local_part(gradient, cut.get(name, "replicated"), rank % 2, 2)
            assert float((found[name] - piece).norm() / piece.norm()) < 1e-12, (rank, name)


def disagreeing() -> str:
    world = dist.group.WORLD
    assert world is not None
    model, inputs = step("gpt")
    program = capture(model, kwargs=inputs)
    assert isinstance(program, Program)
    passes = [InsertGradientSums(world), Bucket(4096 * (1 + dist.get_rank()))]
    PassManager(passes).run(program.graphs)
    try:
        check_collectives(program, world)
    except ValueError as error:
        return str(error)
    return "nothing"


def test_ranks_that_would_wait_for_each_other_are_told_before_the_step(ranks2: Ranks) -> None:
    first, second = ranks2.run(disagreeing)
    assert first == second
    assert "is not the same on all ranks: rank 0 of the group: backward graph: all_reduce (sum) of" in first


def _last(names: list[str], name: str) -> int:
    return len(names) - 1 - names[::-1].index(name)
