"""A decoder whose attention and feed-forward network stand side by side, as blocks with a plan.

Shapes: b rows, l length, d width, h heads, k head width, v vocabulary.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from fmlab.models import Block, ParallelPlan, Rule, State
from fmlab.models.cross_entropy import linear_cross_entropy
from fmlab.models.plan import Stream


@dataclass(frozen=True)
class Config:
    vocab_size: int = 97
    max_positions: int = 32
    width: int = 32
    heads: int = 4
    layers: int = 3


class Embed(Block):
    reads, writes = ("input_ids",), ("hidden",)

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        self.positions = nn.Embedding(config.max_positions, config.width)

    def forward(self, state: State) -> State:
        positions_ld = self.positions.weight[: state.input_ids.shape[1]]
        return state.updated(hidden=self.tokens(state.input_ids) + positions_ld)


class Layer(Block):
    """hidden + attention(norm(hidden)) + mlp(norm(hidden))."""

    reads, writes = ("hidden",), ("hidden",)

    def __init__(self, config: Config) -> None:
        super().__init__()
        d = config.width
        self.head_dim = d // config.heads
        self.norm = nn.LayerNorm(d)
        self.q, self.k, self.v = (nn.Linear(d, d, bias=False) for _ in range(3))
        self.out = nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, state: State) -> State:
        x = self.norm(state.hidden)
        query, key, value = (self._heads(layer(x)) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        attended = self.out(mixed.transpose(1, 2).flatten(2))
        return state.updated(hidden=state.hidden + attended + self.down(F.gelu(self.up(x))))

    def _heads(self, x: Tensor) -> Tensor:
        """[b,l,h*k] -> [b,h,l,k]; h is what the weights at hand make, all heads or a rank's share."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class Head(Block):
    reads, writes = ("hidden", "labels"), ("logits", "loss_sum")

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.tokens = nn.Linear(config.width, config.vocab_size, bias=False)
        self.cross_entropy = linear_cross_entropy  # replaced where the vocabulary is divided

    def forward(self, state: State) -> State:
        hidden = self.norm(state.hidden)
        if "labels" not in state:
            return state.updated(logits=self.tokens(hidden))
        loss = self.cross_entropy(hidden.flatten(0, 1), self.tokens.weight, state.labels.flatten())
        return state.updated(loss_sum=loss)


class SideBySide(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        layers = [Layer(config) for _ in range(config.layers)]
        self.blocks = nn.ModuleList([Embed(config), *layers, Head(config)])

    def prepare(self, input_ids: Tensor, labels: Tensor | None = None) -> State:
        """What the first block reads; on a pipeline every stage calls it."""
        return State(input_ids=input_ids) if labels is None else State(input_ids=input_ids, labels=labels)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> State:
        state = self.prepare(input_ids, labels)
        for block in self.blocks:
            state = block(state)
        return state

    def parallel_plan(self) -> ParallelPlan:
        unit = self.config.width // self.config.heads
        return ParallelPlan(
            rules=(
                Rule(r"blocks\.\d+\.tokens\.weight", "vocab"),
                Rule(r"blocks\.0\.positions\.weight", "replicate"),
                Rule(r"blocks\.\d+\.norm\.(weight|bias)", "replicate"),
                Rule(r"blocks\.\d+\.[qkv]\.weight", "column", unit=unit),
                Rule(r"blocks\.\d+\.out\.weight", "row", unit=unit),
                Rule(r"blocks\.\d+\.up\.(weight|bias)", "column"),
                Rule(r"blocks\.\d+\.down\.weight", "row"),
                Rule(r"blocks\.\d+\.(out|down)\.bias", "replicate"),
            ),
            tied=(),
            cuts=tuple(range(1, len(self.blocks))),
            streams=(Stream("hidden", "input_ids", (1, len(self.blocks) - 1)),),
        )


def build() -> SideBySide:
    return SideBySide(Config())
