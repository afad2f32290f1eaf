"""The parts of tensor parallelism: what they send and when, a divided vocabulary, shared heads, refusals."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fmlab import Ranks
from fmlab.meter import traffic
from fmlab.models import GPT, GPTConfig, Llama, Rule
from fmlab.models.cross_entropy import linear_cross_entropy
from fmlab.objectives import Seq2SeqLM
from fmlab.parallel import Layout
from fmlab.parallel.mesh import Axis, Mesh
from fmlab.parallel.tensor import VocabParallelCrossEntropy, legal_degrees
from fmlab.parallel.tensor.check import check
from fmlab.parallel.tensor.cost import language_model_payload, pair_payload, wire_bytes
from fmlab.parallel.tensor.linears import column_linears
from fmlab.parallel.tensor.sequence import in_order_of_ranks
from tests.parallel import common
from tests.parallel.test_tensor import SEQUENCE, Mute, V, mixtral, t5

multirank = pytest.mark.multirank


# ---- what travels -------------------------------------------------------------------------------------


def _measure(sequence_parallel: bool) -> dict[str, int]:
    engine = common.engine(1, tensor=2, sequence_parallel=sequence_parallel)
    batch = common.tokens(4, [12, 12, 3, 12])
    engine.step([batch])  # the first step also asks whether the ranks were given the same
    with traffic() as seen:
        engine.step([batch])
    engine.close()
    return {op: size for op, (_, size) in seen.by_op().items()}


@multirank
@pytest.mark.parametrize("sequence", [False, True])
def test_payload_equals_the_formula(ranks2: Ranks, sequence: bool) -> None:
    model = common.gpt()
    whole = ("norm.weight", "norm.bias", "output.bias", "down.bias")
    in_stream = [p.numel() for name, p in model.named_parameters() if name.endswith(whole)]
    expected = language_model_payload(3, 4, 12, 16, 2, sequence, replicated=sum(in_stream))
    expected["all_reduce"] += 4  # the gradient's norm
    for measured in ranks2.run(_measure, sequence):
        assert measured == expected


def _measure_t5() -> int:
    engine = common.engine(1, t5(), objective=Seq2SeqLM(), tensor=2)
    ids = common.tokens(4, [12] * 4)
    with traffic() as seen:
        engine.step([{"input_ids": ids["input_ids"], "labels": ids["labels"][:, :5]}])
    engine.close()
    return seen.bytes("all_reduce")


@multirank
def test_the_gradient_of_what_an_encoder_made_is_summed_once(ranks2: Ranks) -> None:
    read, written = (4 * length * 16 * 4 for length in (12, 5))
    layers = 2 * (2 * 2 * read + 3 * 2 * written)  # two pairs, three pairs
    expected = (read + written) + layers + read + (written + 3 * 4 * 5 * 4) + 4
    assert ranks2.run(_measure_t5) == [expected] * 2


def test_sequence_parallelism_sends_a_quarter_more_than_tensor_parallelism() -> None:
    plain, cut = (wire_bytes(pair_payload(8, 1024, 768, 4, s), 4) for s in (False, True))
    assert cut == 5 / 4 * plain  # the input that is gathered again instead of kept
    assert plain == 4 * 2 * 3 / 4 * 8 * 1024 * 768 * 4


class _Order(TorchDispatchMode):
    """Notes products; `events` also gets what a recording axis is asked to do."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            self.events.append("mm")
        return func(*args, **(kwargs or {}))


class _Recorded(Mute):
    def __init__(self, events: list[str]) -> None:
        super().__init__(Axis("tensor", (0, 1), 0, None))
        self.events = events

    def all_reduce_(self, tensor: Tensor, async_op: bool = False, op: str = "sum") -> Any:
        self.events.append("send")
        return self

    def wait(self) -> None:
        self.events.append("wait")


def test_the_sum_of_f_travels_behind_the_gradients_of_the_weights() -> None:
    events: list[str] = []
    x, wide, narrow = (torch.randn(5, 4, requires_grad=True) for _ in range(3))
    outputs = column_linears(x, [(wide, None), (narrow, None)], _Recorded(events))
    with _Order(events):
        sum(y.sum() for y in outputs).backward()
    assert events == ["mm", "send", "mm", "mm", "wait"]  # d_x (and an addmm), then both d_weight
    assert x.grad is not None
    assert torch.allclose(x.grad, (wide.sum(0) + narrow.sum(0)).expand(5, 4))


# ---- the parts ---------------------------------------------------------------------------------------------


def _losses(bias: bool) -> list[Tensor]:
    """Loss and gradients over a divided vocabulary of 5 on this mesh, and over the whole."""
    mesh = Mesh(Layout(tensor=4).grid())
    axis = mesh.axis("tensor")
    generator = torch.Generator().manual_seed(0)
    hidden, table = (torch.randn(n, 3, generator=generator, dtype=torch.float64) for n in (7, 5))
    offset = torch.randn(5, generator=generator, dtype=torch.float64) if bias else None
    labels = torch.tensor([4, 0, -100, 2, 3, 1, 4])
    rule = Rule("t", "vocab")
    whole = [t.clone().requires_grad_() for t in (hidden, table, offset) if t is not None]
    mine = [hidden.clone(), *(rule.shard(t, axis.rank, 4) for t in (table, offset) if t is not None)]
    mine = [t.requires_grad_() for t in mine]
    loss = VocabParallelCrossEntropy(axis, 5)(mine[0], mine[1], labels, *mine[2:])
    expected = linear_cross_entropy(whole[0], whole[1], labels, *whole[2:])
    (2 * loss).backward()
    (2 * expected).backward()
    mesh.close()
    wanted = [whole[0].grad, *(rule.shard(t.grad, axis.rank, 4) for t in whole[1:])]
    return [(loss - expected).detach(), *(t.grad - want for t, want in zip(mine, wanted, strict=True))]


@multirank
@pytest.mark.parametrize("bias", [False, True])
def test_a_vocabulary_smaller_than_its_padding(ranks4: Ranks, bias: bool) -> None:
    for differences in ranks4.run(_losses, bias):  # rank 3 has padded words only
        assert max(float(d.abs().max()) for d in differences) < 1e-14


def test_labels_in_the_order_of_gathered_rows() -> None:
    labels = torch.arange(10).view(2, 5)
    assert in_order_of_ranks(labels, 2).flatten().tolist() == [0, 1, 2, 5, 6, 7, 3, 4, -100, 8, 9, -100]


def test_shared_heads_are_copied_to_neighbours_and_joined_once() -> None:
    rule = Rule("kv", "column", parts=2, unit=3, shared=True)
    whole = torch.arange(12.0)[:, None]  # two heads of keys, two of values
    shards = [rule.shard(whole, rank, 4) for rank in range(4)]
    assert torch.equal(shards[0], shards[1])
    assert shards[2].flatten().tolist() == [3, 4, 5, 9, 10, 11]
    assert torch.equal(rule.unshard(shards, whole.shape), whole)
    assert rule.degrees(whole.shape, 6) == [1, 2, 4, 6]


@pytest.mark.parametrize(
    ("heads", "legal"),
    [(28, [1, 2, 4, 7, 14, 28]), (12, [1, 2, 3, 4, 6, 12]), (40, [1, 2, 4, 5, 8, 10, 20, 40])],
)
def test_legal_degrees_divide_the_heads(heads: int, legal: list[int]) -> None:
    model = GPT(GPTConfig(10, 4, 1, 2 * heads, heads))
    assert legal_degrees(model, model.parallel_plan()) == legal


def test_key_value_heads_may_be_fewer_than_ranks_but_must_fit() -> None:
    with torch.device("meta"):
        model = Llama.from_preset("llama2-7b", num_kv_heads=8, num_layers=1)
    assert legal_degrees(model, model.parallel_plan(), 64) == [1, 2, 4, 8, 16, 32]


class Wrapped(nn.Linear):
    """A linear layer with a forward of its own."""


def _wrapped() -> GPT:
    model = common.gpt()
    layer = model.blocks[1].mlp.up
    model.blocks[1].mlp.up = Wrapped(layer.in_features, layer.out_features)
    return model


def _own_loss() -> GPT:
    config = GPTConfig(V, 16, 1, 16, 2)
    return GPT(config, cross_entropy=lambda hidden, weight, labels: hidden.sum())


def _with_hook() -> GPT:
    model = common.gpt()
    model.blocks[1].mlp.down.register_forward_hook(lambda *_: None)
    return model


@multirank
@pytest.mark.parametrize(
    ("build", "layout", "message"),
    [
        (_wrapped, dict(tensor=2), r"mlp.up is a Wrapped: tensor.*divides the weights of Linear"),
        (_own_loss, dict(tensor=2), "was given its own"),
        (_with_hook, dict(tensor=2), "mlp.down has forward hooks"),
        (mixtral, SEQUENCE, "plan of Mixtral names no streams"),
    ],
)
def test_what_cannot_be_divided_is_refused_before_anything_is_changed(
    build: Callable[[], nn.Module], layout: dict[str, Any], message: str
) -> None:
    model = build()
    with pytest.raises(ValueError, match=message):
        check(model, model.parallel_plan(), 2, layout.get("sequence_parallel", False))  # type: ignore[operator]
