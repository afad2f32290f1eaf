"""The families that learn from text, and which of them a preset belongs to."""

from difflib import get_close_matches

from fmlab.models.base import Model
from fmlab.models.bert import BERT
from fmlab.models.convolutional import CausalConvLM
from fmlab.models.distilbert import DistilBERT
from fmlab.models.gpt import GPT
from fmlab.models.llama import Llama, Qwen2
from fmlab.models.mixtral import Mixtral
from fmlab.models.recurrent import RecurrentLM
from fmlab.models.roberta import RoBERTa
from fmlab.models.t5 import T5

#: Families whose presets `fmlab train` and `fmlab parity` take.
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


def preset_names() -> list[str]:
    """The presets of all families that learn from text."""
    return [name for family in TEXT_FAMILIES for name in family.presets()]


def family_of(preset: str) -> type[Model]:
    """The family of a preset. Raises ValueError with the closest name and all legal ones."""
    for family in TEXT_FAMILIES:
        if preset in family.PRESETS:
            return family
    names = preset_names()
    close = get_close_matches(preset.lower(), names, n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ValueError(f"unknown preset {preset!r}.{hint} The presets are: {', '.join(names)}")


def longest_row(config: object) -> int | None:
    """The most tokens a row may have for a model of this config; None if nothing limits it."""
    limit: int | None = getattr(config, "max_length", None) or getattr(config, "max_positions", None)
    return limit
