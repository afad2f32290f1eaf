"""What makes a layout legal is known from shapes alone, before any process starts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fmlab.models import (
    BERT,
    CLIP,
    GPT,
    T5,
    Block,
    GPTConfig,
    Llama,
    Mixtral,
    ParallelPlan,
    State,
    UNet,
    check_plan,
    draft_plan,
)
from fmlab.models.base import Model
from fmlab.objectives import Contrastive
from fmlab.parallel import Layout, legal, parity
from fmlab.parallel.cli import main


def meta(build: Callable[[], Any]) -> Any:
    with torch.device("meta"):
        return build()


def gpt(heads: int = 4, layers: int = 2) -> GPT:
    return meta(lambda: GPT(GPTConfig(131, 64, layers, 4 * heads, heads)))


PRESETS = {
    "gpt": lambda: GPT.from_preset("gpt2-tiny"),
    "llama": lambda: Llama.from_preset("llama-tiny"),
    "bert": lambda: BERT.from_preset("bert-tiny"),
    "t5": lambda: T5.from_preset("t5-tiny"),
    "mixtral": lambda: Mixtral.from_preset("mixtral-tiny"),
    "clip": lambda: CLIP.from_preset("clip-tiny"),
    "unet": lambda: UNet.from_preset("unet-tiny"),
}


# --- tensor degrees ---


@pytest.mark.parametrize(
    ("heads", "degrees"),
    [(28, [1, 2, 4, 7, 14, 28]), (12, [1, 2, 3, 4, 6, 12]), (40, [1, 2, 4, 5, 8, 10, 20, 40])],
)
def test_tensor_degrees_divide_the_heads(heads: int, degrees: list[int]) -> None:
    assert legal.Case(Layout(), model=gpt(heads)).tensor_degrees == degrees
    legal.check(Layout(tensor=degrees[-2]), model=gpt(heads))


@pytest.mark.parametrize("heads", [40, 52])
def test_an_illegal_tensor_degree_names_the_matrix_its_heads_and_the_legal_degrees(heads: int) -> None:
    with pytest.raises(ValueError, match=rf"attention\.qkv\.weight \({heads} heads\).*; legal are 1, 2, 4"):
        Layout(tensor=3).validate(3, model=gpt(heads))


@pytest.mark.parametrize("family", list(PRESETS))
def test_every_family_may_be_divided_and_cut_in_two(family: str) -> None:
    model = meta(PRESETS[family])
    assert not legal.problems(Layout(tensor=2, pipeline=2, data=2), 8, 8, model)


# --- stages and micro-batches ---


def test_a_cut_is_looked_up_in_the_plan() -> None:
    legal.check(Layout(pipeline=2, stage_cuts=(3,)), model=gpt())
    with pytest.raises(ValueError, match="a cut before block 9 is not allowed by the plan of GPT"):
        legal.check(Layout(pipeline=2, stage_cuts=(9,)), model=gpt())
    with pytest.raises(ValueError, match=r"stage_cuts=\(3,\): 3 chunks need 2 ascending indices"):
        legal.check(Layout(pipeline=3, stage_cuts=(3,)), model=gpt())


def test_fewer_layers_than_stages() -> None:
    legal.check(Layout(pipeline=4), model=gpt(layers=2))  # embedding, two layers, head
    with pytest.raises(ValueError, match=r"GPT can be cut into 4 at most; legal.*up to 4"):
        Layout(pipeline=5).validate(5, model=gpt(layers=2))
    with pytest.raises(ValueError, match=r"x virtual_stages=2 needs 8 stages.*pipeline up to 2"):
        legal.check(
            Layout(pipeline=4, schedule="interleaved", virtual_stages=2, micro_batches=4), model=gpt()
        )


def test_interleaved_wants_whole_groups_and_fewer_micro_batches_than_stages_run_elsewhere() -> None:
    with pytest.raises(ValueError, match=r"in groups of 2 .* micro_batches=3 is illegal; use 2 or 4"):
        Layout(pipeline=2, schedule="interleaved", virtual_stages=2, micro_batches=3)
    assert not legal.problems(Layout(pipeline=4, micro_batches=2), model=gpt())


def test_rows_that_cannot_be_cut_into_micro_batches() -> None:
    with pytest.raises(
        ValueError, match=r"8 rows cannot be cut into .* 1 x 3 = 3 equal parts; use 6 or 9 rows"
    ):
        Layout(micro_batches=3).validate(1, 8)


def test_a_loss_over_the_whole_batch_has_no_micro_batches() -> None:
    with pytest.raises(ValueError, match="micro_batches=2: Contrastive compares each sample with all others"):
        legal.check(Layout(micro_batches=2), objective=Contrastive())


# --- ranks ---


def test_degrees_that_do_not_multiply_to_the_ranks_name_the_nearest_that_do() -> None:
    with pytest.raises(ValueError, match=r"wrong|ranks") as caught:
        Layout(tensor=2, pipeline=4).validate(6, model=gpt(12, 4))
    text = str(caught.value)
    assert "needs 8 ranks (data=1 x tensor=2 x pipeline=4), but there are 6" in text
    assert "nearest for 6: tensor=2 x pipeline=3" in text
    with pytest.raises(ValueError, match="set data=4"):
        Layout(data=2).validate(4)


def test_the_nearest_degrees_are_legal_for_the_model() -> None:
    with pytest.raises(ValueError, match=r"wrong|ranks") as caught:
        Layout(tensor=3).validate(4, model=gpt(28))
    assert "nearest for 4: tensor=4, data=2 x tensor=2" in str(caught.value)
    assert "tensor=3 cannot divide" in str(caught.value)  # both are wrong, both are said


# --- sequences ---


@pytest.mark.parametrize("length", [36, 37, 1])
def test_any_length_can_be_cut_that_the_model_can_read(length: int) -> None:
    for layout in (Layout(context=4), Layout(tensor=2, sequence_parallel=True, context=2)):
        assert not legal.problems(layout, seq_len=length, model=gpt())
    with pytest.raises(ValueError, match=r"rows of 65 tokens are longer than the model's 64 positions"):
        Layout(context=2).validate(2, seq_len=65, model=gpt())


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(tensor=2, sequence_parallel=True), "the plan of CLIP names no streams"),
        (Layout(context=2), "CLIP cannot be divided along its sequences"),
    ],
)
def test_what_looks_at_all_positions_is_not_cut_along_them(layout: Layout, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layout.validate(2, model=meta(PRESETS["clip"]))


def test_ulysses_exchanges_whole_heads() -> None:
    ulysses = Layout(context=4, context_method="ulysses", tensor=2)
    assert not legal.problems(ulysses, model=gpt(8))
    with pytest.raises(ValueError, match=r"2 .*heads.*legal"):
        legal.check(ulysses, model=gpt(4))


# --- experts ---


def test_experts_must_be_there_and_divide() -> None:
    mixtral = meta(PRESETS["mixtral"])  # 8 experts
    assert not legal.problems(Layout(data=4, expert=4), model=mixtral)
    with pytest.raises(ValueError, match="expert=3 does not divide 8 experts; legal are 1"):
        legal.check(Layout(data=3, expert=3), model=mixtral)
    with pytest.raises(ValueError, match="expert=2: GPT has no experts"):
        legal.check(Layout(data=2, expert=2), model=gpt())


# --- models without a plan ---


class Plain(nn.Module):
    """An attention layer, a feed-forward layer and a tied head, as somebody writes them who knows no plan."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(31, 24), nn.Embedding(16, 24)
        self.layers = nn.ModuleList(nn.ModuleDict(dict(attn=Heads(), mlp=Wide())) for _ in range(2))
        self.mixer = nn.Parameter(torch.ones(24, 24))
        self.head = nn.Linear(24, 31, bias=False)
        self.head.weight = self.embed.weight


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head_dim = 6
        self.q, self.k, self.v = nn.Linear(24, 24), nn.Linear(24, 12), nn.Linear(24, 12)
        self.o = nn.Linear(24, 24)


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(24)
        self.gate_up, self.down = nn.Linear(24, 2 * 64, bias=False), nn.Linear(64, 24)


def test_a_draft_recognises_pairs_embeddings_and_norms_and_lists_the_rest() -> None:
    draft = draft_plan(Plain())
    rule = draft.plan.rule
    assert rule("embed.weight").kind == rule("head.weight").kind == "vocab"
    assert rule("position.weight").kind == "replicate"
    assert [rule(f"layers.1.attn.{n}.weight").kind for n in "qkvo"] == ["column"] * 3 + ["row"]
    assert rule("layers.0.attn.k.bias").unit == 6
    assert (rule("layers.0.mlp.gate_up.weight").parts, rule("layers.0.mlp.down.weight").kind) == (2, "row")
    assert rule("layers.0.mlp.down.bias").kind == rule("layers.0.mlp.norm.bias").kind == "replicate"
    assert draft.plan.tied == (("embed.weight", "head.weight"),)
    assert draft.unresolved == ("mixer",)
    assert 'Rule(r"layers\\.\\d+\\.mlp\\.gate_up\\.weight", "column", parts=2)' in str(draft)


def test_a_draft_of_a_family_is_its_own_plan() -> None:
    """Where the structure says it all, the draft divides as the declared plan does, and passes its proof."""
    model = GPT(GPTConfig(31, 16, 2, 24, 4))
    drafted, declared = draft_plan(model).plan, model.parallel_plan()
    for name, _ in model.named_parameters(remove_duplicate=False):
        found, said = drafted.rule(name), declared.rule(name)
        assert (found.kind, found.parts, found.unit) == (said.kind, said.parts, said.unit), name
    assert (drafted.tied, drafted.cuts) == (declared.tied, declared.cuts)
    model.parallel_plan = lambda: drafted  # type: ignore[method-assign]
    check_plan(model, {"input_ids": torch.arange(8).view(1, 8)})


def test_a_model_without_a_plan_is_told_what_a_draft_would_hold_and_what_works_without() -> None:
    with pytest.raises(
        ValueError, match=r"Plain has none.*draft_plan.*1 matrices are left.*mixer.*zero, fsdp"
    ):
        Layout(tensor=2).validate(2, model=Plain())
    assert not legal.problems(Layout(data=2, zero=2, micro_batches=2), 2, model=Plain())


class Silent(Model):
    """Derived from our base, but without a plan of its own."""


def test_a_family_that_declares_nothing_is_a_model_without_a_plan() -> None:
    with pytest.raises(ValueError, match="Silent has none"):
        legal.check(Layout(pipeline=2), model=Silent())


class Step(Block):
    reads = ("x",)
    writes = ("x",)

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, state: State) -> State:
        return state.updated(x=self.norm(self.linear(state.x)))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Step(), Step()])

    def prepare(self, x: Tensor) -> State:
        return State(x=x)

    def parallel_plan(self) -> ParallelPlan:
        return draft_plan(self).plan


def test_batch_statistics_are_refused_by_name_and_several_wrongs_are_all_said() -> None:
    with pytest.raises(ValueError, match=r"wrong|ranks") as caught:
        Layout(data=2, pipeline=3, micro_batches=2).validate(6, 6, model=Stack())
    text = str(caught.value)
    assert text.startswith("3 things are wrong with this layout:\n(1) a global batch of 6 rows")
    assert "Stack can be cut into 2 at most" in text
    assert "'blocks.0.norm' is a BatchNorm1d" in text


# --- nobody starts a process for it ---


def test_parity_and_its_command_refuse_before_a_rank_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: Any, **__: Any) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr("fmlab.ranks.Ranks.__init__", started)
    with pytest.raises(ValueError, match=r"\(28 heads\).*legal are 1, 2, 4, 7, 14, 28"):
        parity(lambda: GPT(GPTConfig(131, 64, 2, 112, 28)), Layout(tensor=3))
    with pytest.raises(ValueError, match="legal are 1, 2, 4"):
        main(["--model", "gpt2-tiny", "--tensor", "3"])
    with pytest.raises(ValueError, match="does nothing without tensor above 1"):
        main(["--sequence-parallel"])
    with pytest.raises(ValueError, match="unknown preset"):
        main(["--model", "vit-tiny"])
