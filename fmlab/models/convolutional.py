"""A language model of causal convolutions: each position sees a fixed number of positions before it.

Gated, dilated layers after Dauphin et al. 2017 (arXiv:1612.08083) and WaveNet (van den Oord et al. 2016,
arXiv:1609.03499): the distance between taps doubles from layer to layer, and what is seen grows as 2^layers.

Shapes: b batch, l length, k taps of a kernel, c channels in, o channels out, d model width.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmlab.models.attention import document_runs
from fmlab.models.base import check_dropout, check_sizes
from fmlab.models.cross_entropy import linear_cross_entropy
from fmlab.models.functions import linear
from fmlab.models.gpt import CrossEntropy
from fmlab.models.hf import HFFormat
from fmlab.models.layers import Linear, add_residual
from fmlab.models.plan import ParallelPlan, Rule
from fmlab.models.sequence import SequenceLM
from fmlab.models.state import Block, State


@dataclass(frozen=True)
class CausalConvConfig:
    """Shape of a causal convolutional language model; layer i has taps 2^(i % dilation_cycle) apart."""

    vocab_size: int
    num_layers: int
    hidden_size: int
    kernel_size: int = 3
    dilation_cycle: int = 10
    dropout: float = 0.0
    norm_eps: float = 1e-5
    init_std: float = 0.06
    tie_embeddings: bool = True

    def __post_init__(self) -> None:
        check_sizes(self, "vocab_size", "num_layers", "hidden_size", "kernel_size", "dilation_cycle")
        check_dropout(self, "dropout")
        if self.kernel_size < 2:
            raise ValueError("kernel_size=1 sees no other position; it must be at least 2")

    def dilation(self, layer: int) -> int:
        """Distance between two taps of a layer, in positions."""
        return 1 << (layer % self.dilation_cycle)

    @property
    def receptive_field(self) -> int:
        """How many positions, itself included, an output depends on: 1 + (k - 1) * sum of the dilations."""
        return 1 + (self.kernel_size - 1) * sum(self.dilation(i) for i in range(self.num_layers))

    @property
    def max_positions(self) -> int:
        """There is no longest sequence; what lies further back than the receptive field is not seen."""
        return 1 << 30


PRESETS: dict[str, dict[str, Any]] = {
    # as many parameters as gpt2-tiny, 1.33 million; sees 255 positions
    "conv-tiny": dict(vocab_size=4096, num_layers=7, hidden_size=128)
}


class CausalConv(nn.Module):
    """y[t] = sum over taps j of W[:,:,j] x[t - dilation * (k - 1 - j)] + bias; before the start x is 0.

    The weight is [o,c,k], as nn.Conv1d's; the work is one matrix product over all taps put side by side.
    """

    def __init__(self, channels_in: int, channels_out: int, kernel_size: int, dilation: int):
        super().__init__()
        self.kernel_size, self.dilation = kernel_size, dilation
        self.weight = nn.Parameter(torch.empty(channels_out, channels_in, kernel_size))
        self.bias = nn.Parameter(torch.empty(channels_out))

    @property
    def reach(self) -> int:
        """Positions before the present one that are read."""
        return self.dilation * (self.kernel_size - 1)

    # region taps
    def forward(self, x_blc: Tensor, past_brc: Tensor, documents_bl: Tensor | None = None) -> Tensor:
        """x [b,l,c] after `past` [b,reach,c] -> [b,l,o]; with `documents` a tap in another one reads 0."""
        length = x_blc.shape[1]
        whole = torch.cat([past_brc, x_blc], 1)
        taps = []
        for j in range(self.kernel_size):
            start = j * self.dilation  # tap j of output t stands at position t + start of `whole`
            tap = whole[:, start : start + length]
            if documents_bl is not None:
                padded = F.pad(documents_bl, (self.reach, 0), value=-1)
                tap = tap * (padded[:, start : start + length] == documents_bl)[..., None]
            taps.append(tap)
        columns = torch.cat(taps, -1)  # [b,l,k*c]
        return linear(columns, self.weight.transpose(1, 2).flatten(1), self.bias)

    # endregion


class ConvCache:
    """The last inputs of each convolution: as many as it reads back, however long the text is."""

    def __init__(self, batch: int):
        self.batch, self.length = batch, 0
        self.past: dict[int, Tensor] = {}

    @property
    def by_layer(self) -> dict[int, Tensor]:
        return self.past


class ConvLayer(Block):
    """hidden -> hidden: norm, causal convolution to twice the width, one half gates the other, added."""

    reads = ("hidden", "attention_mask", "document_ids")
    writes = ("hidden",)

    def __init__(self, config: CausalConvConfig, index: int):
        super().__init__()
        d = config.hidden_size
        self.index, self.dropout = index, config.dropout
        self.norm = nn.LayerNorm(d, config.norm_eps)
        self.conv = CausalConv(d, 2 * d, config.kernel_size, config.dilation(index))
        self.output = Linear(d, d)

    def forward(self, state: State) -> State:
        hidden = state.hidden
        x = self.norm(hidden)
        real, documents = state.get("attention_mask"), state.get("document_ids")
        if real is not None:  # padding reads as what lies before the start: 0
            x = x * real[..., None].to(x.dtype)
        past = x.new_zeros(len(x), self.conv.reach, x.shape[-1])
        if state.cache is not None:
            past = state.cache.past.get(self.index, past)
            state.cache.past[self.index] = torch.cat([past, x], 1)[:, -self.conv.reach :]
        runs = None if documents is None else document_runs(documents)
        value, gate = self.conv(x, past, runs).chunk(2, -1)
        update = self.output.product(value * torch.sigmoid(gate))
        dropout = self.dropout if self.training else 0.0
        return state.updated(hidden=add_residual(hidden, update, self.output.bias, dropout))


class CausalConvLM(SequenceLM):
    """A convolutional language model; see SequenceLM."""

    CONFIG = CausalConvConfig
    PRESETS = PRESETS

    def __init__(self, config: CausalConvConfig, cross_entropy: CrossEntropy = linear_cross_entropy):
        layers = [ConvLayer(config, index) for index in range(config.num_layers)]
        super().__init__(config, layers, nn.LayerNorm(config.hidden_size, config.norm_eps), cross_entropy)

    def new_cache(self, batch: int, max_length: int | None = None) -> ConvCache:
        """An empty cache for `batch` rows; `max_length` is taken for the sake of other models' callers."""
        return ConvCache(batch)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Normal with 1/sqrt(inputs) for convolutions, init_std for vectors; outputs by 1/sqrt(layers)."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif "norm" in name:
                parameter.fill_(1.0)
            elif name.endswith("tokens.weight"):
                parameter.normal_(0.0, self.config.init_std)
            else:
                inputs = parameter[0].numel()
                depth = self.config.num_layers if name.endswith("output.weight") else 1
                parameter.normal_(0.0, (inputs * depth) ** -0.5)

    def parallel_plan(self) -> ParallelPlan:
        """Channels out divided in the convolution, channels in in the matrix after it."""
        return ParallelPlan(
            rules=(
                Rule(r"blocks\.\d+\.tokens\.weight", "vocab"),
                Rule(r".*norm\.(weight|bias)", "replicate"),
                Rule(r".*\.conv\.(weight|bias)", "column", parts=2),
                Rule(r".*\.output\.weight", "row"),
                Rule(r".*\.output\.bias", "replicate"),
            ),
            tied=self.ties(),
            cuts=tuple(range(1, len(self.blocks))),
        )

    @classmethod
    def hf_format(cls) -> HFFormat:
        """No library has such a model; tensors are named as in a model of torch.nn's layers."""
        from fmlab.models.sequence_hf import CONVOLUTIONAL

        return CONVOLUTIONAL
