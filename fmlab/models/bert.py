"""BERT, top to bottom: embedding block, layer block, and a model that loops over them and its heads.

Post-norm transformer encoder with learned positions, token types and erf-GELU (Devlin et al. 2019,
arXiv:1810.04805). RoBERTa and DistilBERT are built of the same blocks; `roberta.py` and `distilbert.py` show
what differs.

Shapes: b batch, l length, d hidden width, v vocabulary, c classes.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmlab.models.attention import AttentionCore, bidirectional_mask, sdpa_core, token_positions
from fmlab.models.base import Model
from fmlab.models.bert_config import BERT_PRESETS, LABELS, BERTConfig
from fmlab.models.bert_heads import BiasedCrossEntropy, Classifier, MaskedLMHead, Pooler, SentenceHead
from fmlab.models.cross_entropy import linear_cross_entropy
from fmlab.models.dropout import drop_out
from fmlab.models.hf import HFFormat
from fmlab.models.inputs import check_positions, check_values
from fmlab.models.layers import MLP, Embedding, SelfAttention, add_residual, can_lend
from fmlab.models.plan import ParallelPlan, Rule, Stream
from fmlab.models.state import Block, State, stream_length

#: Fields of the config that with_heads may change: they leave the shape of the encoder as it is.
_FREE = ("num_classes", "class_names", "classifier_dropout", "dropout")


class BERTEmbedding(Block):
    """input_ids, position_ids, token_type_ids -> hidden: the normed sum of three vectors."""

    reads = ("input_ids", "position_ids", "token_type_ids")
    writes = ("hidden",)

    def __init__(self, config: BERTConfig):
        super().__init__()
        self.tokens = Embedding(config.vocab_size, config.hidden_size, config.pad_token)
        self.positions = Embedding(config.max_positions, config.hidden_size)
        self.types = Embedding(config.token_types, config.hidden_size) if config.token_types else None
        self.norm = nn.LayerNorm(config.hidden_size, config.norm_eps)
        self.dropout = config.dropout

    def forward(self, state: State) -> State:
        if state.derived.get("one gradient for the tied table"):
            tokens_bld, state.derived["table"] = self.tokens.lend(state.input_ids)
        else:
            tokens_bld = self.tokens(state.input_ids)
        hidden_bld = tokens_bld + self.positions(state.position_ids)
        if self.types is not None:
            hidden_bld = hidden_bld + self.types(state.token_type_ids)
        return state.updated(hidden=drop_out(self.norm(hidden_bld), self.dropout, self.training, "bld"))


class BERTLayer(Block):
    """hidden -> hidden: attention, then the feed-forward network, each added to the stream, which is normed
    AFTER each addition."""

    reads = ("hidden", "attention_mask", "document_ids")
    writes = ("hidden",)

    def __init__(self, config: BERTConfig, attention_core: AttentionCore, attention_dropout: float):
        super().__init__()
        self.attention = SelfAttention(config.hidden_size, config.head_size, attention_core, config.dropout)
        self.attention_norm = nn.LayerNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config.hidden_size, config.ffn_size or 4 * config.hidden_size, F.gelu)
        self.mlp_norm = nn.LayerNorm(config.hidden_size, config.norm_eps)
        self.attention_dropout, self.mlp_dropout = attention_dropout, config.dropout  # of what is added

    def forward(self, state: State) -> State:
        hidden = state.hidden  # [b,l,d]
        update = self.attention(hidden, bidirectional_mask(state, queries=stream_length(state, "hidden")))
        dropout = self.attention_dropout if self.training else 0.0
        hidden = self.attention_norm(add_residual(hidden, update, self.attention.output.bias, dropout))
        update = self.mlp(hidden)
        dropout = self.mlp_dropout if self.training else 0.0
        hidden = self.mlp_norm(add_residual(hidden, update, self.mlp.down.bias, dropout))
        return state.updated(hidden=hidden)


class BERT(Model):
    """A BERT: `model(input_ids)` gives `hidden` and what its heads make of it.

    Args:
        attention_core: see fmlab.models.attention; ring attention slips in here.
        cross_entropy: (hidden[n,d], weight[v,d], labels[n], bias[v]) -> loss sum; a vocab-parallel loss slips
            in here.

    A table row of the padding token learns nothing from being looked up, as in transformers.
    """

    CONFIG: ClassVar[type] = BERTConfig
    PRESETS = BERT_PRESETS
    TOKEN_TABLES = (r"blocks\.\d+\.tokens\.weight",)
    POSITION_TABLES = (r"blocks\.0\.positions\.weight",)
    #: Position of the first token.
    first_position = 0

    def __init__(
        self,
        config: BERTConfig,
        attention_core: AttentionCore = sdpa_core,
        cross_entropy: BiasedCrossEntropy = linear_cross_entropy,
    ):
        super().__init__()
        self.config: BERTConfig = config
        self.attention_core, self.cross_entropy = attention_core, cross_entropy
        dropout = self.attention_dropout()
        layers = [BERTLayer(config, attention_core, dropout) for _ in range(config.num_layers)]
        self.blocks = nn.ModuleList([self.embedding_block(), *layers, *self.head_blocks()])
        self.finish()

    # ---- what differs in RoBERTa and DistilBERT ------------------------------------------------------------

    def embedding_block(self) -> Block:
        return BERTEmbedding(self.config)

    def attention_dropout(self) -> float:
        """Of what attention adds to the stream."""
        return self.config.dropout

    def head_blocks(self) -> list[Block]:
        config = self.config
        make: dict[str, Callable[[], list[Block]]] = {
            "encoder": lambda: [],
            "pooled": lambda: [Pooler(config)],
            "masked": lambda: [MaskedLMHead(config, self.cross_entropy)],
            "pretraining": lambda: [
                Pooler(config),
                SentenceHead(config),
                MaskedLMHead(config, self.cross_entropy),
            ],
            "classifier": lambda: [Pooler(config), Classifier(config)],
        }
        return make[config.heads]()

    def positions(self, input_ids: Tensor, document_ids: Tensor | None = None) -> Tensor:
        """Position of each token, [b,l]: its column, padding or not; packed documents each from 0."""
        if document_ids is not None:
            return token_positions(input_ids, None, document_ids, None)
        return torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)

    def initialize(self, weight: Tensor) -> None:
        """Fill a matrix: normal, drawn again beyond two standard deviations, as in BERT's own code."""
        std = self.config.init_std
        nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)

    @classmethod
    def hf_format(cls) -> HFFormat:
        """transformers' BertModel, BertForMaskedLM, BertForPreTraining, BertForSequenceClassification."""
        from fmlab.models.bert_hf import FORMAT

        return FORMAT

    # ---- running -------------------------------------------------------------------------------------------

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        sentence_labels: Tensor | None = None,
        class_labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
    ) -> State:
        """Run all blocks.

        Args:
            labels: [b,l], the token that was masked at each position; -100 elsewhere.
            attention_mask: [b,l], 1 real, 0 padding.
            token_type_ids: [b,l], 0 for the first segment of a pair and 1 for the second; default: all 0.
            sentence_labels: [b], 0 if the second segment follows the first one, else 1; -100 for no label.
            class_labels: [b], -100 for no label.
            position_ids: [b,l]; default: see `positions`.
            document_ids: [b,l]; equal for the tokens of one packed document, which see no other document's.

        Returns a State with `hidden` [b,l,d] and, by heads: `pooled` [b,d]; `logits` [b,l,v], or `loss_sum`
        with labels; `sentence_logits` [b,2], or `sentence_loss_sum`; `class_logits` [b,c], with labels also
        `class_loss_sum`.
        """
        given = (input_ids, labels, attention_mask, token_type_ids, sentence_labels, class_labels)
        state = self.prepare(*given, position_ids, document_ids)
        if labels is not None and self._can_lend():
            state.derived["one gradient for the tied table"] = True
        for block in self.blocks:
            state = block(state)
        return state

    def prepare(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        sentence_labels: Tensor | None = None,
        class_labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
    ) -> State:
        """Check a batch and make the State that the first block reads; arguments as for forward.

        Raises ValueError for shapes that do not agree, more tokens than positions, labels without a head, and
        labels of a row that holds several documents.
        """
        by_token = dict(labels=labels, attention_mask=attention_mask, token_type_ids=token_type_ids)
        by_token |= dict(position_ids=position_ids, document_ids=document_ids)
        by_row = dict(sentence_labels=sentence_labels, class_labels=class_labels)
        given = {name: tensor for name, tensor in (by_token | by_row).items() if tensor is not None}
        self._check(input_ids, given, by_row)
        if position_ids is None:
            given["position_ids"] = self.positions(input_ids, document_ids)
            if document_ids is not None:
                check_positions(given["position_ids"] - self.first_position, self.config.max_length)
        if token_type_ids is None and self.config.token_types:
            given["token_type_ids"] = torch.zeros_like(input_ids)
        return State(given, input_ids=input_ids)

    def _check(self, input_ids: Tensor, given: dict[str, Tensor], by_row: dict[str, Any]) -> None:
        config = self.config
        if input_ids.dim() != 2 or not input_ids.shape[1]:
            raise ValueError(
                f"input_ids must be [batch, length] with a token at least, got shape {list(input_ids.shape)}"
            )
        for name, tensor in given.items():
            wanted = input_ids.shape[:1] if name in by_row else input_ids.shape
            if tensor.shape != wanted:
                raise ValueError(f"{name} must have the shape {list(wanted)}, got {list(tensor.shape)}")
        check_values({"input_ids": input_ids, **given})
        for name in ("labels", "sentence_labels", "class_labels"):
            if name in given and name not in config.learns_from:
                able = [heads for heads in config.HEADS if name in LABELS[heads]]
                raise ValueError(
                    f"{name} need a {type(self).__name__} with heads={' or '.join(map(repr, able)) or 'none'}"
                    f", this one has {config.heads!r}; with_heads gives it others"
                )
        if "token_type_ids" in given and not config.token_types:
            raise ValueError(f"a {type(self).__name__} has no token types; leave token_type_ids out")
        if "document_ids" in given and (packed := sorted(set(by_row) & set(given))):
            raise ValueError(
                f"{', '.join(packed)} speak of a row, and document_ids put several documents into one; leave "
                "one of them out"
            )
        own = "position_ids" in given or "document_ids" in given
        if input_ids.shape[1] > config.max_length and not own:
            raise ValueError(
                f"a sequence of {input_ids.shape[1]} tokens is longer than the model's {config.max_length} "
                "positions; shorten it, or build the model with a larger max_positions"
            )

    def _can_lend(self) -> bool:
        table, output = (self.get_submodule(f"blocks.{i}.tokens") for i in (0, len(self.blocks) - 1))
        return can_lend(table, output, self.cross_entropy)

    # ---- weights -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def with_heads(self, heads: str, **overrides: Any) -> Self:
        """The same encoder, copied, with other heads, for fine-tuning; `overrides` replace config fields.

        A head that both have is copied too; a new one starts with fresh weights. Raises ValueError for fields
        of the encoder's shape: what does not fit could not be copied.
        """
        if wrong := sorted(set(overrides) - set(_FREE)):
            raise ValueError(
                f"with_heads keeps the encoder, so {wrong} cannot change; legal: {', '.join(_FREE)}"
            )
        other = type(self)(
            replace(self.config, heads=heads, **overrides), self.attention_core, self.cross_entropy
        )
        mine = {type(block).__name__: block for block in self.blocks[self.config.num_layers + 1 :]}
        for index, block in enumerate(other.blocks):
            encoder = index <= self.config.num_layers
            source = self.blocks[index] if encoder else mine.get(type(block).__name__)
            if source is not None and all(
                a.shape == b.shape for a, b in zip(block.parameters(), source.parameters(), strict=True)
            ):
                block.load_state_dict(source.state_dict())
        return other.to(self.get_parameter("blocks.1.attention.qkv.weight")).train(self.training)

    def ties(self) -> tuple[tuple[str, ...], ...]:
        """The output matrix of masked-token prediction is the token embedding."""
        head = f"blocks.{len(self.blocks) - 1}.tokens.weight"
        return (("blocks.0.tokens.weight", head),) if "labels" in self.config.learns_from else ()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fill all weights anew: matrices by `initialize`, norms 1, biases and the padding's vectors 0."""
        for name, parameter in self.named_parameters():
            if name.endswith(".bias"):
                parameter.zero_()
            elif "norm" in name:
                parameter.fill_(1.0)
            else:
                self.initialize(parameter)
        for module in self.modules():
            if isinstance(module, Embedding) and module.padding_idx is not None:
                module.weight[module.padding_idx].zero_()

    def parallel_plan(self) -> ParallelPlan:
        """How the weights may be divided over ranks and where the block list may be cut.

        The heads stay together, so that all results are on the last stage.
        """
        head = self.config.head_size
        rules = [
            Rule(r"blocks\.\d+\.tokens\.(weight|bias)", "vocab"),
            Rule(r"blocks\.0\.(positions|types)\.weight", "replicate"),
            Rule(r".*norm\.(weight|bias)", "replicate"),
            Rule(r".*\.attention\.qkv\.(weight|bias)", "column", parts=3, unit=head),
            Rule(r".*\.attention\.output\.weight", "row", unit=head),
            Rule(r".*\.mlp\.up\.(weight|bias)", "column"),
            Rule(r".*\.mlp\.down\.weight", "row"),
            Rule(r".*\.(attention\.output|mlp\.down)\.bias", "replicate"),
        ]
        if self.config.heads != "encoder":
            rules.append(Rule(r"blocks\.\d+\.(dense|output)\.(weight|bias)", "replicate"))
        last = min(self.config.num_layers + 1, len(self.blocks) - 1)
        return ParallelPlan(
            tuple(rules),
            self.ties(),
            tuple(range(1, last + 1)),
            sequence=(
                "input_ids",
                "labels",
                "attention_mask",
                "token_type_ids",
                "position_ids",
                "document_ids",
            ),
            streams=(Stream("hidden", "input_ids", (1, self.config.num_layers)),),
            first_token=("sentence_labels", "class_labels"),
        )
