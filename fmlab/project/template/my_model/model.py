"""The model: sizes, blocks, and a plan of how they are divided.

A start that runs: a decoder with a squared ReLU. Put your own blocks in the place of these, one at a time;
`pytest` says after each step what is not right yet.

Shapes: b rows, l length, d width, h heads, k head width, v vocabulary.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from fmlab.models import Block, ParallelPlan, Rule, State, Stream
from fmlab.models.cross_entropy import linear_cross_entropy


@dataclass(frozen=True)
class Config:
    """Sizes of the model. `fmlab` reads hidden_size (learning rate), vocab_size and max_positions (data)."""

    vocab_size: int
    max_positions: int
    num_layers: int
    hidden_size: int
    num_heads: int


SIZES: Mapping[str, Config] = {
    "tiny": Config(2048, 128, 3, 64, 4),  # seconds on a laptop: what the tests and the notebook use
    "full": Config(50_257, 1024, 24, 1024, 16),  # what you want to train
}


class Embed(Block):
    """input_ids -> hidden."""

    reads, writes = ("input_ids",), ("hidden",)

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = nn.Embedding(config.max_positions, config.hidden_size)

    def forward(self, state: State) -> State:
        positions_ld = self.positions.weight[: state.input_ids.shape[1]]
        return state.updated(hidden=self.tokens(state.input_ids) + positions_ld)


class Layer(Block):
    """hidden -> hidden: attention, then the feed-forward network."""

    reads, writes = ("hidden",), ("hidden",)

    def __init__(self, config: Config) -> None:
        super().__init__()
        d = config.hidden_size
        self.head_size = d // config.num_heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(d), nn.LayerNorm(d)
        self.query, self.key, self.value = (nn.Linear(d, d) for _ in range(3))
        self.output = nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, state: State) -> State:
        hidden = state.hidden + self._attention(self.attention_norm(state.hidden))
        return state.updated(hidden=hidden + self.down(F.relu(self.up(self.mlp_norm(hidden))).square()))

    def _attention(self, x_bld: Tensor) -> Tensor:
        query, key, value = (self._heads(layer(x_bld)) for layer in (self.query, self.key, self.value))
        mixed_bhlk = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed_bld: Tensor = self.output(mixed_bhlk.transpose(1, 2).flatten(2))
        return mixed_bld

    def _heads(self, x_bld: Tensor) -> Tensor:
        """[b,l,d] -> [b,h,l,k]. How many heads there are, the weights say: all, or a tensor rank's share."""
        return x_bld.unflatten(-1, (-1, self.head_size)).transpose(1, 2)


class Head(Block):
    """hidden -> logits, or with labels (-100: no target) the sum of the losses."""

    reads, writes = ("hidden", "labels"), ("logits", "loss_sum")

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size)
        self.tokens = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.cross_entropy = linear_cross_entropy  # replaced where the vocabulary is divided

    def forward(self, state: State) -> State:
        hidden_bld = self.norm(state.hidden)
        if "labels" not in state:
            return state.updated(logits=self.tokens(hidden_bld))
        hidden_nd, labels_n = hidden_bld.flatten(0, 1), state.labels.flatten()
        return state.updated(loss_sum=self.cross_entropy(hidden_nd, self.tokens.weight, labels_n))


class Decoder(nn.Module):
    """`model(input_ids)` gives logits, `model(input_ids, labels)` the sum of the losses."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        layers = [Layer(config) for _ in range(config.num_layers)]
        embed, head = Embed(config), Head(config)
        self.blocks = nn.ModuleList([embed, *layers, head])
        nn.init.normal_(embed.tokens.weight, std=0.02)
        nn.init.normal_(embed.positions.weight, std=0.02)
        self.tie()

    def tie(self) -> None:
        """Make the output matrix and the token table one parameter under two names."""
        embed, head = self.blocks[0], self.blocks[-1]
        assert isinstance(embed, Embed)
        assert isinstance(head, Head)
        head.tokens.weight = embed.tokens.weight

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Decoder":
        """A move to some devices gives each name a parameter of its own: the tie is made again."""
        super()._apply(fn, recurse)
        self.tie()
        return self

    def prepare(self, input_ids: Tensor, labels: Tensor | None = None) -> State:
        """What the first block reads; every stage of a pipeline calls it."""
        return State(input_ids=input_ids) if labels is None else State(input_ids=input_ids, labels=labels)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> State:
        state = self.prepare(input_ids, labels)
        for block in self.blocks:
            state = block(state)
        return state

    def parallel_plan(self) -> ParallelPlan:
        """How the weights may be divided, and where the list of blocks may be cut."""
        unit = self.config.hidden_size // self.config.num_heads
        last = len(self.blocks) - 1
        return ParallelPlan(
            rules=(
                Rule(r"blocks\.\d+\.tokens\.weight", "vocab"),
                Rule(r"blocks\.0\.positions\.weight", "replicate"),
                Rule(r".*norm\.(weight|bias)", "replicate"),
                Rule(r".*\.(query|key|value)\.(weight|bias)", "column", unit=unit),
                Rule(r".*\.output\.weight", "row", unit=unit),
                Rule(r".*\.up\.(weight|bias)", "column"),
                Rule(r".*\.down\.weight", "row"),
                Rule(r".*\.(output|down)\.bias", "replicate"),
            ),
            tied=(("blocks.0.tokens.weight", f"blocks.{last}.tokens.weight"),),
            cuts=tuple(range(1, len(self.blocks))),
            streams=(Stream("hidden", "input_ids", (1, last)),),
        )


def build(size: str = "tiny") -> Decoder:
    """The model in one of SIZES."""
    return Decoder(SIZES[size])


#: name -> what builds the model: what `train` and `plan` are asked for
MODELS: Mapping[str, Callable[[], nn.Module]] = {size: partial(build, size) for size in SIZES}
