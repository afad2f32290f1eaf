"""check_plan accepts GPT's plan and rejects plans and blocks that lie."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fmlab.models import GPT, ParallelPlan, Rule, check_plan
from fmlab.models.gpt import GPTLayer
from fmlab.models.state import live_names
from tests.models.gpt_reference import shifted, small_gpt, tokens

IDS = tokens(2, 7)
BATCHES = {
    "logits": {"input_ids": IDS},
    "loss": {"input_ids": IDS, "labels": shifted(IDS)},
    "padded": {"input_ids": IDS, "labels": shifted(IDS), "attention_mask": (IDS > 20).long()},
    "packed": {"input_ids": IDS, "document_ids": torch.tensor([[0, 0, 0, 1, 1, 2, 2]]).expand(2, 7)},
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("tied", [True, False])
def test_the_plan_of_gpt_holds(batch: str, tied: bool) -> None:
    check_plan(small_gpt(tie_embeddings=tied), BATCHES[batch])


def without(plan: ParallelPlan, index: int) -> ParallelPlan:
    return replace(plan, rules=plan.rules[:index] + plan.rules[index + 1 :])


LIES = {
    "unmatched": (lambda p: without(p, 0), "'blocks.0.tokens.weight' must match exactly one rule"),
    "matched twice": (
        lambda p: replace(p, rules=(*p.rules, Rule(r".*norm\.bias", "replicate"))),
        "exactly one",
    ),
    "rule for nothing": (lambda p: replace(p, rules=(*p.rules, Rule("wpe", "row"))), "matches no parameter"),
    "tie left out": (lambda p: replace(p, tied=()), "declares the ties"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_wrong_plan_is_found(lie: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, message = LIES[lie]
    model = small_gpt()
    plan = change(model.parallel_plan())
    monkeypatch.setattr(model, "parallel_plan", lambda: plan, raising=False)
    with pytest.raises(ValueError, match=message):
        check_plan(model, BATCHES["loss"])


def test_a_block_that_reads_undeclared_names_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GPTLayer, "reads", ("hidden",))
    with pytest.raises(ValueError, match="GPTLayer depends on a name that it does not declare"):
        check_plan(small_gpt(), BATCHES["padded"])


def test_live_names_are_what_a_pipeline_sends() -> None:
    blocks = list(small_gpt().blocks)
    masks = ["attention_mask", "document_ids", "prefix_lengths"]
    assert live_names(blocks, 0) == ["input_ids", "position_ids", *masks, "labels"]
    assert live_names(blocks, 2) == ["hidden", *masks, "labels"]
    assert live_names(blocks, 4) == ["hidden", "labels"]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 4), st.integers(1, 6))
def test_fused_parts_divide_by_whole_units(degree: int, parts: int, unit: int, per_rank: int) -> None:
    rule = Rule("w", "column", parts=parts, unit=unit)
    whole = torch.randn(parts * unit * per_rank * degree, 3)
    shards = [rule.shard(whole, rank, degree) for rank in range(degree)]
    assert torch.equal(rule.unshard(shards, whole.shape), whole)
    # rank r of part p holds the r-th run of whole units of that part
    for rank, shard in enumerate(shards):
        for part, piece in enumerate(shard.chunk(parts)):
            start = part * unit * per_rank * degree + rank * unit * per_rank
            assert torch.equal(piece, whole[start : start + unit * per_rank])


def test_heads_that_cannot_be_divided_are_refused_with_the_legal_degrees() -> None:
    with torch.device("meta"):
        model = GPT.from_preset("gpt2")
    name = "blocks.1.attention.qkv.weight"
    with pytest.raises(ValueError, match=r"legal: \[1, 2, 3, 4, 6, 12\]"):
        model.parallel_plan().rule(name).shard(model.get_parameter(name), 0, 5)


def test_odd_vocabularies_are_padded_and_restored() -> None:
    rule = Rule("t", "vocab")
    table = torch.randn(101, 4)
    shards = [rule.shard(table, rank, 4) for rank in range(4)]
    assert [len(shard) for shard in shards] == [26] * 4
    assert torch.equal(shards[3][23:], torch.zeros(3, 4))
    assert torch.equal(rule.unshard(shards, table.shape), table)
