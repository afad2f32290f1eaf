"""A small GPT beside transformers' GPT2LMHeadModel with the same random weights."""

import pytest
import torch
from torch import nn

from fmlab.models import GPT, GPTConfig
from fmlab.models.gpt_hf import to_hf_config, weights

SMALL = GPTConfig(vocab_size=101, max_positions=48, num_layers=3, hidden_size=24, num_heads=3)


def small_gpt(seed: int = 0, **overrides: object) -> GPT:
    """A model none of whose parameters is 0 or 1: biases and norms count in every comparison."""
    torch.manual_seed(seed)
    model = GPT(GPTConfig(**({k: getattr(SMALL, k) for k in SMALL.__dataclass_fields__} | overrides)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def transformers_twin(model: GPT) -> nn.Module:
    """transformers' model with the weights of `model`."""
    transformers = pytest.importorskip("transformers")
    fields = to_hf_config(model.config)
    config = transformers.GPT2Config(
        **{k: v for k, v in fields.items() if k not in ("architectures", "model_type")}
    )
    twin = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():
        for weight in weights(model.config):
            ours = model.get_parameter(weight.ours)
            twin.get_parameter(weight.theirs).copy_(ours.T if weight.transposed else ours)
    return twin


def tokens(batch: int, length: int, seed: int = 1, vocab: int = 101) -> torch.Tensor:
    return torch.randint(0, vocab, (batch, length), generator=torch.Generator().manual_seed(seed))


def shifted(ids: torch.Tensor) -> torch.Tensor:
    """Labels already shifted, none for the last token."""
    return torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], 1)
