"""Random data to compare a layout with one device on, when the caller has none.

Shapes: b rows, l length.
"""

from typing import Any

import torch
from torch import Tensor, nn

from fmlab.models.families import longest_row
from fmlab.parallel.layout import Batch

LENGTH = 32  # tokens of a row, or as many as the model can take


def random_batches(model: nn.Module, rows: int, steps: int, seed: int) -> list[Batch]:
    """A global batch for each step: random tokens with labels and, for a model whose heads learn from them,
    random labels of rows.

    Each row has targets in a longer part than the one before, and only two rows of three have labels of their
    own, so that ranks differ. Raises ValueError for a model that does not read tokens.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "vocab_size"):
        raise ValueError(
            f"{type(model).__name__} has no config with vocab_size and max_positions to make random tokens "
            "from; pass batches=[...], one for each step"
        )
    generator = torch.Generator().manual_seed(seed)
    length = min(longest_row(config) or LENGTH, LENGTH)
    learns_from = getattr(config, "learns_from", ("labels",))
    classes = {"sentence_labels": 2, "class_labels": getattr(config, "num_classes", 2)}
    batches = []
    for _ in range(steps):
        tokens = torch.randint(config.vocab_size, (rows, length + 1), generator=generator)
        batch = {"input_ids": tokens[:, :-1].contiguous()}
        if "labels" in learns_from:
            batch["labels"] = _uneven(tokens[:, 1:].clone())
        for name in (name for name in classes if name in learns_from):  # in the same order on every rank
            labels_b = torch.randint(classes[name], (rows,), generator=generator)
            batch[name] = labels_b.where(torch.arange(rows) % 3 != 1, -100)
        batches.append(batch)
    return batches


def _uneven(labels_bl: Tensor) -> Tensor:
    rows, length = labels_bl.shape
    for row in range(rows):
        labels_bl[row, max(1, length * (row + 1) // rows) :] = -100
    return labels_bl
