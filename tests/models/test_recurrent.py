"""Cells, layers and language models of recurrence against torch.nn's, and what padding must not change."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fmlab.models import RecurrentLM, check_plan
from fmlab.models.recurrent import CELLS, Recurrent, RecurrentConfig
from fmlab.models.sequence_hf import recurrent_weights
from tests.models.reference import assert_same_gradients, copy_weights, roughen, shifted, tokens

TORCH = {"rnn": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}
SMALL = RecurrentConfig(vocab_size=101, num_layers=2, hidden_size=12)


def twins(kind: str, bidirectional: bool = False, layers: int = 2) -> tuple[Recurrent, nn.Module]:
    torch.manual_seed(0)
    ours = Recurrent(kind, 5, 7, layers, bidirectional).double()
    theirs = TORCH[kind](5, 7, layers, batch_first=True, bidirectional=bidirectional).double()
    with torch.no_grad():
        for index, layer in enumerate(ours.cells):
            for way, cell in enumerate(layer):
                for name, parameter in cell.named_parameters():
                    suffix = f"_l{index}" + ("_reverse" if way else "")
                    theirs.get_parameter(name + suffix).copy_(parameter)
    return ours, theirs


def last(memory: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
    return list(memory) if isinstance(memory, tuple) else [memory]


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", CELLS)
def test_outputs_memories_and_gradients_equal_torch(kind: str, bidirectional: bool) -> None:
    ours, theirs = twins(kind, bidirectional)
    x = torch.randn(3, 9, 5, dtype=torch.float64, requires_grad=True)
    y, memories = ours(x)
    y_theirs, memory_theirs = theirs(x)
    torch.testing.assert_close(y, y_theirs, rtol=0, atol=1e-12)
    for i, wanted in enumerate(last(memory_theirs)):
        torch.testing.assert_close(torch.stack([m[i] for m in memories]), wanted, rtol=0, atol=1e-12)
    upstream = torch.randn_like(y)
    got = torch.autograd.grad(y, [x, *ours.parameters()], upstream)
    want = torch.autograd.grad(y_theirs, [x, *theirs.parameters()], upstream)  # in the same order
    torch.testing.assert_close(got, want, rtol=0, atol=1e-11)


@pytest.mark.parametrize("kind", CELLS)
def test_a_padded_row_equals_the_row_alone_in_both_directions(kind: str) -> None:
    ours, theirs = twins(kind, bidirectional=True)
    x = torch.randn(2, 6, 5, dtype=torch.float64)
    real = torch.tensor([[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1]]).bool()
    y, memories = ours(x, real)
    alone, memories_alone = ours(x[:1, :3])
    torch.testing.assert_close(y[:1, :3], alone, rtol=0, atol=1e-15)  # another batch size, another product
    assert not y[0, 3:].any()
    for padded, single in zip(memories, memories_alone, strict=True):
        for a, b in zip(padded, single, strict=True):
            torch.testing.assert_close(a[:1], b, rtol=0, atol=1e-15)
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([3, 6]), True, enforce_sorted=False)
    y_packed, _ = nn.utils.rnn.pad_packed_sequence(theirs(packed)[0], batch_first=True)
    torch.testing.assert_close(y, y_packed, rtol=0, atol=1e-12)
    # what a stack that ignores the padding gets wrong, worst for the direction that starts at the end
    assert (theirs(x)[0][0, :3] - alone[0]).abs().max() > 1e-3


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 4), st.integers(1, 8), st.sampled_from(list(CELLS)), st.integers(0, 5))
def test_stopping_and_going_on_changes_nothing(batch: int, length: int, kind: str, at: int) -> None:
    ours, _ = twins(kind)
    x = torch.randn(batch, length, 5, dtype=torch.float64)
    whole, memories = ours(x)
    at = min(at, length - 1)
    if at == 0:
        return
    first, kept = ours(x[:, :at])
    second, memories_2 = ours(x[:, at:], memories=kept)
    torch.testing.assert_close(torch.cat([first, second], 1), whole, rtol=0, atol=1e-14)
    torch.testing.assert_close(memories_2, memories, rtol=0, atol=1e-14)


class TorchLM(nn.Module):
    """The same language model of torch.nn's layers."""

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        d = config.hidden_size
        self.tokens = nn.Embedding(config.vocab_size, d)
        self.layers = TORCH[config.cell](d, d, config.num_layers, batch_first=True)
        self.head = nn.Linear(d, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layers(self.tokens(ids))[0])


def small(**overrides: object) -> RecurrentLM:
    torch.manual_seed(0)
    model = RecurrentLM(RecurrentConfig(**{**vars(SMALL), **overrides}))
    roughen(model)
    return model


@pytest.mark.parametrize(("kind", "tied"), [("rnn", True), ("lstm", True), ("lstm", False), ("gru", True)])
def test_the_language_model_equals_one_of_torch_layers(kind: str, tied: bool) -> None:
    model = small(cell=kind, tie_embeddings=tied).double()
    weights = recurrent_weights(model.config)
    twin = TorchLM(model.config).double()
    copy_weights(model, twin, weights)
    ids = tokens(3, 11)
    torch.testing.assert_close(model(ids).logits, twin(ids), rtol=0, atol=1e-12)
    labels = shifted(ids)
    loss = model(ids, labels=labels).loss_sum
    wanted = nn.functional.cross_entropy(twin(ids).flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=0)
    loss.backward()
    wanted.backward()
    assert_same_gradients(model, twin, weights, most=1e-10)


def test_files_hold_torch_names_and_come_back(tmp_path) -> None:  # type: ignore[no-untyped-def]
    from safetensors.torch import load_file

    model = small()
    model.save_pretrained(tmp_path)
    twin = TorchLM(model.config)
    twin.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
    ids = tokens(2, 5)
    torch.testing.assert_close(twin(ids), model(ids).logits, rtol=0, atol=1e-6)
    again = RecurrentLM.from_pretrained(tmp_path)
    assert again.config == model.config
    assert torch.equal(again(ids).logits, model(ids).logits)


@pytest.mark.parametrize("kind", CELLS)
def test_cached_equals_uncached_and_padding_on_the_left_changes_nothing(kind: str) -> None:
    model = small(cell=kind).eval()
    ids = tokens(2, 8)
    cache = model.new_cache(2)
    steps = [model(ids[:, :3], cache=cache).logits]
    steps += [model(ids[:, t : t + 1], cache=cache).logits for t in range(3, 8)]
    torch.testing.assert_close(torch.cat(steps, 1), model(ids).logits, rtol=0, atol=1e-6)
    padded = torch.cat([torch.zeros(2, 4, dtype=torch.long), ids], 1)
    mask = (torch.arange(12) >= 4).long().expand(2, -1)
    torch.testing.assert_close(
        model(padded, attention_mask=mask).logits[:, 4:], model(ids).logits, rtol=0, atol=1e-6
    )


def test_packed_documents_do_not_see_each_other_and_the_plan_holds() -> None:
    model = small().eval()
    a, b = tokens(1, 4), tokens(1, 5, seed=2)
    packed = torch.cat([a, b], 1)
    documents = torch.tensor([[0] * 4 + [1] * 5])
    got = model(packed, document_ids=documents).logits
    torch.testing.assert_close(got[:, 4:], model(b).logits, rtol=0, atol=1e-6)
    check_plan(model, {"input_ids": packed, "labels": shifted(packed), "document_ids": documents})
    check_plan(small(tie_embeddings=False), {"input_ids": a, "attention_mask": (a > 20).long()})


def test_shapes_of_the_presets_and_bad_input() -> None:
    with torch.device("meta"):
        sizes = [RecurrentLM.from_preset(f"{kind}-tiny").num_parameters() for kind in CELLS]
    assert sizes == [1_336_400, 1_338_560, 1_337_424]  # by hand: 4096 w + 2 gates (2 w^2 + 2 w)
    with pytest.raises(ValueError, match="unknown cell 'elman'; legal: rnn, lstm, gru"):
        RecurrentConfig(vocab_size=10, num_layers=1, hidden_size=4, cell="elman")
    with pytest.raises(ValueError, match="labels must have the shape of input_ids"):
        small()(tokens(2, 4), labels=tokens(2, 5))
    with pytest.raises(ValueError, match="cache is for a batch of 1, got 2"):
        small()(tokens(2, 4), cache=small().new_cache(1))
    with pytest.raises(ValueError, match="real_bl must be"):
        Recurrent("gru", 5, 7)(torch.zeros(2, 3, 5), torch.ones(2, 4).bool())
