"""The models of the matrix: tiny, so that a cell takes a second, and awkward on purpose.

A vocabulary of 131 (a prime), layers that no pipeline divides evenly, tied and untied tables, one key/value
head for four query heads.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from fmlab.models import (
    BERT,
    CLIP,
    GPT,
    T5,
    BERTConfig,
    CLIPConfig,
    CLIPTextConfig,
    CLIPVisionConfig,
    GPTConfig,
    Llama,
    LlamaConfig,
    Mixtral,
    MixtralConfig,
    T5Config,
    UNet,
    UNetConfig,
)
from fmlab.objectives.choice import objective_of
from fmlab.parallel.parity_batches import stir

_VOCABULARY, _LENGTH = 131, 16
_SHAPE: dict[str, Any] = dict(vocab_size=_VOCABULARY, max_positions=_LENGTH, hidden_size=16, num_heads=4)


def _gpt() -> nn.Module:
    return GPT(GPTConfig(**_SHAPE, num_layers=3))


def _dropout() -> nn.Module:
    return GPT(GPTConfig(**_SHAPE, num_layers=3, dropout=0.1))


def _llama() -> nn.Module:
    return Llama(LlamaConfig(**_SHAPE, num_layers=3, num_kv_heads=1, ffn_size=24))


def _bert() -> nn.Module:
    return BERT(BERTConfig(**_SHAPE, num_layers=3, heads="pretraining"))


def _t5() -> nn.Module:
    return T5(
        T5Config(vocab_size=_VOCABULARY, num_layers=2, hidden_size=16, ffn_size=24, num_heads=4, head_size=4)
    )


def _clip() -> nn.Module:
    text = CLIPTextConfig(**_SHAPE, num_layers=2, eos_token_id=130)
    vision = CLIPVisionConfig(image_size=8, patch_size=4, num_layers=2, hidden_size=16, num_heads=4)
    return CLIP(CLIPConfig(text, vision, projection_size=12))


def _moe() -> nn.Module:
    shape: dict[str, Any] = dict(
        num_layers=2, num_kv_heads=2, ffn_size=24, num_experts=4, experts_per_token=2
    )
    return Mixtral(MixtralConfig(**_SHAPE, **shape))


def _unet() -> nn.Module:
    shape: dict[str, Any] = dict(
        channels=(16, 32), attention=(True, True), heads=(4, 4), layers_per_level=1, norm_groups=4
    )
    return stir(UNet(UNetConfig(**shape, text_size=16, in_channels=3, out_channels=3, sample_size=8)))


#: name -> builds the model
MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "gpt": _gpt,
    "llama": _llama,
    "bert": _bert,
    "t5": _t5,
    "clip": _clip,
    "moe": _moe,
    "unet": _unet,
    "dropout": _dropout,
}
#: name -> what it is, for the page
WHAT: Mapping[str, str] = {
    "gpt": "GPT, 3 layers, tied table, vocabulary of 131",
    "llama": "Llama, 3 layers, 4 query heads and 1 key/value head, untied",
    "bert": "BERT with both heads of its pre-training",
    "t5": "T5, encoder and decoder, one table in three places",
    "clip": "CLIP, whose loss takes the whole batch, so that there are no micro-batches",
    "moe": "Mixtral, 4 experts of which a token meets 2, with the router's z loss",
    "unet": "UNet with cross-attention to a text, denoising",
    "dropout": "the GPT with dropout 0.1",
}


@lru_cache
def on_meta(name: str) -> nn.Module:
    """The model's shapes, without memory."""
    with torch.device("meta"):
        return MODELS[name]()


@lru_cache
def in_one_piece(name: str) -> bool:
    """Whether its loss takes the whole batch, so that it cannot be cut into micro-batches."""
    return bool(getattr(objective_of(on_meta(name)), "whole_batch", False))
