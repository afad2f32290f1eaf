"""What the pre-flight watches: fmlab preflight my_model.preflight:program --chip trn2.

Give it your real data loader: what it finds first is in the data (lengths that change, a last batch that is
smaller, values that the host reads).
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from .model import build

ROWS, LENGTH = 8, 128


def batches() -> Iterator[dict[str, Tensor]]:
    """Three batches of one shape."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        tokens = torch.randint(2048, (ROWS, LENGTH + 1), generator=generator)
        yield {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """A mean by a number that the host knows; reading a count from the device would stop it."""
    summed: Tensor = model(**batch)["loss_sum"]
    return summed / batch["labels"].numel()


def program() -> tuple[nn.Module, Iterator[dict[str, Tensor]], object]:
    return build("tiny"), batches(), loss
