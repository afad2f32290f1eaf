"""The causal convolutional language model against torch.nn.Conv1d, and what it may see."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmlab.models import CausalConvLM, check_plan
from fmlab.models.convolutional import CausalConvConfig
from fmlab.models.sequence_hf import convolutional_weights
from tests.models.reference import assert_same_gradients, copy_weights, roughen, shifted, tokens

SMALL = CausalConvConfig(vocab_size=101, num_layers=4, hidden_size=12, dilation_cycle=3)


class TorchLayer(nn.Module):
    def __init__(self, config: CausalConvConfig, index: int) -> None:
        super().__init__()
        d = config.hidden_size
        self.norm = nn.LayerNorm(d, config.norm_eps)
        self.conv = nn.Conv1d(d, 2 * d, config.kernel_size, dilation=config.dilation(index))
        self.output = nn.Linear(d, d)
        self.left = (config.kernel_size - 1) * config.dilation(index)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(F.pad(self.norm(x).transpose(1, 2), (self.left, 0))).transpose(1, 2)
        return x + self.output(F.glu(y, -1))


class TorchLM(nn.Module):
    """The same language model of torch.nn's layers."""

    def __init__(self, config: CausalConvConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.Sequential(*(TorchLayer(config, i) for i in range(config.num_layers)))
        self.norm = nn.LayerNorm(config.hidden_size, config.norm_eps)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.layers(self.tokens(ids))))


def small(**overrides: object) -> CausalConvLM:
    torch.manual_seed(0)
    model = CausalConvLM(CausalConvConfig(**{**vars(SMALL), **overrides}))
    roughen(model)
    return model


@pytest.mark.parametrize("tied", [True, False])
def test_logits_loss_and_every_gradient_equal_torch(tied: bool) -> None:
    model = small(tie_embeddings=tied).double()
    weights = convolutional_weights(model.config)
    twin = TorchLM(model.config).double()
    copy_weights(model, twin, weights)
    ids = tokens(3, 30)
    torch.testing.assert_close(model(ids).logits, twin(ids), rtol=0, atol=1e-12)
    loss = model(ids, labels=shifted(ids)).loss_sum
    wanted = F.cross_entropy(twin(ids).flatten(0, 1), shifted(ids).flatten(), reduction="sum")
    torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=0)
    loss.backward()
    wanted.backward()
    assert_same_gradients(model, twin, weights, most=1e-10)


def test_exactly_the_receptive_field_is_seen() -> None:
    model = small().double().eval()
    field = model.config.receptive_field
    assert field == 1 + 2 * (1 + 2 + 4 + 1)
    ids = tokens(1, 40)
    base = model(ids).logits[0, 30]
    seen = []
    for position in range(40):
        changed = ids.clone()
        changed[0, position] = (ids[0, position] + 1) % 101
        if not torch.equal(model(changed).logits[0, 30], base):
            seen.append(position)
    assert seen == list(range(31 - field, 31))


def test_cached_padded_and_packed_equal_the_plain_way(tmp_path) -> None:  # type: ignore[no-untyped-def]
    model = small().eval()
    ids = tokens(2, 12)
    plain = model(ids).logits
    cache = model.new_cache(2)
    steps = [model(ids[:, :3], cache=cache).logits]
    steps += [model(ids[:, t : t + 1], cache=cache).logits for t in range(3, 12)]
    torch.testing.assert_close(torch.cat(steps, 1), plain, rtol=0, atol=2e-6)

    padded = torch.cat([torch.zeros(2, 4, dtype=torch.long), ids], 1)
    mask = (torch.arange(16) >= 4).long().expand(2, -1)
    torch.testing.assert_close(model(padded, attention_mask=mask).logits[:, 4:], plain, rtol=0, atol=2e-6)

    packed = torch.cat([ids[:1], ids[1:]], 1)
    documents = torch.tensor([[0] * 12 + [1] * 12])
    torch.testing.assert_close(
        model(packed, document_ids=documents).logits.view(2, 12, -1), plain, rtol=0, atol=2e-6
    )
    check_plan(model, {"input_ids": packed, "labels": shifted(packed), "document_ids": documents})
    check_plan(model, {"input_ids": padded, "attention_mask": mask})

    model.save_pretrained(tmp_path)
    again = CausalConvLM.from_pretrained(tmp_path)
    assert again.config == model.config
    assert torch.equal(again(ids).logits, plain)


def test_preset_and_bad_input() -> None:
    with torch.device("meta"):
        model = CausalConvLM.from_preset("conv-tiny")
    assert model.num_parameters() == 1_331_840  # by hand: 4096 d + 7 (7 d^2 + 5 d) + 2 d
    assert model.config.receptive_field == 255
    with pytest.raises(ValueError, match="kernel_size=1 sees no other position"):
        CausalConvConfig(vocab_size=10, num_layers=1, hidden_size=4, kernel_size=1)
