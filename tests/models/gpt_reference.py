"""A small GPT beside transformers' GPT2LMHeadModel with the same random weights."""

import pytest
import torch
from torch import nn

from fmlab.models import GPT, GPTConfig
from fmlab.models.gpt_hf import to_hf_config, weights
from tests.models.reference import copy_weights, roughen, shifted, tokens

__all__ = ["SMALL", "shifted", "small_gpt", "tokens", "transformers_twin"]

SMALL = GPTConfig(vocab_size=101, max_positions=48, num_layers=3, hidden_size=24, num_heads=3)


def small_gpt(seed: int = 0, **overrides: object) -> GPT:
    """A model none of whose parameters is 0 or 1: biases and norms count in every comparison."""
    torch.manual_seed(seed)
    model = GPT(GPTConfig(**({k: getattr(SMALL, k) for k in SMALL.__dataclass_fields__} | overrides)))
    roughen(model, seed)
    return model


def transformers_twin(model: GPT) -> nn.Module:
    """transformers' model with the weights of `model`."""
    transformers = pytest.importorskip("transformers")
    fields = to_hf_config(model.config)
    config = transformers.GPT2Config(
        **{k: v for k, v in fields.items() if k not in ("architectures", "model_type")}
    )
    twin = transformers.GPT2LMHeadModel(config)
    copy_weights(model, twin, weights(model.config))
    return twin
