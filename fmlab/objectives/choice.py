"""Which objectives a model can be trained for, by name; the first is what its family was made with."""

from collections.abc import Callable, Mapping
from typing import Any

from fmlab.models import BERT, CLIP, GPT, T5, DistilBERT, DiT, Llama, RoBERTa, UNet
from fmlab.models.diffusion.schedule import NoiseSchedule
from fmlab.models.mixtral import Mixtral
from fmlab.objectives.causal import CausalLM
from fmlab.objectives.contrastive import Contrastive
from fmlab.objectives.denoising import Denoising
from fmlab.objectives.experts import ExpertsCausalLM
from fmlab.objectives.labelled import Classification, MaskedLM, PrefixLM, Seq2SeqLM

#: name -> what makes the objective
OBJECTIVES: Mapping[str, Callable[[], Any]] = {
    "causal": CausalLM,
    "prefix": PrefixLM,
    "experts": ExpertsCausalLM,
    "masked": MaskedLM,
    "next-sentence": MaskedLM,  # both with masked tokens, as BERT and ALBERT were trained
    "sentence-order": MaskedLM,
    "classes": Classification,
    "span": Seq2SeqLM,
    "text-to-text": Seq2SeqLM,
    "contrastive": Contrastive,
    "denoising": lambda: Denoising(NoiseSchedule("scaled_linear")),  # Stable Diffusion's
}
#: family -> the objectives that it can be trained for
_BY_FAMILY: Mapping[type, tuple[str, ...]] = {
    GPT: ("causal", "prefix"),
    Llama: ("causal", "prefix"),
    Mixtral: ("experts", "causal"),
    BERT: ("next-sentence", "sentence-order", "masked", "classes"),
    RoBERTa: ("masked", "classes"),
    DistilBERT: ("masked", "classes"),
    T5: ("span", "text-to-text"),
    CLIP: ("contrastive",),
    UNet: ("denoising",),
    DiT: ("denoising",),
}
#: objective -> labels that the heads of a model must be able to learn from, where that is not always so
_LABELS: Mapping[str, tuple[str, ...]] = {
    "masked": ("labels",),
    "next-sentence": ("labels", "sentence_labels"),
    "sentence-order": ("labels", "sentence_labels"),
    "classes": ("class_labels",),
}


def objective_names(family: type, config: Any = None) -> tuple[str, ...]:
    """The objectives for a family, or for a model of it with this config; the first is the usual one.

    A class that is none of ours is taken for a causal language model.
    Raises ValueError for a model whose heads cannot learn from any of them.
    """
    names = next((_BY_FAMILY[c] for c in family.__mro__ if c in _BY_FAMILY), ("causal",))
    learns_from = getattr(config, "learns_from", None)
    if learns_from is None:
        return names
    able = tuple(name for name in names if set(_LABELS.get(name, ())) <= set(learns_from))
    if not able:
        raise ValueError(
            f"a {family.__name__} with heads={config.heads!r} cannot be trained for any of "
            f"{', '.join(names)}; build it with other heads (with_heads)"
        )
    return able


def choose_objective(name: str | None, family: type, config: Any = None) -> str:
    """`name`, or the usual objective if None. Raises ValueError with the legal ones if it does not fit."""
    names = objective_names(family, config)
    if name is not None and name not in names:
        raise ValueError(
            f"a {family.__name__} is not trained for objective {name!r}; legal: {', '.join(names)}"
        )
    return name or names[0]


def objective_of(model: Any) -> Any:
    """The usual objective of a model."""
    return OBJECTIVES[choose_objective(None, type(model), getattr(model, "config", None))]()
