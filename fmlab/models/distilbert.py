"""DistilBERT: BERT with half the layers, trained to imitate it; without token types and without a pooler.

Sanh et al. 2019, arXiv:1910.01108. What differs from BERT in the numbers: no token types; nothing is dropped
of what attention adds to the stream; the classifier's pooling layer has a ReLU instead of a tanh.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from fmlab.models.bert import BERT
from fmlab.models.bert_config import DISTILBERT_PRESETS, BERTConfig
from fmlab.models.bert_heads import Classifier, MaskedLMHead, Pooler
from fmlab.models.hf import HFFormat
from fmlab.models.state import Block


@dataclass(frozen=True)
class DistilBERTConfig(BERTConfig):
    """Shape of a DistilBERT; see BERTConfig."""

    token_types: int = 0
    heads: str = "masked"

    HEADS: ClassVar[tuple[str, ...]] = ("encoder", "masked", "classifier")

    def check_fixed(self) -> None:
        for name, only in (("token_types", 0), ("norm_eps", 1e-12)):
            if getattr(self, name) != only:
                raise ValueError(f"a DistilBERT has {name}={only}, got {getattr(self, name)}; use BERT")


class DistilBERT(BERT):
    """A DistilBERT; see BERT. It has no token_type_ids and no sentence_labels."""

    CONFIG = DistilBERTConfig
    PRESETS = DISTILBERT_PRESETS

    config: DistilBERTConfig

    def attention_dropout(self) -> float:
        """Nothing is dropped."""
        return 0.0

    def head_blocks(self) -> list[Block]:
        config = self.config
        make: dict[str, Callable[[], list[Block]]] = {
            "encoder": lambda: [],
            "masked": lambda: [MaskedLMHead(config, self.cross_entropy)],
            "classifier": lambda: [Pooler(config, torch.relu), Classifier(config)],
        }
        return make[config.heads]()

    def initialize(self, weight: Tensor) -> None:
        """Fill a matrix: normal."""
        nn.init.normal_(weight, std=self.config.init_std)

    @classmethod
    def hf_format(cls) -> HFFormat:
        """transformers' DistilBertModel, DistilBertForMaskedLM, DistilBertForSequenceClassification."""
        from fmlab.models.distilbert_hf import FORMAT

        return FORMAT
