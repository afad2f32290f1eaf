"""Scenes of coloured shapes: one caption for each scene, pixels for each, and the way back from both.

A scene is one or two objects on black: "a red circle", "a small red circle left of a blue square". An object
is red, green, blue or yellow, a circle, a square or a triangle, and may be small. Every pixel has one of the
palette's colours exactly, so that a scene can be read from its pixels: what a model draws or says is checked,
not looked at.

Shapes: b images, s side of an image in pixels.
"""

from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

COLOURS = {"red": (1, -1, -1), "green": (-1, 1, -1), "blue": (-1, -1, 1), "yellow": (1, 1, -1)}
SHAPES = ("circle", "square", "triangle")
#: Relations as they are kept; "right of" and "below" say the same of the two objects in the other order.
RELATIONS = ("left of", "above")
OPPOSITE = {"right of": "left of", "below": "above"}
SMALLEST = 16  # side of an image in pixels


@dataclass(frozen=True)
class Thing:
    """One object of a scene."""

    colour: str
    shape: str
    small: bool = False

    def __str__(self) -> str:
        return f"a {'small ' if self.small else ''}{self.colour} {self.shape}"

    def radius(self, size: int) -> int:
        """Half its extent, in pixels, in an image of `size` pixels: it is 2 * radius + 1 pixels wide."""
        return round(size * (0.1 if self.small else 0.19))


@dataclass(frozen=True)
class Scene:
    """One object, or two of which the first is `relation` ("left of" or "above") the second."""

    first: Thing
    relation: str | None = None
    second: Thing | None = None

    def caption(self, swapped: bool = False) -> str:
        """The scene in words; `swapped` begins with the other object: "... right of ..."."""
        if self.second is None:
            return str(self.first)
        if swapped:
            other = next(name for name, kept in OPPOSITE.items() if kept == self.relation)
            return f"{self.second} {other} {self.first}"
        return f"{self.first} {self.relation} {self.second}"


THINGS = tuple(Thing(c, s, small) for c, s, small in product(COLOURS, SHAPES, (False, True)))


def parse_caption(caption: str) -> Scene | None:
    """The scene that a caption describes, or None if it describes none."""
    for name in (*RELATIONS, *OPPOSITE):
        before, found, after = caption.partition(f" {name} ")
        if found:
            first, second = _parse_thing(before), _parse_thing(after)
            if first is None or second is None:
                return None
            kept = OPPOSITE.get(name)
            return Scene(first, name, second) if kept is None else Scene(second, kept, first)
    thing = _parse_thing(caption)
    return None if thing is None else Scene(thing)


_BY_NAME = {str(thing): thing for thing in THINGS}


def _parse_thing(words: str) -> Thing | None:
    return _BY_NAME.get(words.strip())


# ---- pixels ------------------------------------------------------------------------------------------------


def draw(scenes: list[Scene], centres: NDArray[np.int64], size: int) -> Tensor:
    """Images [b,3,s,s] with values -1 and 1, from the middle (x, y) of each object, [b,2,2]."""
    y, x = np.mgrid[:size, :size]
    images = np.full((len(scenes), 3, size, size), -1, dtype=np.float32)
    for image, scene, places in zip(images, scenes, centres, strict=True):
        for thing, (cx, cy) in zip((scene.first, scene.second), places, strict=True):
            if thing is not None:
                inside = _inside(thing.shape, x - cx, y - cy, thing.radius(size))
                image[:, inside] = np.array(COLOURS[thing.colour], dtype=np.float32)[:, None]
    return torch.from_numpy(images)


def _inside(shape: str, dx: NDArray[np.int64], dy: NDArray[np.int64], radius: int) -> NDArray[np.bool_]:
    """Which pixels, given by their distance from the middle, belong to a shape."""
    box = (abs(dx) <= radius) & (abs(dy) <= radius)
    if shape == "square":
        return box
    if shape == "circle":
        return dx**2 + dy**2 <= radius**2 + radius / 2
    return box & (2 * abs(dx) <= dy + radius)


def read_scene(image: Tensor) -> Scene | None:
    """The scene in an image [3,s,s] with values around -1 and 1, or None if no single one can be read.

    Each pixel counts as the nearest colour of the palette; patches of one colour that hang together are
    compared with each shape at each size, and specks are left out. So a blurred or noisy drawing is read as
    long as its objects are more like one shape than like any other. None: no object, more than two, or one
    that overlaps no shape by half.
    Raises ValueError for anything but a square image with three channels of at least 16 pixels.
    """
    if (
        image.dim() != 3
        or image.shape[0] != 3
        or image.shape[1] != image.shape[2]
        or len(image[0]) < SMALLEST
    ):
        raise ValueError(f"an image is [3,s,s] with s of at least {SMALLEST}, got {list(image.shape)}")
    size = image.shape[1]
    on = (image.detach().float().cpu().numpy() > 0).astype(np.int64)
    code = on[0] + 2 * on[1] + 4 * on[2]
    found = []
    for colour, signs in COLOURS.items():
        mine = code == sum(2**i for i, sign in enumerate(signs) if sign > 0)
        found += [_recognise(colour, patch, size) for patch in _patches(mine, least=size // 4)]
    if not 1 <= len(found) <= 2 or None in found:
        return None
    things = [thing for thing in found if thing is not None]
    if len(things) == 1:
        return Scene(things[0][0])
    (a, xa, ya), (b, xb, yb) = things
    across = abs(xa - xb) > abs(ya - yb)
    in_order = xa < xb if across else ya < yb
    return Scene(a if in_order else b, "left of" if across else "above", b if in_order else a)


def caption_of(image: Tensor) -> str | None:
    """What an image [3,s,s] shows, in words, or None; see read_scene."""
    scene = read_scene(image)
    return None if scene is None else scene.caption()


def agreement(images: Tensor, captions: list[str]) -> float:
    """The share of images [b,3,s,s] that show what their caption says: text-to-image or caption accuracy."""
    if len(images) != len(captions) or not captions:
        raise ValueError(f"as many captions as images are needed, got {len(captions)} and {len(images)}")
    pairs = zip(images, captions, strict=True)
    right = [
        (scene := parse_caption(text)) is not None and scene == read_scene(image) for image, text in pairs
    ]
    return sum(right) / len(right)


def _patches(mine: NDArray[np.bool_], least: int) -> list[NDArray[np.int64]]:
    """Groups of at least `least` pixels of `mine` that touch along a side: their (y, x), [n,2] each."""
    left = {(int(y), int(x)) for y, x in np.argwhere(mine)}
    groups = []
    while left:
        group = [left.pop()]
        for y, x in group:  # grows while it is walked through
            for near in ((y - 1, x), (y + 1, x), (y, x - 1), (y, x + 1)):
                if near in left:
                    left.remove(near)
                    group.append(near)
        if len(group) >= least:
            groups.append(np.array(group))
    return groups


def _recognise(colour: str, patch: NDArray[np.int64], size: int) -> tuple[Thing, float, float] | None:
    """The object that a patch overlaps best, and its middle (x, y); None if none overlaps it by half."""
    low, high = patch.min(0), patch.max(0)
    cy, cx = (low + high) // 2
    dy, dx = np.mgrid[:size, :size]
    mine = np.zeros((size, size), dtype=bool)
    mine[patch[:, 0], patch[:, 1]] = True
    best, most = None, 0.5
    for shape, small in product(SHAPES, (False, True)):
        thing = Thing(colour, shape, small)
        template = _inside(shape, dx - cx, dy - cy, thing.radius(size))
        overlap = (mine & template).sum() / (mine | template).sum()
        if overlap > most:
            best, most = thing, overlap
    return None if best is None else (best, float(cx), float(cy))
