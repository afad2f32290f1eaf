"""The config of BERT, and the published shapes of BERT, RoBERTa and DistilBERT, as data.

A preset is the keyword arguments of a config.

BERT: Devlin et al. 2019, arXiv:1810.04805, section 3, and the released checkpoints. The paper's 110M and 340M
are rounded; BERT-large with both heads of pre-training has 336,226,108 parameters, its encoder and pooler
335,141,888. RoBERTa: Liu et al. 2019, arXiv:1907.11692. DistilBERT: Sanh et al. 2019, arXiv:1910.01108.
MiniLM: Wang et al. 2020, arXiv:2002.10957, the encoder of the sentence model all-MiniLM-L6-v2.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from fmlab.models.base import check_dropout, check_heads, check_sizes

#: What each name of `heads` puts on the encoder, and which batch names it can learn from.
LABELS: dict[str, tuple[str, ...]] = {
    "encoder": (),  # nothing
    "pooled": (),  # the pooler
    "masked": ("labels",),  # masked-token prediction
    "pretraining": ("labels", "sentence_labels"),  # the pooler, sentence pairs and masked-token prediction
    "classifier": ("class_labels",),  # the pooler and a classifier
}


@dataclass(frozen=True)
class BERTConfig:
    """Shape of a BERT. Raises ValueError for shapes that cannot be.

    Args:
        ffn_size: None means 4 * hidden_size.
        token_types: rows of the table that tells the two segments of a pair apart.
        pad_token: the id whose look-up learns nothing; its vector starts at 0. None for no such id.
        heads: "encoder", "pooled", "masked", "pretraining" or "classifier"; see LABELS.
        num_classes: of the classifier; class_names: what they are called, if anything.
        classifier_dropout: before the classifier; None for `dropout`.
    """

    vocab_size: int
    max_positions: int
    num_layers: int
    hidden_size: int
    num_heads: int
    ffn_size: int | None = None
    token_types: int = 2
    dropout: float = 0.0
    norm_eps: float = 1e-12
    init_std: float = 0.02
    pad_token: int | None = 0
    heads: str = "pretraining"
    num_classes: int = 2
    classifier_dropout: float | None = None
    class_names: tuple[str, ...] | None = None

    HEADS: ClassVar[tuple[str, ...]] = tuple(LABELS)

    def __post_init__(self) -> None:
        if self.ffn_size is None:
            object.__setattr__(self, "ffn_size", 4 * self.hidden_size)
        check_sizes(self, "vocab_size", "max_positions", "num_layers", "hidden_size", "num_heads", "ffn_size")
        self.check_fixed()
        check_heads(self.hidden_size, self.num_heads)
        check_dropout(self, "dropout", "head_dropout")
        if self.heads not in self.HEADS:
            raise ValueError(f"heads={self.heads!r} is not one of {', '.join(self.HEADS)}")
        if self.num_classes < 2:
            raise ValueError(f"num_classes must be at least 2, got {self.num_classes}")
        if self.class_names is not None and len(self.class_names) != self.num_classes:
            raise ValueError(f"class_names has {len(self.class_names)} names for {self.num_classes} classes")
        if self.pad_token is not None and not 0 <= self.pad_token < self.vocab_size:
            raise ValueError(
                f"pad_token must be None or in 0..{self.vocab_size - 1}, the vocabulary; got {self.pad_token}"
            )

    def check_fixed(self) -> None:
        """Raise ValueError for what the family does not have."""
        check_sizes(self, "token_types")

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def learns_from(self) -> tuple[str, ...]:
        """The batch names that the heads can learn from."""
        return LABELS[self.heads]

    @property
    def head_dropout(self) -> float:
        return self.dropout if self.classifier_dropout is None else self.classifier_dropout

    @property
    def max_length(self) -> int:
        """The most tokens a row may have."""
        return self.max_positions


def _encoder(vocab: int, positions: int, layers: int, hidden: int, heads: int) -> dict[str, Any]:
    return dict(
        vocab_size=vocab, max_positions=positions, num_layers=layers, hidden_size=hidden, num_heads=heads
    )


# Ours, for laptops. As for GPT, 0.02 is too small a standard deviation for a width of 128.
_TINY = _encoder(4096, 256, 4, 128, 4) | dict(init_std=0.06)

BERT_PRESETS: dict[str, dict[str, Any]] = {
    "bert-base-uncased": _encoder(30522, 512, 12, 768, 12),
    "bert-base-cased": _encoder(28996, 512, 12, 768, 12),
    "bert-large-uncased": _encoder(30522, 512, 24, 1024, 16),
    "minilm-l6-h384": _encoder(30522, 512, 6, 384, 12) | dict(heads="pooled"),
    "bert-tiny": _TINY,
}

ROBERTA_PRESETS: dict[str, dict[str, Any]] = {
    "roberta-base": _encoder(50265, 514, 12, 768, 12),
    "roberta-large": _encoder(50265, 514, 24, 1024, 16),
    "distilroberta-base": _encoder(50265, 514, 6, 768, 12),
    "roberta-tiny": _TINY | dict(max_positions=258),
}

DISTILBERT_PRESETS: dict[str, dict[str, Any]] = {
    "distilbert-base-uncased": _encoder(30522, 512, 6, 768, 12),
    "distilbert-tiny": _TINY | dict(num_layers=2),
}
