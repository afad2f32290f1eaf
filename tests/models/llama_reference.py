"""A small Llama beside transformers' LlamaForCausalLM with the same random weights."""

from typing import Any

import pytest
import torch
from torch import nn

from fmlab.models.llama import Llama, LlamaConfig, Qwen2
from tests.models.reference import copy_weights, roughen

SMALL: dict[str, Any] = dict(
    vocab_size=101, max_positions=48, num_layers=3, hidden_size=24, num_heads=6, num_kv_heads=2, ffn_size=40
)


def small_llama(seed: int = 0, family: type[Llama] = Llama, **overrides: Any) -> Llama:
    """A model none of whose parameters is 0 or 1: biases and norms count in every comparison."""
    torch.manual_seed(seed)
    model = family(LlamaConfig(**(SMALL | overrides)))
    roughen(model, seed)
    return model


def transformers_twin(model: Llama, **overrides: Any) -> nn.Module:
    """transformers' model with the weights of `model`."""
    transformers = pytest.importorskip("transformers")
    family = "Qwen2" if isinstance(model, Qwen2) else "Llama"
    form = model.hf_format()
    fields = form.to_fields(model.config) | overrides
    for name in ("architectures", "model_type"):
        del fields[name]
    twin = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**fields))
    copy_weights(model, twin, form.weights(model.config))
    return twin.eval()
