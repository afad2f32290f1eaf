"""RoBERTa: BERT's layers with a byte-level vocabulary, no sentence pairs, and positions that skip padding.

Liu et al. 2019, arXiv:1907.11692. What differs from BERT in the numbers: norm epsilon 1e-5; a single token
type, which is a learned constant; positions counted from pad_token + 1 over the tokens that are not padding,
so that 514 rows make room for 512 tokens; and in the classifier dropout before the pooler as well.

Shapes: b batch, l length.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from fmlab.models.attention import token_positions
from fmlab.models.bert import BERT, BERTEmbedding
from fmlab.models.bert_config import ROBERTA_PRESETS, BERTConfig
from fmlab.models.bert_heads import Classifier, MaskedLMHead, Pooler
from fmlab.models.hf import HFFormat
from fmlab.models.layers import Embedding
from fmlab.models.state import Block


@dataclass(frozen=True)
class RoBERTaConfig(BERTConfig):
    """Shape of a RoBERTa; see BERTConfig. `pad_token` also says where positions begin."""

    token_types: int = 1
    norm_eps: float = 1e-5
    pad_token: int | None = 1
    heads: str = "masked"

    HEADS: ClassVar[tuple[str, ...]] = ("encoder", "pooled", "masked", "classifier")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pad_token is None:
            raise ValueError("a RoBERTa counts positions from its pad_token, so it needs one; usual is 1")
        if self.max_length < 1:
            raise ValueError(
                f"max_positions={self.max_positions} leaves no position: the first {self.pad_token + 1} are "
                "never given to a token"
            )

    @property
    def max_length(self) -> int:
        assert self.pad_token is not None
        return self.max_positions - self.pad_token - 1


class RoBERTaEmbedding(BERTEmbedding):
    """BERT's, where the position of padding learns nothing either."""

    def __init__(self, config: RoBERTaConfig):
        super().__init__(config)
        self.positions = Embedding(config.max_positions, config.hidden_size, config.pad_token)


class RoBERTa(BERT):
    """A RoBERTa; see BERT. It has no sentence_labels, and its token_type_ids can only be 0."""

    CONFIG = RoBERTaConfig
    PRESETS = ROBERTA_PRESETS

    config: RoBERTaConfig

    def embedding_block(self) -> Block:
        return RoBERTaEmbedding(self.config)

    def head_blocks(self) -> list[Block]:
        config = self.config
        make: dict[str, Callable[[], list[Block]]] = {
            "encoder": lambda: [],
            "pooled": lambda: [Pooler(config)],
            "masked": lambda: [MaskedLMHead(config, self.cross_entropy)],
            "classifier": lambda: [Pooler(config, torch.tanh, config.head_dropout), Classifier(config)],
        }
        return make[config.heads]()

    @property
    def first_position(self) -> int:  # type: ignore[override]
        """Position of the first token: behind that of padding."""
        assert self.config.pad_token is not None
        return self.config.pad_token + 1

    def positions(self, input_ids: Tensor, document_ids: Tensor | None = None) -> Tensor:
        """Position of each token, [b,l]: pad_token + 1 for the first that is not padding; padding: pad_token.
        In packed rows it begins anew in each document.

        Padding is what has the id `pad_token`, whatever attention_mask says.
        """
        pad = self.config.pad_token
        assert pad is not None
        real_bl = input_ids.ne(pad).long()
        if document_ids is not None:
            return (token_positions(input_ids, real_bl, document_ids, None) + 1) * real_bl + pad
        return real_bl.cumsum(1) * real_bl + pad

    def initialize(self, weight: Tensor) -> None:
        """Fill a matrix: normal, as in fairseq."""
        nn.init.normal_(weight, std=self.config.init_std)

    @classmethod
    def hf_format(cls) -> HFFormat:
        """transformers' RobertaModel, RobertaForMaskedLM, RobertaForSequenceClassification."""
        from fmlab.models.roberta_hf import FORMAT

        return FORMAT
