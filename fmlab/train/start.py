"""What a run starts from: a trained model (`init`), or a teacher's layers (`teacher`), with its tokenizer.

A second phase with longer rows, fine-tuning and distillation are runs of their own that begin like this, as
BERT's own code does it: weights are taken over, the optimizer starts anew.
"""

from typing import Any

import torch
from torch import nn

from fmlab.data import Corpus, LabelledTexts, TextTokenizer
from fmlab.models import BERT
from fmlab.models.families import family_of
from fmlab.models.hf import find_folder
from fmlab.models.presets import find_preset
from fmlab.train.config import TrainConfig
from fmlab.train.distil import load_teacher, student_of

CLASSES = "classes"  # the objective whose heads depend on the corpus


def starting_point(
    config: TrainConfig,
    tokenizer_class: type[TextTokenizer],
    tokenizer: TextTokenizer | None,
    corpus: Corpus,
) -> tuple[nn.Module | None, TextTokenizer | None]:
    """(model, tokenizer) that the settings name, None where they name none.

    Raises ValueError for a folder of another family, and a tokenizer that is not the one the weights were
    trained with; see also `student_of` and `with_heads`.
    """
    folder = config.init or config.teacher
    if folder is None and config.objective != CLASSES:
        return None, tokenizer
    family: Any = family_of(config.model)
    if folder is None:
        return _for_classes(_random(family, config), corpus, config.seed), tokenizer
    path = find_folder(folder)
    own = tokenizer_class.load(path)
    if tokenizer is None and config.tokenizer is not None:
        tokenizer = tokenizer_class.load(config.tokenizer)
    if tokenizer is not None and tokenizer.fingerprint != own.fingerprint:
        raise ValueError(
            f"the weights in {folder} were trained with a vocabulary of {own.vocab_size} tokens (fingerprint "
            f"{own.fingerprint}), and the tokenizer given has another of {tokenizer.vocab_size} "
            f"({tokenizer.fingerprint}): the same id would be another word. Leave the tokenizer out"
        )
    if config.init is None:
        return _student(family, config), own
    model = family.from_pretrained(path, **_heads(config, family))
    return (_for_classes(model, corpus, config.seed) if config.objective == CLASSES else model), own


def _student(family: type, config: TrainConfig) -> nn.Module:
    assert config.teacher is not None
    layers = find_preset(config.model, dict(family.PRESETS))["num_layers"]  # type: ignore[attr-defined]
    student = student_of(load_teacher(config.teacher), layers)
    if type(student) is not family:
        raise ValueError(
            f"the teacher in {config.teacher} makes a {type(student).__name__}, and {config.model} "
            f"is a {family.__name__}; choose a preset of that family"
        )
    return student


def _heads(config: TrainConfig, family: type) -> dict[str, Any]:
    """The heads to load, where the objective says which: a folder may hold more."""
    if not issubclass(family, BERT) or config.objective == CLASSES:
        return {}
    usual = "pretraining" if family is BERT and config.objective != "masked" else "masked"
    return {"heads": usual}


def _random(family: Any, config: TrainConfig) -> nn.Module:
    torch.manual_seed(config.seed)
    model: nn.Module = family.from_preset(config.model)
    return model


def _for_classes(model: Any, corpus: Corpus, seed: int) -> nn.Module:
    """The encoder with a classifier for the corpus's classes."""
    check_classes(corpus)
    assert isinstance(corpus, LabelledTexts)
    if model.config.heads == "classifier":
        if model.config.class_names != tuple(corpus.classes):
            raise ValueError(
                f"the model tells {model.config.num_classes} classes apart "
                f"({_some(model.config.class_names)}), and {corpus.name} has {len(corpus.classes)} "
                f"({_some(corpus.classes)}); start from a model without a classifier, or give its own texts"
            )
        return model
    torch.manual_seed(seed)  # of the new head, the same on every rank
    names = tuple(corpus.classes)
    other: nn.Module = model.with_heads("classifier", num_classes=len(names), class_names=names)
    return other


def check_classes(corpus: Corpus, num_classes: int | None = None) -> None:
    """Raise ValueError for texts without a class, or with more of them than a head tells apart."""
    if not isinstance(corpus, LabelledTexts):
        raise ValueError(
            f"objective 'classes' learns the class of a text, and those of {corpus.name!r} have none; legal: "
            "corpus docstrings, or LabelledTexts of your own given to train"
        )
    if num_classes is not None and num_classes < len(corpus.classes):
        raise ValueError(
            f"{corpus.name} has {len(corpus.classes)} classes, and the model tells {num_classes} apart; "
            f"build it with num_classes={len(corpus.classes)} (with_heads)"
        )


def _some(names: Any) -> str:
    return ", ".join((names or ["no names"])[:3]) + (", …" if names and len(names) > 3 else "")
