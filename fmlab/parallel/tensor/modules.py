"""The layers that take the place of Linear and Embedding on a rank that holds a part of their matrix."""

import torch.nn.functional as F
from torch import Tensor, nn

from fmlab.models.layers import Embedding, Linear
from fmlab.parallel.mesh import Axis
from fmlab.parallel.tensor.functions import gather_forward_split_backward, sum_forward_copy_backward
from fmlab.parallel.tensor.linears import column_linears, row_linear
from fmlab.parallel.tensor.sequence import Positions


class _Divided(Linear):
    """A part of a linear layer; `positions` is set where the stream around it is cut along the sequence."""

    def __init__(self, whole: nn.Linear, axis: Axis, positions: Positions | None) -> None:
        nn.Module.__init__(self)
        self.weight, self.bias = whole.weight, whole.bias
        self.out_features, self.in_features = self.weight.shape
        self.axis, self.positions = axis, positions
        self.train(whole.training)

    @property
    def length(self) -> int | None:
        return None if self.positions is None else self.positions.length


# region column
class ColumnLinear(_Divided):
    """Some output features of all inputs: [...,i] -> [...,o/t]."""

    def forward(self, x: Tensor) -> Tensor:
        return column_linears(x, [(self.weight, self.bias)], self.axis, self.length)[0]

    def product(self, x: Tensor) -> Tensor:
        return column_linears(x, [(self.weight, None)], self.axis, self.length)[0]

    def beside(self, other: Linear, x: Tensor) -> tuple[Tensor, Tensor]:
        """Both layers' outputs; the gradient of x is summed over ranks once."""
        pairs = [(self.weight, self.bias), (other.weight, other.bias)]
        first, second = column_linears(x, pairs, self.axis, self.length)
        return first, second


# endregion


# region row
class RowLinear(_Divided):
    """All output features of some inputs, summed over ranks: [...,i/t] -> [...,o]. The bias is added once."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.product(x)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def product(self, x: Tensor) -> Tensor:
        return row_linear(x, self.weight, self.axis, self.length)


# endregion


class VocabLinear(_Divided):
    """An output layer whose rank computes some logits and gathers all, [...,d] -> [...,v].

    For losses that want the logits; vocab_parallel_cross_entropy needs less memory and fewer messages.
    """

    def __init__(self, whole: nn.Linear, axis: Axis, positions: Positions | None, vocabulary: int) -> None:
        super().__init__(whole, axis, positions)
        self.vocabulary = vocabulary

    def forward(self, x: Tensor) -> Tensor:
        part = column_linears(x, [(self.weight, self.bias)], self.axis, self.length)[0]
        return gather_forward_split_backward(part, self.axis, part.dim() - 1, self.vocabulary)


class VocabEmbedding(Embedding):
    """The rows start..stop of a table; a rank gives zeros for ids of others, and the sum is the look-up."""

    def __init__(self, whole: nn.Embedding, axis: Axis, vocabulary: int) -> None:
        nn.Module.__init__(self)
        self.weight = whole.weight
        self.axis, self.num_embeddings = axis, vocabulary
        self.embedding_dim = whole.embedding_dim
        self.start = axis.rank * len(whole.weight)
        self.max_norm, self.norm_type = None, 2.0
        self.scale_grad_by_freq, self.sparse = False, False
        self.padding_idx = whole.padding_idx
        #: The row that learns nothing from being looked up, if it is here.
        self.padding_here: int | None = None
        if self.padding_idx is not None and 0 <= self.padding_idx - self.start < len(self.weight):
            self.padding_here = self.padding_idx - self.start
        self.train(whole.training)

    # region vocab
    def forward(self, ids: Tensor) -> Tensor:
        self._check(ids)
        here = ids - self.start
        mine = (here >= 0) & (here < len(self.weight))
        rows = F.embedding(here.where(mine, 0), self.weight, self.padding_here)
        return sum_forward_copy_backward(rows.masked_fill(~mine[..., None], 0), self.axis)

    # endregion

    def lend(self, ids: Tensor, lent: Tensor | None = None) -> tuple[Tensor, Tensor]:
        raise AssertionError("only a whole table is lent; see can_lend")

    def _check(self, ids: Tensor) -> None:
        if ids.device.type != "cpu" or not ids.numel():
            return
        low, high = (int(end) for end in ids.aminmax())
        if low < 0 or high >= self.num_embeddings:
            raise ValueError(
                f"an id is outside the embedding of {self.num_embeddings} rows: got {low}..{high}, legal "
                f"is 0..{self.num_embeddings - 1}; check that the tokenizer and the model have the same "
                "vocabulary"
            )
