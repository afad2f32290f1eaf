"""What stands on a BERT-like encoder: masked-token, pooling, sentence-pair and classification heads.

Shapes: b batch, l length, d hidden width, v vocabulary, n positions with a label, c classes.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmlab.models.cross_entropy import IGNORE, class_cross_entropy
from fmlab.models.dropout import drop_out
from fmlab.models.layers import Activation, Linear
from fmlab.models.state import Block, State

if TYPE_CHECKING:
    from fmlab.models.bert_config import BERTConfig

#: (hidden[n,d], weight[v,d], labels[n], bias[v]) -> loss sum
BiasedCrossEntropy = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class MaskedLMHead(Block):
    """hidden -> logits, or with labels -> loss_sum: a small network, then the token table and a bias.

    About 15 % of the positions have a label, and only those go through the head.
    """

    reads = ("hidden", "labels")
    writes = ("logits", "loss_sum")

    def __init__(self, config: "BERTConfig", cross_entropy: BiasedCrossEntropy):
        super().__init__()
        self.dense = Linear(config.hidden_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, config.norm_eps)
        self.tokens = Linear(config.hidden_size, config.vocab_size)
        self.cross_entropy = cross_entropy

    def forward(self, state: State) -> State:
        if "labels" not in state:
            return state.updated(logits=self.tokens(self.transform(state.hidden)))
        # Lent by the embedding. Taken out, so that a kept State does not keep the graph alive.
        weight = state.derived.pop("table", self.tokens.weight)
        hidden_nd, labels_n = labelled_rows(state.hidden, state.labels)
        hidden_nd = self.transform(hidden_nd)
        return state.updated(loss_sum=self.cross_entropy(hidden_nd, weight, labels_n, self.tokens.bias))

    def transform(self, hidden: Tensor) -> Tensor:
        """[...,d] -> [...,d]: what the vectors of the token table are compared with."""
        return self.norm(F.gelu(self.dense(hidden)))


def labelled_rows(hidden_bld: Tensor, labels_bl: Tensor) -> tuple[Tensor, Tensor]:
    """hidden [n,d] and labels [n] of the positions whose label is not -100.

    How many there are is known only from the data. In a compiled graph and on the meta device, whose shapes
    must be known beforehand, all rows are returned: the loss ignores those without a label.
    """
    hidden, labels = hidden_bld.flatten(0, 1), labels_bl.flatten()
    if torch.compiler.is_compiling() or labels.is_meta:
        return hidden, labels
    rows = (labels != IGNORE).nonzero().squeeze(1)
    return hidden.index_select(0, rows), labels.index_select(0, rows)


class Pooler(Block):
    """hidden -> pooled [b,d]: one vector for each row, activation(dense(hidden of the first token))."""

    reads = ("hidden",)
    writes = ("pooled",)

    def __init__(self, config: "BERTConfig", activation: Activation = torch.tanh, dropout: float = 0.0):
        super().__init__()
        self.dense = Linear(config.hidden_size, config.hidden_size)
        self.activation, self.dropout = activation, dropout

    def forward(self, state: State) -> State:
        first_bd = drop_out(state.hidden[:, 0], self.dropout, self.training, "bd")
        return state.updated(pooled=self.activation(self.dense(first_bd)))


class SentenceHead(Block):
    """pooled -> sentence_logits [b,2], or with sentence_labels -> sentence_loss_sum.

    Class 0: the second segment follows the first one in the text; class 1: it does not.
    """

    reads = ("pooled", "sentence_labels")
    writes = ("sentence_logits", "sentence_loss_sum")

    def __init__(self, config: "BERTConfig"):
        super().__init__()
        self.output = Linear(config.hidden_size, 2)

    def forward(self, state: State) -> State:
        logits = self.output(state.pooled)
        if "sentence_labels" not in state:
            return state.updated(sentence_logits=logits)
        return state.updated(sentence_loss_sum=class_cross_entropy(logits, state.sentence_labels))


class Classifier(Block):
    """pooled -> class_logits [b,c], and with class_labels -> class_loss_sum as well."""

    reads = ("pooled", "class_labels")
    writes = ("class_logits", "class_loss_sum")

    def __init__(self, config: "BERTConfig"):
        super().__init__()
        self.output = Linear(config.hidden_size, config.num_classes)
        self.dropout = config.head_dropout

    def forward(self, state: State) -> State:
        logits = self.output(drop_out(state.pooled, self.dropout, self.training, "bd"))
        if "class_labels" not in state:
            return state.updated(class_logits=logits)
        return state.updated(
            class_logits=logits, class_loss_sum=class_cross_entropy(logits, state.class_labels)
        )
