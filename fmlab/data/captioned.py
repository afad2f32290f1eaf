"""Images with captions for text-to-image models: the shapes, or a folder of your own; and batches of them.

Shapes: b images, s side of an image in pixels, l positions of the text encoder.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from fmlab.data.batch import Batch
from fmlab.data.holding_out import held_out
from fmlab.data.image_folder import read_image_folder
from fmlab.data.order import Window, WindowSampler
from fmlab.data.shapes import ShapesDataset

#: Sets that are drawn: name -> numbers of objects in a scene.
SHAPE_SETS = {"shapes": (1, 2), "shapes-one": (1,)}
_DRAWN = 20_000  # images of an epoch
_VALIDATION = 512


@dataclass(frozen=True)
class CaptionedImages:
    """Images [3,s,s] in [-1, 1] that are made or read when asked for, and a caption of each.

    images: indices -> [b,3,s,s]. fingerprint: changes with the images; a resumed run compares it.
    """

    name: str
    size: int
    captions: Sequence[str]
    images: Callable[[Sequence[int]], Tensor]
    fingerprint: int

    def __len__(self) -> int:
        return len(self.captions)

    def __repr__(self) -> str:
        return f"CaptionedImages({self.name!r}, {len(self):,} images of {self.size}x{self.size})"


def load_captioned(
    source: str | Path, size: int, validation: float = 0.05, captions: bool = True
) -> tuple[CaptionedImages, CaptionedImages]:
    """(for training, for validation): "shapes", "shapes-one" (one object each), or a folder of images.

    size: side of an image in pixels. validation: share of a folder that is kept, chosen by the pixels alone;
    of shapes there are as many as one likes, and 512 others are drawn. captions: whether a folder must have
    some; see fmlab.data.image_folder.

    Raises ValueError that says what is legal, and what is wrong with which file.
    """
    if str(source) in SHAPE_SETS:
        objects = SHAPE_SETS[str(source)]
        return (
            _drawn(str(source), ShapesDataset(_DRAWN, 0, size=size, objects=objects, both_orders=False)),
            _drawn(str(source), ShapesDataset(_VALIDATION, 1, size=size, objects=objects, both_orders=False)),
        )
    if not Path(source).is_dir():
        raise ValueError(
            f"{str(source)!r} is no set of captioned images: legal are {', '.join(SHAPE_SETS)}, or the path "
            "of a folder of images"
        )
    pixels, texts = read_image_folder(source, size, captions)
    out = held_out([f"{zlib.crc32(image.numpy().tobytes()):08x}" for image in pixels], validation)
    chosen = [[i for i, kept in enumerate(out) if kept == side] for side in (False, True)]
    if not all(chosen):
        raise ValueError(
            f"{source} has {len(texts)} images, of which {len(chosen[1])} fall to validation: give more "
            "images, or another share (validation)"
        )
    train, kept = (_read(str(source), pixels[side], [texts[i] for i in side]) for side in chosen)
    return train, kept


def _drawn(name: str, data: ShapesDataset) -> CaptionedImages:
    fingerprint = zlib.crc32("\n".join(data.captions).encode())
    return CaptionedImages(name, data.size, data.captions, data.images, fingerprint)


def _read(name: str, pixels: Tensor, captions: list[str]) -> CaptionedImages:
    """From bytes [n,3,s,s]."""

    def images(indices: Sequence[int]) -> Tensor:
        return pixels[list(indices)].float() / 127.5 - 1

    fingerprint = zlib.crc32("\n".join(captions).encode(), zlib.crc32(pixels.numpy().tobytes()))
    return CaptionedImages(name, pixels.shape[-1], captions, images, fingerprint)


class PromptTokenizer(Protocol):
    """What turns captions into rows of ids, such as CLIP's tokenizer."""

    def batch(self, prompts: Sequence[str]) -> Tensor:
        """int64 [b,l]. Raises ValueError for a caption that does not fit."""


class CaptionedSampler(WindowSampler):
    """Batches of this rank: {"pixel_values" [b,3,s,s]} and, with a tokenizer, "input_ids" [b,l].

    An epoch is a permutation of the images drawn from (seed, epoch); see WindowSampler. An evaluation takes
    whole batches only. Raises ValueError for fewer images than a batch has, and captions that do not fit.
    """

    def __init__(
        self,
        data: CaptionedImages,
        tokenizer: PromptTokenizer | None,
        batch_size: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if len(data) < batch_size:
            raise ValueError(f"{data.name}: {len(data)} images are too few for a batch of {batch_size}")
        whole = len(data) // batch_size * batch_size
        super().__init__(len(data), whole, batch_size, seed, rank, world_size)
        self.data = data
        self._ids: Tensor | None = None
        if tokenizer is not None:  # all at once: a caption that does not fit is refused before the first step
            distinct = {caption: i for i, caption in enumerate(dict.fromkeys(data.captions))}
            rows = tokenizer.batch(list(distinct))
            self._ids = rows[torch.tensor([distinct[caption] for caption in data.captions])]

    def _rows(self, windows: Sequence[Window]) -> Batch:
        chosen = [window.number for window in windows]
        batch = {"pixel_values": self.data.images(chosen)}
        return batch if self._ids is None else batch | {"input_ids": self._ids[chosen]}

    def _identity(self) -> dict[str, Any]:
        return {**super()._identity(), "images": [self.data.size, self.data.fingerprint]}
