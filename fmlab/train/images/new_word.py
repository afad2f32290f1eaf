"""A trained model is taught a word for a shape it has never drawn, in four ways, and judged: chapter 3.6.

The shape is a lying bar, in red, green and blue; yellow bars are only asked for.

Shapes: s side of an image in pixels.
"""

import time
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fmlab.data.captioned import CaptionedImages
from fmlab.data.shapes import ShapesDataset
from fmlab.data.shapes_scene import COLOURS
from fmlab.train.images.config import ImageConfig
from fmlab.train.images.reader import CLASSES, ShapeReader
from fmlab.train.loop import train

SIZE, LONG, THICK = 16, 6, 1
WORD, UNSEEN = "x", "yellow"
STEPS, BATCH = 300, 16
WAYS: dict[str, dict[str, Any]] = {
    "all weights": {"lr": 1e-3},
    "all weights, old pictures too": {"lr": 1e-3},
    "LoRA, rank 4": {"lora_rank": 4},
    "the word alone": {"learn_word": WORD},
}
ASKED = [f"a {colour} {WORD}" for colour in COLOURS]


def bars(count: int, seed: int, mixed: bool = False) -> CaptionedImages:
    """Red, green and blue bars, called "a red x".

    mixed: every other picture is an old one with its own caption (prior preservation: Ruiz et al. 2022,
    arXiv:2208.12242, section 3.2, with real pictures in place of drawn ones).
    """
    random = np.random.Generator(np.random.PCG64(seed))
    names = [str(name) for name in random.choice([name for name in COLOURS if name != UNSEEN], count)]
    places = random.integers((LONG, THICK), (SIZE - LONG, SIZE - THICK), (count, 2)).tolist()
    images = torch.full((count, 3, SIZE, SIZE), -1.0)
    for image, name, (x, y) in zip(images, names, places, strict=True):
        image[:, _bar(x, y)] = torch.tensor(COLOURS[name]).float()[:, None]
    captions = [f"a {name} {WORD}" for name in names]
    if mixed:
        old = ShapesDataset(count, seed, size=SIZE, objects=(1,))
        images, captions = torch.cat([images, old.images()]), captions + old.captions
    fingerprint = zlib.crc32("\n".join(captions).encode(), seed)
    return CaptionedImages("bars", SIZE, captions, lambda chosen: images[list(chosen)], fingerprint)


def _bar(x: int, y: int) -> Tensor:
    """Which pixels [s,s] belong to a bar with its middle at (x, y)."""
    place = torch.arange(SIZE)
    dy, dx = torch.meshgrid((place - y).abs(), (place - x).abs(), indexing="ij")
    return (dx <= LONG) & (dy <= THICK)


def shows_bar(image: Tensor, colour: str) -> bool:
    """Whether the pixels of that colour in [3,s,s] overlap a bar in their middle by more than 0.6 of all
    that either covers. Of the old shapes none does."""
    signs = torch.tensor(COLOURS[colour]) > 0
    mine = ((image > 0) == signs[:, None, None]).all(0)
    if not mine.any():
        return False
    ys, xs = mine.nonzero(as_tuple=True)
    template = _bar(int(xs.min() + xs.max()) // 2, int(ys.min() + ys.max()) // 2)
    return float((mine & template).sum() / (mine | template).sum()) > 0.6


def share_of_bars(images: Tensor, captions: Sequence[str]) -> float:
    """The share of images that show a bar of the colour that their caption names second."""
    return _share(shows_bar(image, text.split()[1]) for image, text in zip(images, captions, strict=True))


def teach(
    folder: Path, reader: ShapeReader, guidance: float, steps: int
) -> tuple[dict[str, Any], list[Tensor]]:
    """For each way: how often the new word and the old ones are drawn as asked, and pictures [8,3,s,s]."""
    found, drawn = {}, []
    for name, settings in WAYS.items():
        config = ImageConfig(
            init=str(folder), steps=STEPS, batch_size=BATCH, ema=0.0, eval_every=0, **settings
        )
        start = time.perf_counter()
        images = bars(512, 11, mixed="too" in name), bars(32, 12)
        model: Any = train(config, images=images).model
        seconds = time.perf_counter() - start
        new = [prompt for prompt in ASKED if UNSEEN not in prompt] * 12
        unseen, old = [f"a {UNSEEN} {WORD}"] * 24, list(CLASSES) * 2
        groups = [2 * model.generate(p, steps, guidance, seed=2000) - 1 for p in (new, unseen, old)]
        found[name] = {
            "new word": share_of_bars(groups[0], new),
            "new word, unseen colour": share_of_bars(groups[1], unseen),
            "old words": reader.accuracy(groups[2], old),
            "seconds": seconds,
        }
        shown = [*ASKED, "a red circle", "a small blue square", "a green triangle"]
        drawn.append(model.generate(shown, steps, guidance, seed=3))
        print(name, found[name], flush=True)
    return found, drawn


def _share(right: Iterable[bool]) -> float:
    kept = list(right)
    return sum(kept) / len(kept)
