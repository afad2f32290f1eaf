"""What a batch is: named tensors whose first dim is the sequences."""

from torch import Tensor

Batch = dict[str, Tensor]
IGNORE = -100  # the label of a position without a target, as in torch's cross_entropy
