"""Random data to compare a layout with one device on, when the caller has none.

Shapes: b rows, l length, c channels, h height, w width, d width of a text.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from fmlab.models.families import longest_row
from fmlab.parallel.layout import Batch

LENGTH = 32  # tokens of a row, or as many as the model can take
_CAPTION = 8  # tokens of an image's text


def random_batches(model: nn.Module, rows: int, steps: int, seed: int) -> list[Batch]:
    """A global batch for each step, for any family that has a loss: what it reads is looked up in its config.

    Tokens with labels of tokens or rows; an input and a shorter output for an encoder-decoder; images with
    their texts for CLIP; images, texts and seeds of noise for diffusion. Where rows have labels, each has
    targets in a longer part than the one before, and only two rows of three have labels of their own, so that
    ranks differ. Raises ValueError for a model that reads something else.
    """
    config, make = getattr(model, "config", None), check_random(model)
    generator = torch.Generator().manual_seed(seed)
    return [make(model, config, rows, generator) for _ in range(steps)]


def check_random(model: nn.Module) -> Any:
    """What makes batches for a model. Raises ValueError for one that reads something else."""
    config: Any = getattr(model, "config", None)
    for names, make in _MAKERS:
        if all(hasattr(config, name) for name in names):
            return make
    raise ValueError(
        f"{type(model).__name__} has no config with vocab_size and max_positions to make random tokens from, "
        "nor one of images; pass batches=[...], one for each step (from the shell: --batches module:function)"
    )


def random_length(config: Any) -> int | None:
    """Tokens of a row of `random_batches`; None for a model that reads no tokens, or images too."""
    return min(longest_row(config) or LENGTH, LENGTH) if hasattr(config, "vocab_size") else None


def _tokens(model: nn.Module, config: Any, rows: int, generator: torch.Generator) -> Batch:
    length = random_length(config)
    assert length is not None
    learns_from = getattr(config, "learns_from", ("labels",))
    classes = {"sentence_labels": 2, "class_labels": getattr(config, "num_classes", 2)}
    tokens = torch.randint(config.vocab_size, (rows, length + 1), generator=generator)
    batch = {"input_ids": tokens[:, :-1].contiguous()}
    if "labels" in learns_from:
        output = tokens[:, 1:].clone()
        if "decoder_input_ids" in inspect.signature(model.forward).parameters:
            output = output[:, : max(1, length // 2)]
        batch["labels"] = _uneven(output)
    for name in (name for name in classes if name in learns_from):  # in the same order on every rank
        labels_b = torch.randint(classes[name], (rows,), generator=generator)
        batch[name] = labels_b.where(torch.arange(rows) % 3 != 1, -100)
    return batch


def _uneven(labels_bl: Tensor) -> Tensor:
    rows, length = labels_bl.shape
    for row in range(rows):
        labels_bl[row, max(1, length * (row + 1) // rows) :] = -100
    return labels_bl


def _pairs(model: nn.Module, config: Any, rows: int, generator: torch.Generator) -> Batch:
    """Images, and texts of different lengths, each ended by its end-of-text token."""
    image, text = config.vision, config.text
    length = min(text.max_positions, LENGTH)
    ids_bl = torch.randint(text.vocab_size, (rows, length), generator=generator)
    ids_bl = ids_bl.where(ids_bl != text.eos_token_id, (text.eos_token_id + 1) % text.vocab_size)
    for row in range(rows):
        ids_bl[row, max(1, length - 1 - row % length) :] = text.eos_token_id
    pixels_bchw = torch.randn(rows, image.channels, image.image_size, image.image_size, generator=generator)
    return {"pixel_values": pixels_bchw, "input_ids": ids_bl}


def _noisy(model: nn.Module, config: Any, rows: int, generator: torch.Generator) -> Batch:
    """Small images, the seeds of their noise, and what they are to show."""
    multiple: int = getattr(config, "multiple", None) or config.patch_size
    size = min(config.sample_size, max(8 // multiple, 1) * multiple)
    batch = {
        "pixel_values": torch.randn(rows, config.in_channels, size, size, generator=generator),
        "noise_seed": torch.randint(2**31, (rows,), generator=generator),
    }
    if config.text_size is not None:
        batch["encoder_hidden_states"] = torch.randn(rows, _CAPTION, config.text_size, generator=generator)
    if getattr(config, "num_classes", None) is not None:
        batch["class_labels"] = torch.randint(config.num_classes, (rows,), generator=generator)
    return batch


#: Fields of a config -> what makes a batch for it; the first that fits.
_MAKERS = (
    (("vocab_size",), _tokens),
    (("text", "vision", "projection_size"), _pairs),
    (("sample_size",), _noisy),
)


@torch.no_grad()
def stir(model: nn.Module, seed: int = 0) -> nn.Module:
    """Fill matrices that start at zero, as in diffusion models, with small numbers; returns the model.

    Nothing flows through a matrix of zeros: the gradients of all that lies behind it are zero, and equal
    zeros prove nothing.
    """
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() > 1 and parameter.device.type == "cpu" and not parameter.any():
            parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))
    return model
