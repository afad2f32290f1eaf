"""A folder of images with captions: every file opened, decoded and checked before a run begins.

Captions stand in metadata.jsonl, a line {"file_name": "a.png", "text": "a red circle"} for each image (the
layout of Hugging Face's imagefolder), or in a text file beside each image: a.png and a.txt.

Nothing is cropped, scaled or converted silently: an image of another size or kind is refused with its name.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fmlab.extras import require

ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
METADATA = "metadata.jsonl"
_SHOWN = 3  # wrong files named in a message
_MODES = {
    "L": "grey",
    "LA": "grey with transparency",
    "P": "a palette",
    "RGBA": "transparency",
    "CMYK": "printing inks",
    "1": "black and white only",
}


def read_image_folder(folder: str | Path, size: int, captions: bool = True) -> tuple[Tensor, list[str]]:
    """All images of a folder as bytes [n,3,size,size], in the order of their names, and a caption of each.

    captions: whether they are needed; without, they are empty.

    Raises ValueError that names the first few files which cannot be used, and why: no image, truncated,
    another size or mode, no caption. ImportError without Pillow (extra "data").
    """
    folder = Path(folder)
    files = sorted(path for path in folder.iterdir() if path.suffix.lower() in ENDINGS)
    if not files:
        raise ValueError(f"{folder} holds no image; legal are files ending with {', '.join(ENDINGS)}")
    texts = _captions(folder, files) if captions else [""] * len(files)
    images = np.empty((len(files), 3, size, size), np.uint8)
    wrong = []
    for place, path in enumerate(files):
        try:
            images[place] = _pixels(path, size)
        except ValueError as error:
            wrong.append(str(error))
    _refuse(folder, wrong)
    return torch.from_numpy(images), texts


def _pixels(path: Path, size: int) -> Any:
    """Bytes [3,size,size]. Raises ValueError with the reason."""
    pil = require("data", "PIL.Image")
    try:
        with pil.open(path) as image:
            image.load()  # reads all of it: a truncated file shows here
    except pil.UnidentifiedImageError:
        raise ValueError(f"{path.name} is no image, whatever its name says") from None
    except (OSError, SyntaxError) as error:  # Pillow's reasons for a damaged file
        raise ValueError(f"{path.name} is damaged ({error})") from None
    if image.mode != "RGB":
        kind = _MODES.get(image.mode, "another kind of pixel")
        raise ValueError(f"{path.name} has mode {image.mode} ({kind}): convert it to RGB")
    if image.size != (size, size):
        raise ValueError(
            f"{path.name} has {image.width}x{image.height} pixels: crop or scale it to {size}x{size}, or set "
            "image_size"
        )
    return np.asarray(image).transpose(2, 0, 1)


def _captions(folder: Path, files: Sequence[Path]) -> list[str]:
    """A caption of each file. Raises ValueError for those without one."""
    listed = _listed(folder / METADATA) if (folder / METADATA).is_file() else None
    texts, wrong = [], []
    for path in files:
        beside = path.with_suffix(".txt")
        if listed is not None:
            text, where = listed.get(path.name, ""), METADATA
        else:
            text, where = _text(beside) if beside.is_file() else "", beside.name
        if not text.strip():
            wrong.append(f"{path.name} has no caption in {where}")
        texts.append(" ".join(text.split()))
    _refuse(folder, wrong)
    return texts


def _listed(path: Path) -> dict[str, str]:
    found = {}
    for number, line in enumerate(_text(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            name, text = entry["file_name"], entry["text"]
            if not isinstance(name, str) or not isinstance(text, str):
                raise TypeError
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f'{path}, line {number}: each line is {{"file_name": "a.png", "text": "its caption"}}'
            ) from None
        found[name] = text
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8 text: {error}") from None


def _refuse(folder: Path, wrong: list[str]) -> None:
    if wrong:
        more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise ValueError(f"{folder}: {'; '.join(wrong[:_SHOWN])}{more}")
