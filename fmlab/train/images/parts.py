"""The parts of a text-to-image model that is trained here: made anew for its captions, or taken up."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fmlab.models.clip_text import CLIPText
from fmlab.models.diffusion import DDIM, AutoencoderKL, NoiseSchedule, StableDiffusion, UNet
from fmlab.models.diffusion.clip_tokenizer import CLIPTokenizer
from fmlab.models.presets import find_preset
from fmlab.train.images.config import ImageConfig

#: name -> of the UNet (its channels in and out are the autoencoder's), of the text encoder, of the tokenizer
PRESETS: dict[str, dict[str, Any]] = {
    "sd-tiny": dict(
        unet=dict(
            channels=(32, 64), attention=(False, True), heads=(2, 2), norm_groups=8, layers_per_level=1
        ),
        text=dict(num_layers=1, hidden_size=64, num_heads=2, max_positions=16),
        vocab_size=640,
    ),
}


def new_pipeline(
    config: ImageConfig, captions: Sequence[str], autoencoder: AutoencoderKL, tokenizer: CLIPTokenizer | None
) -> StableDiffusion:
    """A pipeline with random weights for that autoencoder's latents, and a tokenizer for these captions.

    The tokens' vectors start as standard normal numbers, fifty times CLIP's: a text encoder that is trained
    from nothing tells words apart from the first step on. Raises ValueError for captions that are too long,
    and images that the autoencoder cannot divide.
    """
    shape = find_preset(config.model, PRESETS)
    positions, vocab_size = shape["text"]["max_positions"], shape["vocab_size"]
    tokenizer = tokenizer or CLIPTokenizer.train(sorted(set(captions)), vocab_size, positions)
    channels = autoencoder.config.latent_channels
    sample_size, rest = divmod(config.image_size, autoencoder.config.downscale)
    if rest:
        raise ValueError(
            f"image_size={config.image_size}: this autoencoder needs multiples of "
            f"{autoencoder.config.downscale}"
        )
    text = CLIPText(CLIPText.CONFIG(**shape["text"], vocab_size=vocab_size, eos_token_id=tokenizer.eos))
    nn.init.normal_(text.get_parameter("blocks.0.tokens.weight"))
    sizes: dict[str, Any] = dict(in_channels=channels, out_channels=channels, sample_size=sample_size)
    unet = UNet(UNet.CONFIG(**shape["unet"], **sizes, text_size=text.config.hidden_size))
    return StableDiffusion(unet, text, autoencoder, scheduler_of(config), tokenizer)


def scheduler_of(config: ImageConfig) -> DDIM:
    """DDIM on Stable Diffusion's schedule; trailing steps, so that sampling begins at the last timestep.

    Raises ValueError for epsilon on a schedule that ends without a signal.
    """
    schedule = NoiseSchedule("scaled_linear", zero_terminal_snr=config.zero_terminal_snr)
    return DDIM(schedule, config.prediction or "v", spacing="trailing")


def load_autoencoder(folder: str) -> AutoencoderKL:
    """A trained autoencoder, in eval mode and frozen. Raises ValueError for another folder, or one whose
    latents were never scaled."""
    model = AutoencoderKL.from_pretrained(folder)
    return model.eval().requires_grad_(False)


def check_latents(autoencoder: AutoencoderKL, images: torch.Tensor) -> None:
    """Raise ValueError unless latents of these images are near unit deviation, as diffusion assumes."""
    with torch.no_grad():
        spread = float(autoencoder.encode(images).std())
    if not 0.5 < spread < 2:
        raise ValueError(
            f"latents of these images have a standard deviation of {spread:.2f}, and diffusion is set up for "
            "1: the autoencoder was trained on other images, or its scaling_factor is wrong (measure_scale "
            "sets it)"
        )


def undressed(pipeline: StableDiffusion) -> StableDiffusion:
    """The same UNet and text encoder without the autoencoder, which is not trained with them."""
    return StableDiffusion(pipeline.unet, pipeline.text_encoder, None, pipeline.scheduler)


def rebuilt(pipeline: StableDiffusion) -> StableDiffusion:
    """A new model of the shape of `undressed`, with random weights."""
    unet, text = UNet(replace(pipeline.unet.config)), CLIPText(replace(pipeline.text_encoder.config))
    return StableDiffusion(unet, text, None, pipeline.scheduler)
