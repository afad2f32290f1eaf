"""Published shapes of CLIP, as data. A preset is the keyword arguments of a config.

Radford et al. 2021, arXiv:2103.00020, Table 20: ViT-B/32, ViT-B/16 and ViT-L/14, and their text towers of
width 512 or 768. Stable Diffusion 1 reads its prompts with the text tower of ViT-L/14, Stable Diffusion 2
with that of OpenCLIP's ViT-H/14 without its last layer, and with true GELU.
"""

from typing import Any


def _text(width: int, heads: int, **more: Any) -> dict[str, Any]:
    shape = dict(vocab_size=49408, max_positions=77, num_layers=12, hidden_size=width, num_heads=heads)
    return shape | more


def _vision(layers: int, width: int, heads: int, patch: int, **more: Any) -> dict[str, Any]:
    return dict(
        image_size=224, patch_size=patch, num_layers=layers, hidden_size=width, num_heads=heads, **more
    )


# Ours, for laptops: for the words and the 32-pixel images of fmlab.data.shapes, whose end token is 3.
_TINY_TEXT: dict[str, Any] = dict(
    vocab_size=64, max_positions=16, num_layers=3, hidden_size=128, num_heads=4, eos_token_id=3
)
_TINY_VISION: dict[str, Any] = dict(image_size=32, patch_size=8, num_layers=4, hidden_size=128, num_heads=4)

TEXT_PRESETS: dict[str, dict[str, Any]] = {
    "clip-vit-b-32": _text(512, 8),
    "clip-vit-b-16": _text(512, 8),
    "clip-vit-l-14": _text(768, 12),
    "openclip-vit-h-14-penultimate": _text(1024, 16, num_layers=23, activation="gelu"),
    "clip-tiny": _TINY_TEXT,
}
VISION_PRESETS: dict[str, dict[str, Any]] = {
    "clip-vit-b-32": _vision(12, 768, 12, 32),
    "clip-vit-b-16": _vision(12, 768, 12, 16),
    "clip-vit-l-14": _vision(24, 1024, 16, 14),
    "clip-tiny": _TINY_VISION,
}
#: The width of the space that both towers are projected into.
PROJECTIONS: dict[str, int] = {
    "clip-vit-b-32": 512,
    "clip-vit-b-16": 512,
    "clip-vit-l-14": 768,
    "clip-tiny": 64,
}
