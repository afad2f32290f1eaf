"""Images with a class each: scikit-learn's digits, and CIFAR-10 through `datasets`.

Shapes: n images, c channels, h height, w width.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fmlab.data.card import card
from fmlab.data.holding_out import held_out
from fmlab.data.public import load_table
from fmlab.extras import require


@dataclass(frozen=True)
class LabelledImages:
    """images: float32 [n,c,h,w] in [-1, 1]; labels: int64 [n]; classes: their names."""

    name: str
    images: Tensor
    labels: Tensor
    classes: list[str]
    card: str

    def __len__(self) -> int:
        return len(self.images)

    def split(self, validation: float = 0.2) -> tuple["LabelledImages", "LabelledImages"]:
        """Two parts, for training and for validation. Equal images are on the same side; the choice depends
        on the images alone.

        Raises ValueError when `validation` is not between 0 and 1 or there are too few images.
        """
        keys = [hashlib.sha256(image.numpy().tobytes()).hexdigest() for image in self.images]
        out = torch.tensor(held_out(keys, validation))
        names = (self.name, f"{self.name} (validation)")
        train, held = (
            LabelledImages(name, self.images[side], self.labels[side], self.classes, self.card)
            for name, side in zip(names, (~out, out), strict=True)
        )
        return train, held

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.images.shape[1:]))
        return f"LabelledImages({self.name!r}, {len(self):,} images of {shape}, {len(self.classes)} classes)"


def load_digits() -> LabelledImages:
    """1,797 handwritten digits of 8 x 8 pixels, grey.

    Raises ImportError when scikit-learn is not installed (extra "data").
    """
    bunch = require("data", "sklearn.datasets").load_digits()
    images = torch.from_numpy(bunch.images).float()[:, None] / 8 - 1  # from 0..16
    labels = torch.from_numpy(bunch.target.astype(np.int64))
    return LabelledImages("digits", images, labels, [str(i) for i in range(10)], card("digits"))


def load_cifar10(split: str = "train", folder: str | None = None) -> LabelledImages:
    """CIFAR-10: 50,000 ("train") or 10,000 ("test") colour photographs of 32 x 32 pixels in ten classes.

    folder: a local copy (parquet files as on the hub) instead of the hub
    Raises ImportError without `datasets` (extra "hf"), ConnectionError when the hub cannot be reached.
    """
    table = load_table("cifar10", split, folder)
    pictures, label = (_column(table, names) for names in (("img", "image"), ("label",)))
    pixels = np.stack([np.asarray(picture.convert("RGB")) for picture in table[pictures]])
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1
    named = getattr(table.features[label], "names", None)
    labels = torch.tensor(table[label])
    classes = named or [str(i) for i in range(int(labels.max()) + 1)]
    return LabelledImages("cifar10", images, labels, list(classes), card("cifar10"))


def _column(table: Any, names: tuple[str, ...]) -> str:
    found = [name for name in names if name in table.column_names]
    if not found:
        raise ValueError(f"the set has no column {names[0]!r}; it has: {', '.join(table.column_names)}")
    return found[0]
