"""A small classifier that reads drawn shapes: how often a text-to-image model draws what it was asked for.

It is trained on real pictures of one object, with noise and blur so that it also knows imperfect ones, and
names one of the 24 objects. Its own accuracy on real pictures it has not seen is the upper end of a
measurement, that with shuffled captions the lower one.

Shapes: b images, s side of an image in pixels, k classes.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmlab.data.batch import Batch
from fmlab.data.shapes import ShapesDataset
from fmlab.data.shapes_scene import THINGS
from fmlab.objectives import Classification
from fmlab.train.adapt import fine_tune

CLASSES = tuple(str(thing) for thing in THINGS)
_CLASS = {name: number for number, name in enumerate(CLASSES)}


class ShapeReader(nn.Module):
    """Three convolutions of 5x5, two of them half the size; the largest value of each channel; a matrix."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        pairs = pairwise((3, width, 2 * width, 4 * width))
        self.convolutions = nn.ModuleList(
            [nn.Conv2d(i, o, 5, stride, padding=2) for (i, o), stride in zip(pairs, (1, 2, 2), strict=True)]
        )
        self.output = nn.Linear(4 * width, len(CLASSES))

    def forward(self, pixel_values: Tensor, class_labels: Tensor | None = None) -> dict[str, Tensor]:
        """ "class_logits" [b,k], and with labels [b] "class_loss_sum" []."""
        hidden = pixel_values
        for convolution in self.convolutions:
            hidden = F.relu(convolution(hidden))
        logits_bk = self.output(hidden.amax((2, 3)))
        if class_labels is None:
            return {"class_logits": logits_bk}
        loss = F.cross_entropy(logits_bk, class_labels, reduction="sum")
        return {"class_logits": logits_bk, "class_loss_sum": loss}

    @torch.no_grad()
    def read(self, images: Tensor) -> list[str]:
        """The most likely caption of each image [b,3,s,s] in [-1, 1]: there is always one."""
        return [CLASSES[i] for i in self(images)["class_logits"].argmax(1).tolist()]

    def accuracy(self, images: Tensor, captions: Sequence[str]) -> float:
        """The share of images that are read as their caption says. Raises ValueError for another number of
        captions, and for captions that are not of one object."""
        if len(images) != len(captions) or not len(captions):
            raise ValueError(f"as many captions as images are needed, got {len(captions)} and {len(images)}")
        if unknown := sorted(set(captions) - set(CLASSES)):
            raise ValueError(f"{unknown[0]!r} is not a caption of one object, such as {CLASSES[0]!r}")
        right = [read == said for read, said in zip(self.read(images), captions, strict=True)]
        return sum(right) / len(right)


def train_reader(steps: int = 400, size: int = 16, seed: int = 0) -> ShapeReader:
    """A reader for images of that size, trained in seconds; the same for the same seed and machine."""
    torch.manual_seed(seed)
    reader = ShapeReader()
    fine_tune(reader, _Pictures(size, seed), Classification(), steps, lr=5e-3)
    return reader.requires_grad_(False)


class _Pictures:
    """Batches of noisy, blurred pictures of one object, and its class."""

    world_size, rows = 1, 64

    def __init__(self, size: int, seed: int) -> None:
        self.data = ShapesDataset(4000, seed=seed + 7, size=size, objects=(1,))
        self.labels = torch.tensor([_CLASS[caption] for caption in self.data.captions])

    def batch(self, step: int) -> Batch:
        random = torch.Generator().manual_seed(step)
        chosen = torch.randint(len(self.data), (self.rows,), generator=random)
        images = self.data.images(chosen.tolist())
        if step % 4 == 3:
            images = F.avg_pool2d(images, 3, stride=1, padding=1)
        noise = 0.2 * torch.randn(images.shape, generator=random)
        return {"pixel_values": images + noise, "class_labels": self.labels[chosen]}
