"""Targets and tokens that count, where rows are padded in front or there are two streams."""

from typing import Any

import torch

from fmlab.models import GPT, T5
from fmlab.objectives import CausalLM, Distillation, PrefixLM, Seq2SeqLM

SHAPE: dict[str, Any] = dict(vocab_size=50, num_layers=1, hidden_size=16, num_heads=2)
IDS = torch.arange(3, 23).view(2, 10)


def test_a_prefix_of_a_row_padded_in_front_is_no_target() -> None:
    torch.manual_seed(0)
    model = GPT.from_preset("gpt2-tiny", **SHAPE).double().eval()
    mask = torch.tensor([[0] * 4 + [1] * 6, [1] * 10])
    lengths = torch.tensor([3, 4])
    both = PrefixLM()(model, dict(input_ids=IDS, attention_mask=mask, prefix_lengths=lengths))["prefix"]
    rows = [IDS[:1, 4:], IDS[1:]]
    alone = [
        PrefixLM()(model, dict(input_ids=row, prefix_lengths=length[None]))["prefix"]
        for row, length in zip(rows, lengths, strict=True)
    ]
    assert int(both.count) == sum(int(term.count) for term in alone)
    torch.testing.assert_close(both.sum, alone[0].sum + alone[1].sum, rtol=0, atol=1e-9)


def test_hidden_states_of_a_decoder_are_compared_where_it_has_targets_not_where_the_input_is_real() -> None:
    torch.manual_seed(0)
    student, teacher = (T5.from_preset("t5-tiny", **SHAPE, head_size=8, ffn_size=16) for _ in range(2))
    labels = IDS.clone()
    labels[0, 4:] = -100
    batch = dict(input_ids=IDS, attention_mask=torch.tensor([[1] * 10, [1] * 2 + [0] * 8]), labels=labels)
    distillation = Distillation(Seq2SeqLM(), teacher, soft=0.0, hidden=1.0)
    term = distillation(student, batch)["hidden"]
    assert int(term.count) == int(distillation.counts(batch)["hidden"]) == 14
    streams = [
        model.eval()(IDS, attention_mask=batch["attention_mask"], decoder_input_ids=_shifted(labels)).hidden
        for model in (student, teacher)
    ]
    distance = 1 - torch.cosine_similarity(streams[0], streams[1], dim=-1)
    torch.testing.assert_close(term.sum, distance[labels != -100].sum())


def _shifted(labels: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.zeros_like(labels[:, :1]), labels[:, :-1]], 1).clamp(min=0)


def test_padding_in_front_is_no_target_of_the_next_token() -> None:
    mask = torch.tensor([[0] * 4 + [1] * 6, [1] * 10])
    labels = CausalLM().labels(dict(input_ids=IDS, attention_mask=mask))
    assert labels[0].tolist() == [-100] * 4 + [8, 9, 10, 11, 12, -100]
