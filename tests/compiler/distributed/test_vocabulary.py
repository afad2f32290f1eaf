"""A vocabulary divided over ranks, and T5's relative positions by heads: values as on one device."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fmlab import Ranks
from fmlab.compiler import (
    Compiled,
    PassManager,
    Program,
    Shard,
    TensorParallel,
    capture,
    compile,
    default_passes,
    local_part,
    shard_parameters,
)
from fmlab.compiler import graph as g
from fmlab.compiler.distributed.placement import placed
from tests.compiler.distributed.lockstep import Cut, assert_as_on_one_device
from tests.compiler.families import step


class Language(nn.Module):
    """Look-up, norm, logits, torch's cross-entropy."""

    def __init__(self, tied: bool, padding: int | None = None, end: str = "mean"):
        super().__init__()
        self.tokens, self.norm, self.end = nn.Embedding(12, 4, padding), nn.LayerNorm(4), end
        self.output = self.tokens.weight if tied else nn.Parameter(torch.randn(12, 4))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = (self.norm(self.tokens(ids)) @ self.output.T).flatten(0, 1)
        return F.cross_entropy(logits, labels.flatten(), reduction=self.end)


TEXT = torch.tensor([[0, 3, 11, 6, 5], [7, 2, 2, 9, 3]])  # rows of both ranks, some twice
LABELS = torch.tensor([[1, -100, 6, 0, 11], [5, 5, 8, -100, 2]])


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("tied", "padding", "end"),
    [
        (True, None, "mean"),
        (False, 3, "mean"),
        (False, None, "sum"),
        (True, None, "none"),
    ],
)
def test_a_look_up_and_a_cross_entropy_over_the_cut(
    tied: bool, padding: int | None, end: str, ranks: int
) -> None:
    torch.manual_seed(0)
    model = Language(tied, padding, end).double()
    cut: Cut = {"output": 0} if tied else {"output": 0, "tokens.weight": 0}
    program, _ = assert_as_on_one_device(model, [TEXT, LABELS], cut, ranks)
    sizes = [
        g.value(node).numel()
        for graph in program.graphs.values()
        for node in graph.nodes
        if g.name(node) == "all_reduce"
    ]
    assert max(sizes) <= TEXT.numel() * 4  # what travels is never as wide as the vocabulary
    assert sum(size <= TEXT.numel() for size in sizes) >= 3  # a maximum, a sum and the labels' scores


def cut_of(model: nn.Module) -> dict[str, int | Shard]:
    """Megatron's cuts of every layer, and of the vocabulary."""
    ends: dict[str, int | Shard] = {
        "tokens.weight": 0,
        "position_bias.weight": 1,
        "attention.qkv.weight": Shard(0, 3),
        "attention.qkv.bias": Shard(0, 3),
        "attention.output.weight": 1,
        "cross.query.weight": 0,
        "cross.key_value.weight": Shard(0, 2),
        "cross.output.weight": 1,
        "mlp.up.weight": 0,
        "mlp.up.bias": 0,
        "mlp.down.weight": 1,
    }
    names = [name for name, _ in model.named_parameters()]
    return {name: where for name in names for end, where in ends.items() if name.endswith(end)}


def gradients(run: Any, model: nn.Module, inputs: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    loss = run(**inputs)[0]
    loss.backward()
    return float(loss.detach()), {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


def divided(family: str) -> tuple[float, dict[str, Tensor], int]:
    """Loss and gradients on one of two ranks, and how many look-ups the graphs took apart."""
    model, inputs = step(family)
    cut = cut_of(model)
    passes = [TensorParallel(lambda: dist.group.WORLD, cut), *default_passes()]
    compiled = compile(lambda **inputs: model(**inputs)[:1], kwargs=inputs, passes=_named(passes, "model."))
    assert isinstance(compiled, Compiled)
    apart = sum(g.counts(graph)["first_row"] for graph in compiled.program.graphs.values())
    shard_parameters(model, cut, dist.get_rank(), 2)
    return (*gradients(compiled, model, inputs), apart)


def _named(passes: list[Any], prefix: str) -> list[Any]:
    """A function's modules are captured under their names."""
    passes[0].sharded = {prefix + name: where for name, where in passes[0].sharded.items()}
    return passes


@pytest.mark.parametrize("family", ["gpt", "t5"])
def test_two_ranks_with_half_a_vocabulary_each_are_one_device(family: str, ranks2: Ranks) -> None:
    model, inputs = step(family)
    cut = placed(cut_of(model), dict(model.named_parameters()))
    assert any(name.endswith("position_bias.weight") for name in cut) == (family == "t5")
    loss, want = gradients(model, model, inputs)
    for rank, (found_loss, found, apart) in enumerate(ranks2.run(divided, family)):
        assert abs(found_loss / loss - 1) < 1e-12
        assert apart >= 3  # the look-up, the labels, the gradient of the look-up
        assert set(found) == set(want)
        for name, whole in want.items():
            piece = local_part(whole, cut.get(name, "replicated"), rank, 2)
            error = float((found[name] - piece).norm() / piece.norm())
            assert error < 1e-11, (rank, name)


class Late(nn.Module):
    """Its forward graph can be divided, its backward graph cannot: gradients are scaled by frequency."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(8, 4))

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.table, scale_grad_by_freq=True).sum()


def test_a_program_that_is_refused_stays_as_it_was_and_a_copy_is_one_of_its_own() -> None:
    model, ids = Late().double(), torch.tensor([1, 2, 2, 7])
    program = capture(model, ids)
    assert isinstance(program, Program)
    before, inputs = str(program), list(program.flat.inputs)
    with pytest.raises(ValueError, match=r"table is cut along dim 0, its gradient replicated"):
        PassManager([TensorParallel("tensor", {"table": 0}, 2)]).run(program.graphs)
    assert str(program) == before
    assert program.flat.inputs == inputs
    torch.testing.assert_close(Compiled(program)(ids), model(ids))
    whole = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    x = torch.randn(3, 4, dtype=torch.float64)
    first = capture(whole, x)
    assert isinstance(first, Program)
    cut = {"0.weight": 0, "0.bias": 0, "2.weight": 1}
    PassManager([TensorParallel("tensor", cut, 2)]).run(first.copy().graphs)
    torch.testing.assert_close(Compiled(first)(x), whole(x))
