"""How each family is trained on text: what cuts the text, what makes batches of it, what the loss is.

Everything is looked up: a family's tokenizer by its class, an objective's batches by its name.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from fmlab.data import (
    ByLengthSampler,
    ByteBPE,
    Corpus,
    ExampleSampler,
    LabelledTexts,
    MaskedSampler,
    PrefixSampler,
    RoBERTaBPE,
    SentencePairSampler,
    SpanSampler,
    TextTokenizer,
    TokenSampler,
    Unigram,
    WindowSampler,
    WordPiece,
    class_examples,
    encode,
    encode_sentences,
    evaluation_batches,
    text_to_text_examples,
)
from fmlab.data.batch import Batch
from fmlab.models import BERT, T5, RoBERTa
from fmlab.models.families import family_of
from fmlab.models.presets import find_preset
from fmlab.objectives.choice import OBJECTIVES, choose_objective
from fmlab.parallel.engine import Engine, Objective
from fmlab.train.config import TrainConfig
from fmlab.train.distil import load_teacher, paper_losses
from fmlab.train.launch import World
from fmlab.train.start import check_classes

#: family -> its tokenizer; all others have ByteBPE
_TOKENIZERS: Mapping[type, type[TextTokenizer]] = {BERT: WordPiece, RoBERTa: RoBERTaBPE, T5: Unigram}
#: objective -> fields of the config of a preset that is trained for it
_HEADS: Mapping[type, Mapping[str, dict[str, str]]] = {
    BERT: {
        "masked": {"heads": "masked"},
        "next-sentence": {"heads": "pretraining"},
        "sentence-order": {"heads": "pretraining"},
        "classes": {"heads": "classifier"},
    }
}
#: family -> its default learning rate times its width. Norms that come after the sum stand less than those
#: before it: at 0.75 / width bert-tiny learns how often tokens occur and little more. BERT itself had 0.08.
_LR_FACTORS: Mapping[type, float] = {BERT: 0.2}
_CAN_PACK = ("causal", "experts", "masked")


@dataclass(frozen=True)
class Recipe:
    """How one model is trained.

    family:    class of the model, a torch module
    shape:     its config
    name:      of the objective, one of fmlab.objectives.choice.OBJECTIVES
    tokenizer: class of its tokenizer
    objective: what is minimised
    lr_factor: default learning rate times the width of the model
    """

    family: type[nn.Module]
    shape: Any
    name: str
    tokenizer: type[TextTokenizer]
    objective: Objective
    lr_factor: float

    def build(self) -> nn.Module:
        """A model of this shape, with random weights."""
        return self.family(self.shape)

    def finish(self, engine: Engine, model: nn.Module) -> nn.Module:
        """What is kept of the whole model after the last step: the model itself."""
        return model

    def export(self, model: Any, tokenizer: TextTokenizer, folder: Path) -> None:
        """Write the finished model and its tokenizer in Hugging Face's format."""
        model.save_pretrained(folder)
        tokenizer.save(folder, token_types=getattr(model.config, "token_types", 1) > 0)

    def sampler(
        self, text: Corpus, tokenizer: TextTokenizer, config: TrainConfig, world: World
    ) -> WindowSampler:
        """Training batches of `text`. Raises ValueError when it is too short for one."""
        if self.name == "classes":
            check_classes(text, self.shape.num_classes)
        sampler: WindowSampler = _SAMPLERS[self.name](text, tokenizer, config, world)
        return sampler

    def evaluation(
        self, text: Corpus, tokenizer: TextTokenizer, config: TrainConfig, world: World
    ) -> Callable[[], Iterator[Batch]]:
        """What makes the batches of a measurement on `text`, the same at each: every target once, over all
        ranks together. Raises ValueError when the text is too short for one."""
        make: Callable[[], Iterator[Batch]] = _EVALUATIONS[self.name](text, tokenizer, config, world)
        return make


def recipe_for(config: TrainConfig, model: Any = None) -> Recipe:
    """The recipe for the preset that the config names, or for a model that exists.

    Raises ValueError for an unknown preset, an objective that does not fit, and packing where it would do
    nothing or is not understood.
    """
    if model is None:
        family = family_of(config.model)
        name = choose_objective(config.objective, family)
        preset: dict[str, Any] = find_preset(config.model, dict(family.PRESETS))
        shape = family.CONFIG(**(preset | _of_class(_HEADS, family, {}).get(name, {})))
    else:
        family, shape = type(model), model.config
        name = choose_objective(config.objective, family, shape)
    if name not in _SAMPLERS:
        raise ValueError(
            f"a {family.__name__} learns from images, and this reads text; see fmlab.train.images, or step "
            "an engine of fmlab.parallel.parallelize over batches of your own"
        )
    if config.pack_documents:
        _check_packing(family, name)
    if config.mask_versions and name != "masked":
        raise ValueError(f"mask_versions does nothing for objective {name!r}; leave it out")
    objective = OBJECTIVES[name]()
    if config.teacher is not None:
        objective = _distilled(objective, name, config.teacher)
    lr_factor = _of_class(_LR_FACTORS, family, 0.75)
    return Recipe(family, shape, name, tokenizer_of(family), objective, lr_factor)


def tokenizer_of(family: type) -> type[TextTokenizer]:
    """The class of the tokenizer that a family reads text by."""
    found: type[TextTokenizer] = _of_class(_TOKENIZERS, family, ByteBPE)
    return found


def _distilled(objective: Any, name: str, teacher: str) -> Objective:
    if name != "masked":
        raise ValueError(f"a teacher answers masked tokens; with objective {name!r} leave it out")
    return paper_losses(objective, load_teacher(teacher))


def _of_class(table: Mapping[type, Any], family: type, default: Any) -> Any:
    """The entry of the class or of the closest of its bases."""
    return next((table[c] for c in family.__mro__ if c in table), default)


def _check_packing(family: type[nn.Module], name: str) -> None:
    if name not in _CAN_PACK:
        raise ValueError(f"pack_documents does nothing for objective {name!r}; leave it out")
    if "document_ids" not in inspect.signature(family.forward).parameters:
        raise ValueError(f"a {family.__name__} cannot keep packed documents apart; leave out pack_documents")


# ---- batches -----------------------------------------------------------------------------------------------


def _common(config: TrainConfig, world: World) -> tuple[int, int, int, int, int]:
    return config.seq_len, config.batch_size, config.seed, world.rank, world.size


def _causal(text: Corpus, tokenizer: TextTokenizer, config: TrainConfig, world: World) -> TokenSampler:
    return TokenSampler(encode(text, tokenizer), *_common(config, world), packed=config.pack_documents)


def _prefix(text: Corpus, tokenizer: TextTokenizer, config: TrainConfig, world: World) -> PrefixSampler:
    return PrefixSampler(encode(text, tokenizer), *_common(config, world))


def _masked(text: Corpus, tokenizer: TextTokenizer, config: TrainConfig, world: World) -> MaskedSampler:
    tokens, versions = encode(text, tokenizer), config.mask_versions or None
    common = _common(config, world)
    return MaskedSampler(tokens, tokenizer, *common, versions=versions, packed=config.pack_documents)


def _next(text: Corpus, tokenizer: TextTokenizer, config: TrainConfig, world: World) -> SentencePairSampler:
    sentences = encode_sentences(text, tokenizer)
    return SentencePairSampler(sentences, tokenizer, *_common(config, world), task="next")


def _order(text: Corpus, tokenizer: TextTokenizer, config: TrainConfig, world: World) -> SentencePairSampler:
    sentences = encode_sentences(text, tokenizer)
    return SentencePairSampler(sentences, tokenizer, *_common(config, world), task="order")


def _classes(text: Corpus, tokenizer: TextTokenizer, config: TrainConfig, world: World) -> ExampleSampler:
    assert isinstance(text, LabelledTexts)
    _, batch_size, seed, rank, size = _common(config, world)
    examples = class_examples(text, tokenizer, config.seq_len)
    return ExampleSampler(examples, tokenizer.pad, batch_size, seed, rank, size)


def _span(text: Corpus, tokenizer: TextTokenizer, config: TrainConfig, world: World) -> SpanSampler:
    assert isinstance(tokenizer, Unigram)
    return SpanSampler(encode(text, tokenizer), tokenizer, *_common(config, world))


def _text_to_text(
    text: Corpus, tokenizer: TextTokenizer, config: TrainConfig, world: World
) -> ByLengthSampler:
    assert isinstance(tokenizer, Unigram)
    longest, batch_size, seed, rank, size = _common(config, world)
    examples = text_to_text_examples(text, tokenizer, longest)
    return ByLengthSampler(examples, tokenizer.pad, batch_size, seed, rank, size)


_SAMPLERS: Mapping[str, Callable[..., WindowSampler]] = {
    "causal": _causal,
    "experts": _causal,
    "prefix": _prefix,
    "masked": _masked,
    "next-sentence": _next,
    "sentence-order": _order,
    "classes": _classes,
    "span": _span,
    "text-to-text": _text_to_text,
}


def _evaluation_of(make: Callable[..., WindowSampler]) -> Callable[..., Callable[[], Iterator[Batch]]]:
    def evaluation(
        text: Corpus, tokenizer: TextTokenizer, config: TrainConfig, world: World
    ) -> Callable[[], Iterator[Batch]]:
        try:
            sampler = make(text, tokenizer, config, world)
        except ValueError as error:
            raise ValueError(f"{text.name}: {error}; or keep more of the text (validation)") from error
        return lambda: sampler.evaluation(config.eval_batches)

    return evaluation


def _causal_evaluation(
    text: Corpus, tokenizer: TextTokenizer, config: TrainConfig, world: World
) -> Callable[[], Iterator[Batch]]:
    """Unlike a sampler it also takes a text that is shorter than a row."""
    tokens = encode(text, tokenizer)
    size = (config.seq_len, config.batch_size, world.rank, world.size)
    return lambda: evaluation_batches(tokens, *size, config.pack_documents, config.eval_batches)


_EVALUATIONS: Mapping[str, Callable[..., Callable[[], Iterator[Batch]]]] = {
    name: _causal_evaluation if make is _causal else _evaluation_of(make) for name, make in _SAMPLERS.items()
}
