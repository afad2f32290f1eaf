"""The families, and which of them a preset belongs to."""

from difflib import get_close_matches

from fmlab.models.base import Model
from fmlab.models.bert import BERT
from fmlab.models.clip import CLIP
from fmlab.models.convolutional import CausalConvLM
from fmlab.models.diffusion import DiT, UNet
from fmlab.models.distilbert import DistilBERT
from fmlab.models.gpt import GPT
from fmlab.models.llama import Llama, Qwen2
from fmlab.models.mixtral import Mixtral
from fmlab.models.recurrent import RecurrentLM
from fmlab.models.roberta import RoBERTa
from fmlab.models.t5 import T5

#: Families whose presets `fmlab train` takes.
TEXT_FAMILIES: tuple[type[Model], ...] = (
    GPT,
    Llama,
    Qwen2,
    Mixtral,
    BERT,
    RoBERTa,
    DistilBERT,
    T5,
    RecurrentLM,
    CausalConvLM,
)


#: Families whose presets `fmlab parity` takes: all that have a loss and for which it can make batches.
FAMILIES: tuple[type[Model], ...] = (*TEXT_FAMILIES, CLIP, UNet, DiT)


def preset_names(families: tuple[type[Model], ...] = TEXT_FAMILIES) -> list[str]:
    """The presets of all families that learn from text, or of those given."""
    return [name for family in families for name in family.presets()]


def family_of(preset: str, families: tuple[type[Model], ...] = TEXT_FAMILIES) -> type[Model]:
    """The family of a preset. Raises ValueError with the closest name and all legal ones."""
    for family in families:
        if preset in family.PRESETS:
            return family
    names = preset_names(families)
    close = get_close_matches(preset.lower(), names, n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ValueError(f"unknown preset {preset!r}.{hint} The presets are: {', '.join(names)}")


def longest_row(config: object) -> int | None:
    """The most tokens a row may have for a model of this config; None if nothing limits it."""
    limit: int | None = getattr(config, "max_length", None) or getattr(config, "max_positions", None)
    return limit
