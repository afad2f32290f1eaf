"""A small T5 beside transformers' T5ForConditionalGeneration with the same random weights."""

from dataclasses import asdict

import pytest
import torch
from torch import Tensor, nn

from fmlab.models import T5, T5Config
from fmlab.models.t5_hf import to_hf_config, weights
from tests.models.reference import copy_weights, roughen, tokens

# Heads that are together wider than the stream, as in t5-3b, and stacks of different depth.
SMALL = T5Config(
    vocab_size=101,
    num_layers=3,
    num_decoder_layers=2,
    hidden_size=24,
    num_heads=3,
    head_size=12,
    ffn_size=40,
    num_buckets=8,
    max_distance=20,
)
VERSIONS = {"original": {}, "v1.1": {"gated": True, "tie_embeddings": False}}


def small_t5(seed: int = 0, **overrides: object) -> T5:
    """A model none of whose parameters is 0 or 1: norms count in every comparison."""
    torch.manual_seed(seed)
    model = T5(T5Config(**(asdict(SMALL) | overrides)))
    roughen(model, seed)
    return model


def transformers_twin(model: T5) -> nn.Module:
    """transformers' model with the weights of `model`.

    5.24 ties the output matrix of every T5 that is made from a config. The paper's repository says of v1.1
    "no parameter sharing between the embedding and classifier layer", so it is untied by hand here.
    """
    transformers = pytest.importorskip("transformers")
    fields = {k: v for k, v in to_hf_config(model.config).items() if k not in ("architectures", "model_type")}
    twin = transformers.T5ForConditionalGeneration(transformers.T5Config(**fields))
    if not model.config.tie_embeddings:
        assert twin.lm_head.weight is twin.shared.weight, "transformers no longer ties v1.1: drop this branch"
        twin.lm_head.weight = nn.Parameter(twin.lm_head.weight.detach().clone())
    copy_weights(model, twin, weights(model.config))
    return twin


def batch(rows: int = 3, inputs: int = 17, outputs: int = 11) -> dict[str, Tensor]:
    """Input and labels, some of which have no target."""
    labels = tokens(rows, outputs, seed=2)
    labels[1, outputs // 2 :] = -100
    return {"input_ids": tokens(rows, inputs), "labels": labels}


def padded(ids: Tensor, side: str = "right") -> Tensor:
    """A mask of `ids` [b,l] with 0, 2, 4, ... tokens of padding in its rows."""
    mask = torch.ones_like(ids)
    for row in range(1, len(ids)):
        mask[row, slice(-2 * row, None) if side == "right" else slice(0, 2 * row)] = 0
    return mask
