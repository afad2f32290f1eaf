"""Published shapes of the diffusion families, as data. A preset is the keyword arguments of a config.

Stable Diffusion: Rombach et al. 2022, arXiv:2112.10752; the shapes are those of the released checkpoints.
"""

from typing import Any

UNET_PRESETS: dict[str, dict[str, Any]] = {
    # heads: 8 everywhere in 1.5, of 40, 80 and 160; in 2.1 more of them, all of 64
    "sd-1.5": dict(channels=(320, 640, 1280, 1280), heads=(8, 8, 8, 8), text_size=768, sample_size=64),
    "sd-2.1": dict(
        channels=(320, 640, 1280, 1280),
        heads=(5, 10, 20, 20),
        text_size=1024,
        linear_projection=True,
        sample_size=96,
    ),
    # Ours, for laptops: pictures of 32x32, or latents of 8x8 with in_channels=4, out_channels=4.
    "unet-tiny": dict(
        channels=(32, 64, 64),
        attention=(False, True, True),
        heads=(1, 2, 2),
        text_size=128,
        layers_per_level=1,
        norm_groups=8,
        in_channels=3,
        out_channels=3,
        sample_size=32,
    ),
}

AUTOENCODER_PRESETS: dict[str, dict[str, Any]] = {
    "sd-vae": dict(channels=(128, 256, 512, 512), scaling_factor=0.18215),
    "sdxl-vae": dict(channels=(128, 256, 512, 512), scaling_factor=0.13025, sample_size=1024),
    # Ours: pictures of 32x32 to latents of 8x8. Its scale is measured after training (measure_scale).
    "vae-tiny": dict(
        channels=(16, 32, 32), layers_per_level=1, norm_groups=8, scaling_factor=1.0, sample_size=32
    ),
    # Ours, for minutes of one core: pictures of 16x16 to latents of 8x8.
    "vae-nano": dict(
        channels=(32, 32), layers_per_level=1, norm_groups=8, scaling_factor=1.0, sample_size=16
    ),
}


def _dit(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    return dict(num_layers=layers, hidden_size=hidden, num_heads=heads)


# Peebles and Xie 2022, arXiv:2212.09748, Table 1: latents of 32x32x4 in patches of 2x2, 1000 classes.
DIT_PRESETS: dict[str, dict[str, Any]] = {
    "dit-s/2": _dit(12, 384, 6),
    "dit-b/2": _dit(12, 768, 12),
    "dit-l/2": _dit(24, 1024, 16),
    "dit-xl/2": _dit(28, 1152, 16),
    # Ours: pictures of 32x32 from a text of width 128.
    "dit-tiny": dict(
        _dit(4, 128, 4), patch_size=4, in_channels=3, out_channels=3, num_classes=None, text_size=128
    ),
}
