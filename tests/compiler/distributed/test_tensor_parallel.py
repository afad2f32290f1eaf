"""Tensor parallelism as a pass: values and gradients of blocks, how many sums and where, and refusals."""

import math
import random
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmlab.compiler import (
    Compiled,
    Overlap,
    PassManager,
    Program,
    Shard,
    TensorParallel,
    capture,
    default_passes,
    local_part,
    overlap_timeline,
    shard_parameters,
)
from fmlab.compiler import graph as g
from fmlab.compiler.distributed.placement import viewed
from fmlab.models.attention import AttentionMask
from fmlab.models.attention.core import sdpa_core
from fmlab.models.layers import MLP, GatedMLP, SelfAttention
from tests.compiler.distributed.lockstep import Cut, assert_as_on_one_device, divided

X = torch.randn(2, 6, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    """x + f(norm(x)), and a bias behind."""

    def __init__(self, inside: nn.Module, **more: object):
        super().__init__()
        self.norm, self.inside, self.more = nn.LayerNorm(16), inside, more
        self.bias = nn.Parameter(torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inside(self.norm(x), **self.more) + self.bias


class WrittenOut(nn.Module):
    """Attention without a fused operator."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            f(x).unflatten(2, (4, 4)).transpose(1, 2) for f in (self.query, self.key, self.value)
        )  # [b,h,l,k]
        scores = (q @ k.transpose(2, 3)) / math.sqrt(4)
        return self.output((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def causal() -> AttentionMask:
    return AttentionMask(queries=6, keys=6, causal=True)


LINEARS = {f"inside.{name}.{kind}": 0 for name in ("query", "key", "value") for kind in ("weight", "bias")}
FEED_FORWARD: Cut = {"inside.up.weight": 0, "inside.up.bias": 0, "inside.down.weight": 1}
QKV: Cut = {"inside.qkv.weight": Shard(0, 3), "inside.qkv.bias": Shard(0, 3)}
BLOCKS: dict[str, tuple[Callable[[], nn.Module], Cut]] = {
    "mlp": (lambda: MLP(16, 24), FEED_FORWARD),
    "mlp with a bias in the product": (Plain, FEED_FORWARD),
    "gated mlp": (lambda: GatedMLP(16, 24), {"inside.gate_up.weight": Shard(0, 2), "inside.down.weight": 1}),
    "attention": (lambda: SelfAttention(16, 4, sdpa_core), QKV | {"inside.output.weight": 1}),
    "attention written out": (WrittenOut, LINEARS | {"inside.output.weight": 1}),
}


def made(block: str) -> tuple[nn.Module, Cut]:
    torch.manual_seed(0)
    build, cut = BLOCKS[block]
    model = Block(build(), **({"mask": causal()} if block == "attention" else {})).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model, cut


@pytest.mark.parametrize(
    ("block", "ranks"), [*((block, 2) for block in BLOCKS), ("attention", 4), ("attention written out", 4)]
)
def test_a_divided_block_is_that_of_one_device(block: str, ranks: int) -> None:
    """Megatron's g in the forward graph and its f in the backward graph, one of each."""
    model, cut = made(block)
    program, one = assert_as_on_one_device(model, [X.clone().requires_grad_()], cut, ranks)
    for name, graph in program.graphs.items():
        assert g.counts(graph)["all_reduce"] == 1
        (start,) = (node for node in graph.nodes if g.name(node) == "all_reduce")
        assert one.placements[name][start.args[0].name] == "partial"
        assert math.prod(g.shape(start)) == X.numel()


def test_the_sum_of_the_backward_pass_travels_while_weights_get_their_gradients() -> None:
    model, cut = made("attention")
    program, _ = divided(model, [X.clone().requires_grad_()], cut, 2)
    graph = program.graphs["backward"]
    rates = dict(flops_rate=1e9, bandwidth=1e9, latency=0)
    before = overlap_timeline(graph, **rates).exposed
    Overlap().run(graph)
    names = [g.name(node) for node in g.calls(graph)]
    assert "mm" in names[names.index("all_reduce") : names.index("wait_tensor")]
    assert overlap_timeline(graph, **rates).exposed < before


def test_other_passes_work_on_divided_graphs() -> None:
    model, cut = made("mlp with a bias in the product")
    program, _ = divided(model, [X], cut, 2)
    shapes = {node.name: g.shape(node) for node in program.forward.graph.nodes if node.op == "placeholder"}
    PassManager(default_passes()).run(program.graphs)
    report = PassManager([TensorParallel("tensor", {}, 2)])
    with pytest.raises(ValueError, match="divided over ranks already"):
        report.run(program.graphs)
    assert (24 // 2, 16) in shapes.values()
    with pytest.raises(
        ValueError, match=r"parameter inside.up.weight has shape \(24, 16\), captured \(12, 16\)"
    ):
        Compiled(program)(X)  # whole weights: nothing is computed
    shard_parameters(model, cut, rank=1, ranks=2)
    assert model.get_parameter("inside.up.weight").shape == (12, 16)


def test_pieces_make_up_the_whole_and_tied_weights_stay_tied() -> None:
    table = nn.Parameter(torch.arange(24.0).view(12, 2))
    first, second = nn.Linear(2, 12, bias=False), nn.Linear(2, 12, bias=False)
    first.weight = second.weight = table
    model = nn.ModuleList([first, second])
    pieces = [local_part(table, Shard(0, 3), rank, 2) for rank in range(2)]
    assert pieces[1][:, 0].tolist() == [4, 6, 12, 14, 20, 22]
    shard_parameters(model, {"0.weight": Shard(0, 3)}, rank=1, ranks=2)
    assert first.weight is second.weight
    assert torch.equal(first.weight, pieces[1])
    assert first.weight.requires_grad


def test_a_view_keeps_the_pieces_or_is_refused() -> None:
    """For many shapes: a rank's view of its piece is its piece of the view, wherever a place is given."""
    draw, known = random.Random(0), 0
    for _ in range(400):
        shape, new = ([2 ** draw.randint(0, 3) * draw.choice([1, 3]) for _ in range(3)] for _ in range(2))
        shape[draw.randrange(3)] = max(math.prod(new) // max(math.prod(shape[:-1]), 1), 1)
        shard = Shard(draw.randrange(3), draw.choice([1, 2, 3]))
        if math.prod(shape) != math.prod(new) or shape[shard.dim] % (2 * shard.parts):
            continue
        found = viewed(tuple(shape), tuple(new), shard, 2)
        if found is None:
            continue
        known += 1
        whole = torch.arange(math.prod(shape)).view(shape)
        local = [n // 2 if dim == found.dim else n for dim, n in enumerate(new)]
        for rank in range(2):
            piece = local_part(whole, shard, rank, 2).view(local)
            assert torch.equal(piece, local_part(whole.view(new), found, rank, 2))
    assert known > 10


class Named(nn.Module):
    """What the refusals are about: the lines below must be named."""

    def __init__(self, how: str):
        super().__init__()
        self.how = how
        self.up, self.down, self.norm = nn.Linear(4, 8), nn.Linear(8, 4), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        made = self.up(x)  # up
        if self.how == "norm":
            made = F.layer_norm(made, (8,))  # norm
        if self.how == "dropout":
            x = F.dropout(x, 0.5)  # dropout
            return self.down(F.relu(made)) + x
        if self.how == "sorted":
            made = made.sort(-1).values  # sorted
        return made if self.how == "cut" else self.down(made)  # down


UP: Cut = {"up.weight": 0, "up.bias": 0}
REFUSED: dict[str, tuple[str, Cut, str]] = {
    "a result that is cut": ("cut", UP, "result 0 is cut along dim 1 and must be whole.*# up"),
    "a whole matrix behind a cut one": ("", UP, "no placement is known of addmm.*down.weight|t_1.*# down"),
    "a norm over the cut": ("norm", UP | {"down.weight": 1}, "of native_layer_norm of .*cut along.*# norm"),
    "a bias that is not cut": ("", {"up.weight": 0}, r"addmm of up.bias \[8\] \(replicated\).*# up"),
    "an operator without a rule": (
        "sorted",
        UP | {"down.weight": 1},
        "no placement is known of sort.*# sorted",
    ),
    "dropout": ("dropout", UP | {"down.weight": 1}, "draws random numbers.*# dropout"),
    "an unknown name": (
        "",
        {"left.weight": 0},
        "no parameter is called 'left.weight'; legal: up.weight, up.bias",
    ),
    "a dim that is not there": ("", {"up.weight": 2}, r"up.weight: \[8, 4\] has no dim 2; legal: 0 to 1"),
    "pieces of two sizes": (
        "",
        {"up.weight": Shard(0, 3)},
        r"dim 0 of \[8, 4\] cannot be cut into 3 parts of 2",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_divided_is_refused_with_its_line(case: str) -> None:
    how, cut, why = REFUSED[case]
    with pytest.raises(ValueError, match=r"legal|cut|TensorParallel") as error:
        divided(Named(how), [torch.rand(3, 4, requires_grad=True)], cut, 2)
    assert re.search(why, str(error.value).replace("\n", " ")), error.value
    if "# " in why:
        assert "test_tensor_parallel.py:" in str(error.value)


def test_graphs_in_the_wrong_order_and_groups_without_a_size_are_refused() -> None:
    program = capture(Plain(), torch.rand(2, 6, 16))
    assert isinstance(program, Program)
    with pytest.raises(ValueError, match="a forward graph first"):
        TensorParallel("tensor", {}, 2).run(program.graphs["backward"])
    with pytest.raises(ValueError, match="give ranks="):
        TensorParallel("tensor", {})
    with pytest.raises(ValueError, match="ranks is 0"):
        TensorParallel("tensor", {}, 0)


def test_dropout_is_refused_in_divided_heads_too() -> None:
    for causal_mask in (True, False):  # a flag that is no number
        attention = SelfAttention(16, 4, sdpa_core, dropout=0.5)
        block = Block(attention, mask=AttentionMask(queries=6, keys=6, causal=causal_mask)).double()
        with pytest.raises(ValueError, match=r"draws random numbers.*\n  at .*core.py"):
            divided(block, [X], BLOCKS["attention"][1], 2)


def test_heads_are_not_cut_in_two() -> None:
    attention = SelfAttention(12, 4, sdpa_core)  # 3 heads of 4

    def run(x: Tensor) -> Tensor:
        y: Tensor = attention(x, causal())
        return y

    names = {name: Shard(0, 3) for name in ("attention.qkv.weight", "attention.qkv.bias")}
    with pytest.raises(
        ValueError, match=r"of view of .* \(cut along dim 2 in each of 3 parts\)\n  at .*layers.py"
    ):
        divided(run, [torch.rand(2, 6, 12)], names, 2)
