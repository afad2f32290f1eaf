"""Several ranks in one process: every node runs for each of them before the next one does."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from fmlab.compiler import PassManager, Program, Shard, TensorParallel, capture, local_part
from fmlab.compiler.distributed.collective import is_start, is_wait
from fmlab.compiler.distributed.placement import placed
from fmlab.compiler.distributed.vocabulary import FirstRow

Cut = dict[str, int | Shard]
Divided = tuple[Program, TensorParallel]


def run(module: fx.GraphModule, inputs: Sequence[Sequence[Tensor]]) -> list[list[Any]]:
    """Each rank's results, from each rank's inputs. Asserts the shapes that the graph promises."""
    ranks = range(len(inputs))
    arriving = [iter(mine) for mine in inputs]
    known: dict[fx.Node, list[Any]] = {}
    for node in module.graph.nodes:
        if node.op == "placeholder":
            known[node] = [next(mine) for mine in arriving]
        elif node.op == "output":
            break
        elif is_start(node):
            mine = known[node.args[0]]
            total = torch.stack(mine).amax(0) if node.args[1] == "max" else sum(mine)
            known[node] = [total.clone() for _ in ranks]
        elif is_wait(node):
            known[node] = known[node.args[0]]
        elif isinstance(node.target, FirstRow):
            known[node] = [node.target.of(rank) for rank in ranks]
        else:
            arguments = [of(known, (node.args, node.kwargs), rank) for rank in ranks]
            known[node] = [node.target(*args, **kwargs) for args, kwargs in arguments]
        promised = [x.shape for x in pytree.tree_leaves(node.meta["val"])]
        for mine in known[node]:
            assert [x.shape for x in pytree.tree_leaves(mine)] == promised, node
    return [of(known, list(node.args[0]), rank) for rank in ranks]


def of(known: Mapping[fx.Node, list[Any]], arguments: Any, rank: int) -> Any:
    return pytree.tree_map_only(fx.Node, lambda node: known[node][rank], arguments)


def divided(model: Callable[..., Any], inputs: Sequence[Tensor], cut: Cut, ranks: int) -> Divided:
    program = capture(model, *inputs)
    assert isinstance(program, Program)
    one = TensorParallel("tensor", cut, ranks)
    PassManager([one]).run(program.graphs)
    return program, one


def assert_as_on_one_device(model: nn.Module, inputs: Sequence[Tensor], cut: Cut, ranks: int) -> Divided:
    """Result and every gradient, the inputs' too, for a random gradient that comes in."""
    program, one = divided(model, inputs, cut, ranks)
    parameters = dict(model.named_parameters())
    wholes = [*parameters.values(), *inputs]
    result = model(*inputs)
    coming = torch.randn(result.shape, dtype=result.dtype, generator=torch.Generator().manual_seed(1))
    learned = [x for x in wholes if x.requires_grad]
    found = iter(torch.autograd.grad(result, learned, coming, allow_unused=True))
    expected = [next(found) if x.requires_grad else None for x in wholes]
    shards = placed(cut, parameters)
    places = [shards.get(name, "replicated") for name in (*parameters, *map(str, range(len(inputs))))]
    local = [
        [local_part(x.detach(), at, rank, ranks) for x, at in zip(wholes, places, strict=True)]
        for rank in range(ranks)
    ]
    handed = run(program.forward, local)
    assert program.backward is not None
    gradients = run(program.backward, [[*mine[1:], coming] for mine in handed])
    close = dict(rtol=1e-11, atol=1e-12)
    for rank in range(ranks):
        torch.testing.assert_close(handed[rank][0], result.detach(), **close)
        for whole, at, found in zip(expected, places, gradients[rank], strict=True):
            assert (whole is None) == (found is None)
            if whole is not None:
                torch.testing.assert_close(found, local_part(whole, at, rank, ranks), **close)
    return program, one
