"""What a model that was just trained draws: a grid of pictures in a file, and how many show their caption."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fmlab.data.captioned import SHAPE_SETS, load_captioned
from fmlab.data.shapes import agreement
from fmlab.extras import require
from fmlab.models.diffusion import StableDiffusion, to_uint8
from fmlab.train.images.config import ImageConfig

_ROWS = 4
_STEPS, _GUIDANCE = 20, 3.0


@torch.no_grad()
def drawn_sample(config: ImageConfig, model: Any) -> str:
    """A line about sixteen pictures, which are written to OUT/samples.png if there is such a folder."""
    draws = isinstance(model, StableDiffusion)
    _, data = load_captioned(config.corpus, config.image_size, config.validation, captions=draws)
    chosen = list(range(min(_ROWS**2, len(data))))
    captions = [data.captions[i] for i in chosen]
    if draws:
        images = model.generate(captions, steps=_STEPS, guidance=_GUIDANCE)
        said = f"{len(chosen)} pictures drawn in {_STEPS} steps with guidance {_GUIDANCE:g}"
    else:
        device = next(model.parameters()).device
        images = (model(data.images(chosen).to(device)).sample / 2 + 0.5).clamp(0, 1)
        said = f"{len(chosen)} pictures, encoded and decoded again"
    if config.corpus in SHAPE_SETS:
        said += f"; {agreement(2 * images.cpu() - 1, captions):.0%} show what their caption says"
    if config.out is None:
        return said
    path = Path(config.out) / "samples.png"
    require("data", "PIL.Image").fromarray(picture_grid(images, _ROWS).numpy()).save(path)
    return f"{said}; see {path}"


def picture_grid(images: Tensor, columns: int, gap: int = 1) -> Tensor:
    """Images [b,3,h,w] in [0, 1] as one picture, bytes [H,W,3], `columns` beside each other on white.

    Raises ValueError for values outside.
    """
    pictures: Sequence[Tensor] = list(to_uint8(images))
    height, width = pictures[0].shape[:2]
    rows = -(-len(pictures) // columns)
    grid = torch.full((rows * (height + gap) + gap, columns * (width + gap) + gap, 3), 255, dtype=torch.uint8)
    for place, picture in enumerate(pictures):
        row, column = divmod(place, columns)
        y, x = gap + row * (height + gap), gap + column * (width + gap)
        grid[y : y + height, x : x + width] = picture
    return grid
