"""Images of coloured shapes with captions, made from a seed: data on which multimodal models are measured.

Combinations of two objects and a relation are divided once and for all: 43 of 288, chosen by a hash of the
scene without its sizes, belong to the held-out split and are never seen in training, though each of their
objects is. See shapes_scene for what a scene is and how it is read back from pixels.

Shapes: b images, s side of an image in pixels, l tokens of the longest caption.
"""

import zlib
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fmlab.data.batch import IGNORE, Batch
from fmlab.data.order import Resumable
from fmlab.data.sampler import check_batch_size
from fmlab.data.shapes_scene import (
    COLOURS,
    OPPOSITE,
    RELATIONS,
    SHAPES,
    SMALLEST,
    THINGS,
    Scene,
    agreement,
    caption_of,
    draw,
    parse_caption,
    read_scene,
)

__all__ = [
    "Scene",
    "ShapesDataset",
    "ShapesSampler",
    "ShapesTokenizer",
    "agreement",
    "caption_of",
    "parse_caption",
    "read_scene",
]

SPLITS = ("train", "held-out")


def held_out(scene: Scene) -> bool:
    """Whether a scene is kept from training. Only scenes of two objects are; their sizes do not matter."""
    if scene.second is None:
        return False
    plain = Scene(replace(scene.first, small=False), scene.relation, replace(scene.second, small=False))
    return zlib.crc32(plain.caption().encode()) % 8 == 0


def scenes(split: str = "train", objects: Sequence[int] = (1, 2)) -> list[Scene]:
    """All scenes of a split with one of these numbers of objects, in a fixed order."""
    if split not in SPLITS:
        raise ValueError(f"split={split!r}: legal are {', '.join(SPLITS)}")
    if not objects or not set(objects) <= {1, 2}:
        raise ValueError(f"objects={tuple(objects)}: a scene has 1 or 2 objects; legal: (1,), (2,), (1, 2)")
    alone = [Scene(thing) for thing in THINGS]
    pairs = [Scene(a, relation, b) for a, relation, b in product(THINGS, RELATIONS, THINGS)]
    found = [*(alone if 1 in objects else ()), *(pairs if 2 in objects else ())]
    found = [scene for scene in found if held_out(scene) == (split == "held-out")]
    if not found:
        raise ValueError("no scene of one object is held out; take objects=(2,) or the split 'train'")
    return found


class ShapesDataset:
    """`count` images with captions; number i is the same in every run and on every machine.

    Args:
        count: how many. seed: of the choice of scenes, places and wordings.
        split: "train" or "held-out".
        size: s, the side of an image in pixels, at least 16.
        objects: (1,), (2,) or (1, 2): with both, every other scene has one object.
        both_orders: half the captions of two objects begin with the right or the lower one ("... right of
            ..."). Without, a scene has one caption only, which is easier to learn to write.
    """

    def __init__(
        self,
        count: int = 10_000,
        seed: int = 0,
        split: str = "train",
        size: int = 32,
        objects: Sequence[int] = (1, 2),
        both_orders: bool = True,
    ) -> None:
        if count < 1:
            raise ValueError(f"count must be at least 1, got {count}")
        if size < SMALLEST or size % 2:
            raise ValueError(f"size={size}: shapes can be told apart from {SMALLEST} pixels, even numbers")
        random = np.random.Generator(np.random.PCG64([seed, SPLITS.index(split) if split in SPLITS else 0]))
        kinds = [scenes(split, (n,)) for n in sorted(set(objects)) if split == "train" or n == 2] or [
            scenes(split, objects)
        ]
        kind = random.integers(len(kinds), size=count)
        place = random.random(count)
        self.scenes = [kinds[k][int(p * len(kinds[k]))] for k, p in zip(kind, place, strict=True)]
        swapped = (random.random(count) < 0.5) & both_orders
        self.captions = [scene.caption(bool(s)) for scene, s in zip(self.scenes, swapped, strict=True)]
        self.size, self.seed, self.split = size, seed, split
        self._centres = _place(self.scenes, random.random((count, 2, 2)), size)

    def __len__(self) -> int:
        return len(self.scenes)

    def __getitem__(self, index: int) -> tuple[Tensor, str]:
        """One image [3,s,s] in [-1, 1], and its caption."""
        return self.images([index])[0], self.captions[index]

    def images(self, indices: Sequence[int] | slice = slice(None)) -> Tensor:
        """Images [b,3,s,s] in [-1, 1]."""
        chosen = range(len(self))[indices] if isinstance(indices, slice) else indices
        return draw([self.scenes[i] for i in chosen], self._centres[list(chosen)], self.size)

    @property
    def card(self) -> str:
        """Where the data comes from, in Markdown."""
        return resources.files("fmlab.data").joinpath("cards/shapes.md").read_text("utf-8")


def _place(found: list[Scene], random: NDArray[np.float64], size: int) -> NDArray[np.int64]:
    """Middles (x, y) of the objects, [b,2,2], from numbers in [0, 1).

    Two objects lie in different halves of the image, a pixel or more apart, and further apart along their
    relation than across it.
    """
    radius = np.array([[t.radius(size) if t else 0 for t in (s.first, s.second)] for s in found])
    free = _between(radius, size - 1 - radius)
    centres = free(random[..., 0])[..., None].repeat(2, -1)
    centres[..., 1] = free(random[..., 1])
    pair = np.array([scene.second is not None for scene in found])
    along = np.stack(
        [
            _between(radius[:, 0], size // 2 - 2 - radius[:, 0])(random[:, 0, 0]),
            _between(size // 2 + radius[:, 1], size - 1 - radius[:, 1])(random[:, 1, 0]),
        ],
        1,
    )
    most = (along[:, 1] - along[:, 0]) // 2
    first = free(random[..., 1])[:, 0]
    second = first + np.floor((2 * random[:, 1, 1] - 1) * most).astype(np.int64)
    second = second.clip(radius[:, 1], size - 1 - radius[:, 1])
    across = np.stack([first, second], 1)
    beside = np.array([scene.relation == "left of" for scene in found])
    x, y = np.where(beside[:, None], along, across), np.where(beside[:, None], across, along)
    centres[pair] = np.stack([x, y], -1)[pair]
    return centres


def _between(low: Any, high: Any) -> Any:
    """Whole numbers from low to high, both included, for numbers in [0, 1)."""
    return lambda share: low + np.floor(share * (high - low + 1)).astype(np.int64)


class ShapesTokenizer:
    """A token for each word of the captions: 19 in all, small enough for models that train in seconds.

    Attributes: pad, bos, unk, eos, image, vocab_size. `eos` is not 2, which CLIP reads as "the largest id";
    `image` is the place of a patch in a vision-language decoder's prompt.
    """

    pad, bos, unk, eos, image = 0, 1, 2, 3, 4
    WORDS = ("a", "small", *COLOURS, *SHAPES, "left", "right", "of", "above", "below")
    assert {word for name in (*RELATIONS, *OPPOSITE) for word in name.split()} <= set(WORDS)
    #: Tokens of the longest caption with its first and last token.
    MAX_LENGTH = 12

    def __init__(self) -> None:
        self.pieces = ["<pad>", "<start>", "<unknown>", "<end>", "<image>", *self.WORDS]
        self._ids = {piece: i for i, piece in enumerate(self.pieces)}

    @property
    def vocab_size(self) -> int:
        return len(self.pieces)

    def encode(self, text: str) -> list[int]:
        """One id for each word, without first and last token."""
        return [self._ids.get(word, self.unk) for word in text.split()]

    def decode(self, ids: Sequence[int] | Tensor) -> str:
        """The words up to the first end token; other special tokens are left out."""
        words = []
        for i in map(int, ids):
            if i == self.eos:
                break
            if i > self.image:
                words.append(self.pieces[i] if i < self.vocab_size else "<unknown>")
        return " ".join(words)

    def batch(self, captions: Sequence[str], length: int = MAX_LENGTH) -> Batch:
        """{"input_ids", "attention_mask"} [b,length]: start, words, end, padding.

        Raises ValueError for a caption that does not fit.
        """
        ids = torch.full((len(captions), length), self.pad)
        for row, caption in zip(ids, captions, strict=True):
            tokens = [self.bos, *self.encode(caption), self.eos]
            if len(tokens) > length:
                raise ValueError(f"a caption of {len(tokens)} tokens does not fit into {length}: {caption!r}")
            row[: len(tokens)] = torch.tensor(tokens)
        return {"input_ids": ids, "attention_mask": (ids != self.pad).long()}

    def prompts(self, count: int, image_tokens: int) -> list[list[int]]:
        """What a vision-language decoder continues with a caption: an image's places, and the start token."""
        return [[self.image] * image_tokens + [self.bos]] * count

    def caption_batch(self, captions: Sequence[str], image_tokens: int) -> Batch:
        """{"input_ids", "labels"} [b,image_tokens+l]: an image's places, start, words, end, padding.

        The labels are shifted, and -100 but for the words of the caption and its end: nothing is to be learnt
        from the image's places.
        """
        ids_bl = self.batch(captions)["input_ids"]
        places_bn = torch.full((len(captions), image_tokens), self.image)
        next_bl = torch.cat([ids_bl[:, 1:], ids_bl.new_full((len(captions), 1), self.pad)], 1)
        labels_bl = next_bl.masked_fill(next_bl == self.pad, IGNORE)
        return {
            "input_ids": torch.cat([places_bn, ids_bl], 1),
            "labels": torch.cat([torch.full_like(places_bn, IGNORE), labels_bl], 1),
        }


class ShapesSampler(Resumable):
    """Batches of this rank as a function of the step: {"pixel_values" [b,3,s,s], "input_ids", ...}.

    With `image_tokens` they are for a vision-language decoder (see ShapesTokenizer.caption_batch), otherwise
    for CLIP: {"pixel_values", "input_ids", "attention_mask"}. An epoch is a permutation of the dataset drawn
    from (seed, epoch); what is left over at its end is dropped. Rank r of n takes the r-th n-th of a batch.
    """

    def __init__(
        self,
        dataset: ShapesDataset,
        batch_size: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        tokenizer: ShapesTokenizer | None = None,
        image_tokens: int | None = None,
    ) -> None:
        """Raises ValueError when batch_size is not divisible by world_size or exceeds the dataset."""
        check_batch_size(batch_size, world_size)
        if batch_size > len(dataset):
            raise ValueError(f"a batch of {batch_size} is more than the {len(dataset)} images there are")
        self.dataset, self.batch_size, self.seed = dataset, batch_size, seed
        self.rank, self.world_size, self.tokenizer = rank, world_size, tokenizer or ShapesTokenizer()
        self.image_tokens = image_tokens
        self.windows_per_epoch = len(dataset)
        self.step = 0

    def batch(self, step: int) -> Batch:
        """This rank's part of the batch of step `step`, in any order of calls."""
        epoch, place = divmod(step, len(self.dataset) // self.batch_size)
        order = np.random.Generator(np.random.PCG64([self.seed, epoch])).permutation(len(self.dataset))
        share = self.batch_size // self.world_size
        first = place * self.batch_size + self.rank * share
        chosen = order[first : first + share].tolist()
        captions = [self.dataset.captions[i] for i in chosen]
        if self.image_tokens is None:
            rows = self.tokenizer.batch(captions)
        else:
            rows = self.tokenizer.caption_batch(captions, self.image_tokens)
        return {"pixel_values": self.dataset.images(chosen), **rows}

    def _identity(self) -> dict[str, Any]:
        data = self.dataset
        return {
            "seed": self.seed,
            "batch_size": self.batch_size,
            "shapes": [data.size, zlib.crc32("\n".join(data.captions).encode())],
        }
