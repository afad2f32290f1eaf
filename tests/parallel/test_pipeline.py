"""Pipelines: where they cut, what they send, and whether every schedule computes what one device computes."""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fmlab import Ranks
from fmlab.models import BERT, GPT, T5, BERTConfig, GPTConfig, Llama, LlamaConfig, T5Config
from fmlab.models.diffusion import UNet
from fmlab.models.state import Block
from fmlab.parallel import Layout, parity
from fmlab.parallel.pipeline.messages import orders
from fmlab.parallel.pipeline.split_backward import SplitBackward, edge_of
from fmlab.parallel.pipeline.stages import chunks_of, crossing, cut_blocks, homes, work_of
from fmlab.sim.schedule import replay_schedule, schedule
from tests.parallel import common
from tests.parallel.common import VOCABULARY

multirank = pytest.mark.multirank


def gpt(layers: int = 7, tied: bool = True, vocabulary: int = VOCABULARY) -> GPT:
    return GPT(GPTConfig(vocabulary, 24, layers, 16, 2, tie_embeddings=tied))


def untied() -> GPT:
    return gpt(3, tied=False)


def llama() -> Llama:
    return Llama(LlamaConfig(VOCABULARY, 24, 3, 16, 4, num_kv_heads=2, ffn_size=24))


def bert() -> BERT:
    return BERT(BERTConfig(VOCABULARY, 24, 5, 16, 2, dropout=0.0, heads="pretraining"))


def t5() -> T5:
    return T5(T5Config(VOCABULARY, 3, 16, 2, 8, 24, num_decoder_layers=4))


def unet() -> UNet:
    return UNet.from_preset("unet-tiny")


# ---- where to cut ------------------------------------------------------------------------------------------


def cut(model: nn.Module, chunks: int, where: str | Sequence[int] = "even") -> list[range]:
    return cut_blocks(model, model.parallel_plan(), chunks, where)  # type: ignore[operator]


def layers_of(model: nn.Module, chunks: int) -> list[int]:
    return [sum(1 <= i <= len(model.blocks) - 2 for i in part) for part in cut(model, chunks)]  # type: ignore


@pytest.mark.parametrize(
    ("layers", "chunks", "expected"),
    [(7, 2, [3, 4]), (12, 5, [2, 2, 3, 2, 3]), (4, 4, [1] * 4), (8, 3, [2, 3, 3])],
)
def test_layers_are_shared_out_evenly(layers: int, chunks: int, expected: list[int]) -> None:
    with torch.device("meta"):
        model = gpt(layers)
    parts = cut(model, chunks)
    assert [i for part in parts for i in part] == list(range(layers + 2))
    assert layers_of(model, chunks) == expected
    assert max(expected) - min(expected) <= 1


def test_fewer_layers_than_chunks_share_out_blocks() -> None:
    assert cut(gpt(2), 4) == [range(i, i + 1) for i in range(4)]
    with pytest.raises(ValueError, match="GPT can be cut into 4 at most; use fewer stages"):
        cut(gpt(2), 5)


def test_a_weighted_cut_counts_the_output_head_and_not_the_table() -> None:
    with torch.device("meta"):
        model = gpt(7, vocabulary=1920)  # the head multiplies as much as ten layers do
    works = [work_of(block) for block in model.blocks]
    assert works[0] == 0
    assert works[-1] == 10 * works[1]
    assert cut(model, 2, "weighted") == [range(8), range(8, 9)]  # all layers, then the head
    assert cut(model, 2) == [range(4), range(4, 9)]
    for chunks in (2, 3, 4):  # no other cut has a smaller largest chunk
        before = [0, *accumulate(works)]
        largest = lambda parts: max(before[p.stop] - before[p.start] for p in parts)  # noqa: E731, B023
        every = (
            pairwise([0, *c, 9]) for c in product(range(1, 9), repeat=chunks - 1) if list(c) == sorted(set(c))
        )
        best = min(largest([range(a, b) for a, b in pairs]) for pairs in every)
        assert largest(cut(model, chunks, "weighted")) == best


def test_cuts_by_hand() -> None:
    assert cut(gpt(3), 3, (2, 4)) == [range(2), range(2, 4), range(4, 5)]
    with pytest.raises(ValueError, match="2 chunks need 1 ascending indices"):
        cut(gpt(3), 2, (2, 4))
    with pytest.raises(
        ValueError, match=r"a cut before block 7 .* BERT, which may be cut before blocks 1 to 6"
    ):
        cut(bert(), 2, (7,))  # its heads stay together
    with pytest.raises(ValueError, match="legal are even, weighted, or indices of blocks"):
        Layout(pipeline=2, stage_cuts="odd")
    with pytest.raises(ValueError, match="does nothing without pipeline above 1"):
        Layout(stage_cuts=(2,))


def test_what_crosses_a_cut() -> None:
    blocks: list[Block] = list(t5().blocks)  # type: ignore[arg-type]
    sent = [crossing(blocks, i) for i in range(1, len(blocks))]
    assert sent[1] == ["encoder_hidden", "encoder_bias"]  # behind the first layer of the encoder
    assert sent[4] == ["encoder_hidden"]  # its biases are dead behind its last layer
    assert set(sent[7]) == {"hidden", "encoder_hidden", "decoder_bias"}
    assert sent[-1] == ["hidden"]
    middle = crossing(list(unet().blocks), len(unet().blocks) // 2)  # type: ignore[arg-type]
    assert {"hidden", "skip_0", "skip_1"} <= set(middle)


def test_a_table_lives_where_it_is_needed() -> None:
    model = t5()
    where = {i: chunk.number for chunk in chunks_of(model, cut(model, 4)) for i in chunk.blocks}
    assert homes(model.ties()[0], where) == (0, 1, 3)  # encoder, decoder and head
    with pytest.raises(ValueError, match="stands in no block, so that no stage"):
        homes(["logit_scale"], where)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_the_actions_of_missing_micro_batches_can_be_left_out(stages: int) -> None:
    for present in range(1, 2 * stages):
        whole = schedule("interleaved", stages, 2 * stages, 2)
        kept = [[a for a in todo if a.micro_batch < present] for todo in whole]
        assert replay_schedule(kept).seconds > 0  # nobody waits for what is missing


@pytest.mark.parametrize(("kind", "chunks"), [("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zbv", 2)])
def test_each_message_has_its_place_on_one_channel(kind: str, chunks: int) -> None:
    plan = schedule(kind, 3, 6, chunks)
    sent = [(pair, action) for pair, actions in orders(plan, kind, chunks).items() for action in actions]
    assert len(set(sent)) == len(sent)
    crossings = 3 * chunks - 1 - (kind == "zbv")  # the turn of a V is no message
    assert len(sent) == 2 * 6 * crossings
    assert all(a != b for (a, b), _ in sent)


# ---- the backward pass in two parts ------------------------------------------------------------------------


def split_and_whole(
    run: Callable[[Tensor], list[Tensor]], parameters: Sequence[Tensor], x: Tensor
) -> tuple[float, int, int]:
    """(Largest difference, FLOPs of B, FLOPs of W)."""
    outputs = run(x)
    gradients = [torch.randn_like(output) for output in outputs]
    whole = torch.autograd.grad(outputs, [x, *parameters], gradients)
    split = SplitBackward([edge_of(output) for output in run(x)], [edge_of(x)])
    for parameter in parameters:
        parameter.grad = None
    with FlopCounterMode(display=False) as of_inputs:
        (d_x,) = split.input_pass(gradients)
    assert all(p.grad is None for p in parameters)
    with FlopCounterMode(display=False) as of_weights:
        split.weight_pass()
    assert split.held == 0
    found = [d_x, *(p.grad for p in parameters)]
    error = max((a - b).abs().max().item() for a, b in zip(whole, found, strict=True))  # type: ignore[operator]
    return error, of_inputs.get_total_flops(), of_weights.get_total_flops()


def test_two_parts_of_a_backward_pass_do_its_work_once() -> None:
    model = gpt(2).double()
    ids = torch.randint(VOCABULARY, (2, 5))
    x = torch.randn(2, 5, 16, dtype=torch.float64, requires_grad=True)

    def run(hidden: Tensor) -> list[Tensor]:
        state = model.prepare(ids).updated(hidden=hidden)
        for block in list(model.blocks)[1:3]:
            state = block(state)
        return [state.hidden]

    parameters = [p for block in list(model.blocks)[1:3] for p in block.parameters()]
    error, of_inputs, of_weights = split_and_whole(run, parameters, x)
    assert error < 1e-12
    products = 2 * 2 * 2 * 5 * 12 * 16 * 16  # layers x (multiply, add) x tokens x elements of the matrices
    assert of_weights == products
    assert products <= of_inputs <= 1.4 * products  # attention's own products come on top


def test_weights_that_are_used_twice_or_off_the_way() -> None:
    twice, once = (nn.Linear(6, 6).double() for _ in range(2))
    table = nn.Embedding(9, 6).double()
    ids = torch.randint(9, (3,))
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    weights = [*twice.parameters(), *once.parameters(), *table.parameters()]
    cases: list[Callable[[Tensor], list[Tensor]]] = [
        lambda x: [twice(once(twice(x)).tanh()) + x, x, table(ids)],  # one output that no input leads to
        lambda x: [once(x + twice(table(ids))) + once(twice(table(ids))) + table.weight.sum()],
        lambda x: [twice(x), once(table(ids)) * table.weight.sum(), twice(table(ids))],
    ]
    for case in cases:
        assert split_and_whole(case, weights, x)[0] < 1e-12


# ---- equal to one device -----------------------------------------------------------------------------------


def layout(schedule: str = "1f1b", micro_batches: int = 4, pipeline: int = 2, **others: Any) -> Layout:
    virtual_stages = 2 if schedule in ("interleaved", "zbv") else 1
    others = {"virtual_stages": virtual_stages, **others}
    return Layout(pipeline=pipeline, schedule=schedule, micro_batches=micro_batches, **others)


ON_TWO = [
    (common.gpt, layout("1f1b", 4), "fp64"),
    (untied, layout("gpipe", 1), "fp64"),
    (gpt, layout("interleaved", 4), "fp64"),
    (gpt, layout("zb-h1", 5, stage_cuts="weighted"), "fp32"),
    (llama, layout("zb-h1", 3), "fp64"),
    (bert, layout("zbv", 2), "fp64"),
    (t5, layout("zbv", 3), "fp64"),
    (unet, layout("1f1b", 2), "fp64"),
]
ON_FOUR = [
    (t5, layout("1f1b", 3, 4), "fp64"),  # its table is on three stages
    (gpt, layout("gpipe", 2, 4), "fp64"),  # fewer micro-batches than stages
    (gpt, layout("zb-h1", 8, 4), "fp32"),
    (gpt, layout("interleaved", 4, 4), "fp64"),
    (common.gpt, layout("1f1b", 3, data=2), "fp64"),
    (t5, layout("zb-h1", 2, data=2), "fp64"),
    (gpt, layout("zbv", 2, tensor=2, sequence_parallel=True), "fp64"),
    (common.gpt, layout("1f1b", 2, data=2, zero=2), "fp64"),
    (common.gpt, layout("1f1b", 2, data=2, fsdp=True), "fp64"),
]


def name_of(value: object) -> str:
    shown = str(value).removeprefix("Layout(").removesuffix(")") if isinstance(value, Layout) else str(value)
    return getattr(value, "__name__", shown)


@multirank
@pytest.mark.parametrize(("model", "layout", "precision"), ON_TWO, ids=name_of)
def test_two_stages_equal_one_device(ranks2: Ranks, model: Any, layout: Layout, precision: str) -> None:
    parity(model, layout, precision=precision, ranks=ranks2, max_grad_norm=0.1).raise_if_different()


@multirank
@pytest.mark.parametrize(("model", "layout", "precision"), ON_FOUR, ids=name_of)
def test_four_ranks_equal_one_device(ranks4: Ranks, model: Any, layout: Layout, precision: str) -> None:
    parity(model, layout, precision=precision, ranks=ranks4, max_grad_norm=0.1).raise_if_different()


@multirank
@pytest.mark.parametrize("kind", ["1f1b", "interleaved"])
def test_micro_batches_of_any_shape_and_some_without_targets(ranks2: Ranks, kind: str) -> None:
    first = [common.tokens(3, [5, 0, 9]), common.tokens(1, [0]), common.tokens(3, [12, 1, 1], 1, length=20)]
    second = [common.tokens(2, [3, 4], 3, length=7), common.tokens(3, [5, 5, 5], 4)]
    nothing = [common.tokens(2, [0, 0])] * 2
    batches = [[first], [second], [first], [nothing]]
    # two, two, two and no micro-batches with targets: fewer than the four that "interleaved" was made for
    report = parity(gpt, layout(kind, 4), batches=batches, precision="fp64", ranks=ranks2, optimizer="adamw")
    report.raise_if_different()


def frozen() -> nn.Module:
    model = gpt(3)
    for block in (model.blocks[0], model.blocks[1]):
        block.requires_grad_(False)
    return model


def half_frozen() -> nn.Module:
    model = gpt(4, tied=False)
    model.blocks[:3].requires_grad_(False)
    return model


@multirank
def test_frozen_layers(ranks2: Ranks) -> None:
    for kind in ("1f1b", "zb-h1"):  # nothing is sent back to what is frozen
        parity(frozen, layout(kind, 2, stage_cuts=(3,)), precision="fp64", ranks=ranks2).raise_if_different()
    with pytest.raises(ValueError, match="stage 0 of the pipeline has no parameter to train"):
        parity(half_frozen, layout(), ranks=ranks2)
