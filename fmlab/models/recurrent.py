"""Recurrent networks: the cell (one step), the layer (a loop over time), a language model of such layers.

The cells have the equations and the weight layout of torch.nn.RNN, LSTM (Hochreiter and Schmidhuber 1997,
with forget gates: Gers et al. 2000) and GRU (Cho et al. 2014, arXiv:1406.1078, in cuDNN's form).

Shapes: b batch, l length, i input width, h hidden width, n gates of a cell, d model width, v vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from fmlab.models.attention import document_runs
from fmlab.models.base import check_dropout, check_sizes
from fmlab.models.cross_entropy import linear_cross_entropy
from fmlab.models.dropout import drop_out
from fmlab.models.functions import linear
from fmlab.models.gpt import CrossEntropy
from fmlab.models.hf import HFFormat
from fmlab.models.plan import ParallelPlan, Rule
from fmlab.models.sequence import SequenceLM
from fmlab.models.state import Block, State

Memory = tuple[Tensor, ...]  # what a cell carries from step to step, each [b,h]


class Cell(nn.Module):
    """One step of recurrence. `weight_ih` [n*h,i] reads the input, `weight_hh` [n*h,h] the hidden state."""

    gates: ClassVar[int]
    memories: ClassVar[int] = 1

    def __init__(self, input_size: int, hidden_size: int):
        super().__init__()
        self.hidden_size, rows = hidden_size, self.gates * hidden_size
        self.weight_ih = nn.Parameter(torch.empty(rows, input_size))
        self.weight_hh = nn.Parameter(torch.empty(rows, hidden_size))
        self.bias_ih = nn.Parameter(torch.empty(rows))
        self.bias_hh = nn.Parameter(torch.empty(rows))

    def start(self, like: Tensor) -> Memory:
        """The memory before the first input of `like` [b,…]: zeros."""
        return (like.new_zeros(len(like), self.hidden_size),) * self.memories

    def forward(self, read: Tensor, memory: Memory) -> Memory:
        """The next memory, whose first part is the output. `read`: weight_ih x + bias_ih, [b,n*h]."""
        raise NotImplementedError

    def recall(self, hidden: Tensor) -> Tensor:
        """weight_hh hidden + bias_hh, [b,n*h]."""
        return linear(hidden, self.weight_hh, self.bias_hh)


class RNNCell(Cell):
    """h' = tanh(W x + U h + b): everything is overwritten at each step (Elman 1990)."""

    gates = 1

    def forward(self, read: Tensor, memory: Memory) -> Memory:
        return (torch.tanh(read + self.recall(memory[0])),)


# region lstm
class LSTMCell(Cell):
    """c' = f c + i g and h' = o tanh(c'): a second memory c is only scaled and added to.

    Where the forget gate f is near 1, c and its gradient pass through many steps unchanged.
    """

    gates = 4
    memories = 2

    def forward(self, read: Tensor, memory: Memory) -> Memory:
        hidden, carried = memory
        i, f, g, o = (read + self.recall(hidden)).chunk(4, -1)  # torch's order of gates
        carried = torch.sigmoid(f) * carried + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(carried), carried


# endregion


class GRUCell(Cell):
    """h' = z h + (1 - z) tanh(W x + r (U h)): one memory, two gates."""

    gates = 3

    def forward(self, read: Tensor, memory: Memory) -> Memory:
        (hidden,) = memory
        read_r, read_z, read_n = read.chunk(3, -1)
        own_r, own_z, own_n = self.recall(hidden).chunk(3, -1)
        z = torch.sigmoid(read_z + own_z)
        new = torch.tanh(read_n + torch.sigmoid(read_r + own_r) * own_n)
        return (z * hidden + (1 - z) * new,)


CELLS: dict[str, type[Cell]] = {"rnn": RNNCell, "lstm": LSTMCell, "gru": GRUCell}


def unroll(
    cell: Cell,
    x_bli: Tensor,
    real_bl: Tensor | None = None,
    fresh_bl: Tensor | None = None,
    memory: Memory | None = None,
    reverse: bool = False,
) -> tuple[Tensor, Memory]:
    """Run a cell along a sequence, [b,l,i] -> outputs [b,l,h] and the last memory; `reverse`: from its end.

    Args:
        real_bl: False at padding, which leaves the memory as it is and has output 0. The last memory is so
            that of the last real token, and a padded row equals the row alone, in both directions.
        fresh_bl: True where the memory is emptied first: at the first token of a packed document.
        memory: to start from, instead of zeros.
    """
    # region unroll
    memory = cell.start(x_bli) if memory is None else memory
    # Of all inputs at once. unbind, not indexing: the backward pass of each index would fill a whole tensor.
    reads = linear(x_bli, cell.weight_ih, cell.bias_ih).unbind(1)
    steps = range(len(reads))
    outputs: list[Tensor] = []
    for t in reversed(steps) if reverse else steps:
        if fresh_bl is not None:
            memory = tuple(m.masked_fill(fresh_bl[:, t, None], 0) for m in memory)
        after = cell(reads[t], memory)
        if real_bl is not None:
            real = real_bl[:, t, None]
            after = tuple(torch.where(real, new, m) for new, m in zip(after, memory, strict=True))
        memory = after
        outputs.append(memory[0])
    y_blh = torch.stack(outputs[::-1] if reverse else outputs, 1)
    return y_blh if real_bl is None else y_blh * real_bl[..., None], memory
    # endregion


class Recurrent(nn.Module):
    """A stack of layers like torch.nn.RNN, LSTM or GRU with batch_first=True.

    Args:
        kind: "rnn", "lstm" or "gru".
        bidirectional: a second cell a layer reads from the end; outputs are [b,l,2*h].
    """

    def __init__(
        self, kind: str, input_size: int, hidden_size: int, num_layers: int = 1, bidirectional: bool = False
    ):
        super().__init__()
        cell, ways = find_cell(kind), 1 + bidirectional
        sizes = [input_size] + [ways * hidden_size] * (num_layers - 1)
        self.cells = nn.ModuleList(
            nn.ModuleList(cell(size, hidden_size) for _ in range(ways)) for size in sizes
        )
        reset_cells(self)

    def forward(
        self, x: Tensor, real_bl: Tensor | None = None, memories: Sequence[Memory] | None = None
    ) -> tuple[Tensor, list[Memory]]:
        """x [b,l,i] -> outputs of the last layer, and the last memory of each layer and direction in turn."""
        if real_bl is not None and real_bl.shape != x.shape[:2]:
            raise ValueError(f"real_bl must be {list(x.shape[:2])}, got {list(real_bl.shape)}")
        last: list[Memory] = []
        for layer in self.cells:
            outputs = []
            for way, cell in enumerate(cast(nn.ModuleList, layer)):
                given = None if memories is None else memories[len(last)]
                y, memory = unroll(cast(Cell, cell), x, real_bl, memory=given, reverse=way == 1)
                outputs.append(y)
                last.append(memory)
            x = torch.cat(outputs, -1) if len(outputs) > 1 else outputs[0]
        return x, last


def find_cell(kind: str) -> type[Cell]:
    """The cell called `kind`. Raises ValueError with the legal names."""
    if kind not in CELLS:
        raise ValueError(f"unknown cell {kind!r}; legal: {', '.join(CELLS)}")
    return CELLS[kind]


@torch.no_grad()
def reset_cells(module: nn.Module) -> None:
    """Uniform in ±1/sqrt(h) for all weights of all cells in `module`, as torch.nn does."""
    for cell in module.modules():
        if isinstance(cell, Cell):
            for parameter in cell.parameters():
                parameter.uniform_(-(cell.hidden_size**-0.5), cell.hidden_size**-0.5)


@dataclass(frozen=True)
class RecurrentConfig:
    """Shape of a recurrent language model; characters or subwords alike. Raises ValueError if impossible."""

    vocab_size: int
    num_layers: int
    hidden_size: int
    cell: str = "lstm"
    dropout: float = 0.0
    init_std: float = 0.1
    tie_embeddings: bool = True

    def __post_init__(self) -> None:
        check_sizes(self, "vocab_size", "num_layers", "hidden_size")
        check_dropout(self, "dropout")
        find_cell(self.cell)

    @property
    def max_positions(self) -> int:
        """A recurrent network has no longest sequence."""
        return 1 << 30


PRESETS: dict[str, dict[str, Any]] = {
    f"{kind}-tiny": dict(vocab_size=4096, num_layers=2, hidden_size=width, cell=kind)
    # widths that give each as many parameters as gpt2-tiny has, 1.34 million
    for kind, width in (("rnn", 260), ("lstm", 188), ("gru", 204))
}


class RecurrentCache:
    """The memory of each layer after the tokens seen so far: its size does not grow with the text."""

    def __init__(self, batch: int):
        self.batch, self.length = batch, 0
        self.memories: dict[int, Memory] = {}

    @property
    def by_layer(self) -> dict[int, Memory]:
        return self.memories


class RecurrentLayer(Block):
    """hidden -> hidden: the outputs of one cell, run along the sequence."""

    reads = ("hidden", "attention_mask", "document_ids")
    writes = ("hidden",)

    def __init__(self, config: RecurrentConfig, index: int):
        super().__init__()
        self.index, self.dropout = index, config.dropout
        self.cell = find_cell(config.cell)(config.hidden_size, config.hidden_size)

    def forward(self, state: State) -> State:
        real, documents, fresh, memory = state.get("attention_mask"), state.get("document_ids"), None, None
        if documents is not None:
            runs = document_runs(documents)
            fresh = torch.zeros_like(runs, dtype=torch.bool)
            fresh[:, 1:] = runs[:, 1:] != runs[:, :-1]
        if state.cache is not None:
            memory = state.cache.memories.get(self.index)
        real = None if real is None else real.bool()
        hidden, memory = unroll(self.cell, state.hidden, real, fresh, memory)
        if state.cache is not None:
            state.cache.memories[self.index] = memory
        return state.updated(hidden=drop_out(hidden, self.dropout, self.training, "bld"))


class RecurrentLM(SequenceLM):
    """A recurrent language model; see SequenceLM."""

    CONFIG = RecurrentConfig
    PRESETS = PRESETS

    def __init__(self, config: RecurrentConfig, cross_entropy: CrossEntropy = linear_cross_entropy):
        layers = [RecurrentLayer(config, index) for index in range(config.num_layers)]
        super().__init__(config, layers, nn.Identity(), cross_entropy)

    def new_cache(self, batch: int, max_length: int | None = None) -> RecurrentCache:
        """An empty memory for `batch` rows; `max_length` is taken for the sake of other models' callers."""
        return RecurrentCache(batch)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Cells as torch.nn does, token vectors normal with init_std."""
        reset_cells(self)
        for name, parameter in self.named_parameters():
            if name.endswith("tokens.weight"):
                parameter.normal_(0.0, self.config.init_std)

    def parallel_plan(self) -> ParallelPlan:
        """Vocabulary divided; cells whole: every step needs all of h, so divided cells would wait at each."""
        return ParallelPlan(
            rules=(
                Rule(r"blocks\.\d+\.tokens\.weight", "vocab"),
                Rule(r"blocks\.\d+\.cell\.(weight|bias)_(ih|hh)", "replicate"),
            ),
            tied=self.ties(),
            cuts=tuple(range(1, len(self.blocks))),
        )

    @classmethod
    def hf_format(cls) -> HFFormat:
        """No library has such a model; tensors are named as in torch.nn (`layers` an nn.RNN, LSTM or GRU)."""
        from fmlab.models.sequence_hf import RECURRENT

        return RECURRENT
