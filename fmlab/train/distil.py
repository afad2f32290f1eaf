"""A student from its teacher, as DistilBERT was made (Sanh et al. 2019, arXiv:1910.01108, section 3).

The student has every k-th layer of the teacher, and its tables; then it learns from three losses at once:
the teacher's softened answers, the masked tokens themselves, and the direction of the hidden states.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fmlab.models import BERT, DistilBERT, RoBERTa
from fmlab.models.hf import find_folder, model_type
from fmlab.objectives.distillation import Distillation, WithLabels

#: What the released DistilBERT was trained with.
PAPER: Mapping[str, float] = {"temperature": 2.0, "hard": 2.0, "soft": 5.0, "hidden": 1.0}
_TEACHERS: Mapping[str, type[BERT]] = {"bert": BERT, "roberta": RoBERTa, "distilbert": DistilBERT}


def load_teacher(folder: str | Path) -> BERT:
    """A masked language model of BERT's kind from a folder in Hugging Face's format, in eval mode.

    Raises ValueError for another family.
    """
    kind = model_type(find_folder(folder))
    if kind not in _TEACHERS:
        raise ValueError(
            f"{folder} holds a model of type {kind!r}; a teacher is one of {', '.join(_TEACHERS)}, trained "
            "for masked tokens"
        )
    return _TEACHERS[kind].from_pretrained(folder, heads="masked")


def paper_losses(objective: WithLabels, teacher: nn.Module) -> Distillation:
    """The three losses with the paper's weights and temperature."""
    return Distillation(objective, teacher, **PAPER)


@torch.no_grad()
def student_of(teacher: BERT, num_layers: int | None = None) -> BERT:
    """A student with every k-th layer of the teacher, from the first on, and the teacher's tables and head.

    num_layers: half of the teacher's if not given; it must divide the teacher's
    Of a BERT it is a DistilBERT, which has no token types: the vector of type 0, which every token of a
    single text gets, is added to the positions, so that nothing is lost. Of another, one of the same family.
    Raises ValueError for a number of layers that does not divide, or a teacher without a masked-token head.
    """
    config = teacher.config
    num_layers = max(1, config.num_layers // 2) if num_layers is None else num_layers
    if not 1 <= num_layers <= config.num_layers or config.num_layers % num_layers:
        legal = [n for n in range(1, config.num_layers + 1) if config.num_layers % n == 0]
        raise ValueError(
            f"a student takes every k-th of the teacher's {config.num_layers} layers, so it cannot have "
            f"{num_layers}; legal: {', '.join(map(str, legal))}"
        )
    if config.heads != "masked":
        raise ValueError(
            f"the teacher has heads={config.heads!r}; give it the masked ones: with_heads('masked')"
        )
    # region student
    family = DistilBERT if type(teacher) is BERT else type(teacher)
    student = family(family.CONFIG(**_shape(teacher, family), num_layers=num_layers, heads="masked"))
    step = config.num_layers // num_layers
    chosen = [0, *range(1, config.num_layers + 1, step), config.num_layers + 1]
    for block, number in zip(student.blocks, chosen, strict=True):
        source = teacher.blocks[number].state_dict()
        types = source.pop("types.weight", None) if family is DistilBERT else None
        if types is not None:
            source["positions.weight"] = source["positions.weight"] + types[0]
        block.load_state_dict(source)
    return student
    # endregion


def _shape(teacher: BERT, family: type[BERT]) -> dict[str, Any]:
    config = teacher.config
    names: tuple[str, ...] = (
        "vocab_size",
        "max_positions",
        "hidden_size",
        "num_heads",
        "ffn_size",
        "dropout",
        "init_std",
    )
    names += ("pad_token",) if family is DistilBERT else ("pad_token", "token_types", "norm_eps")
    return {name: getattr(config, name) for name in names}
