"""Stable Diffusion: from prompts to images, by three networks, a tokenizer and a scheduler.

    prompt -> ids -> text encoder -> hidden states ----+
                                                       v
    seed -> noise -> scheduler ( UNet, guided ) x steps -> latents -> autoencoder -> image

Rombach et al. 2022, arXiv:2112.10752. Images and latents are float, images of a network in [-1, 1].

Shapes: b prompts, l positions of the text encoder, d width of its hidden states, c channels of latents, h and
    w height and width of latents, H = 8 h and W = 8 w of images.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fmlab.models.clip_text import CLIPText
from fmlab.models.diffusion.autoencoder import AutoencoderKL
from fmlab.models.diffusion.clip_tokenizer import CLIPTokenizer
from fmlab.models.diffusion.guidance import check_guidance, guided_predictor
from fmlab.models.diffusion.schedule import NoiseSchedule
from fmlab.models.diffusion.schedulers import DDIM, Scheduler, denoise
from fmlab.models.diffusion.unet import UNet
from fmlab.models.presets import find_preset
from fmlab.models.state import State

# Parts of each published pipeline, and how it is sampled by default.
_SD = NoiseSchedule("scaled_linear")
PRESETS: dict[str, dict[str, Any]] = {
    "sd-1.5": dict(unet="sd-1.5", text="clip-vit-l-14", scheduler=DDIM(_SD, offset=1, final="first")),
    "sd-2.1": dict(
        unet="sd-2.1", text="openclip-vit-h-14-penultimate", scheduler=DDIM(_SD, "v", offset=1, final="first")
    ),
}


class StableDiffusion(nn.Module):
    """Text to image. `generate` draws; calling it runs text encoder and UNet, which is what is trained.

    Args:
        unet, text_encoder, autoencoder: see their classes. Without an autoencoder the UNet draws pixels.
        tokenizer: may be missing where only ids or hidden states are given.
        scheduler: how `generate` samples, and which noise schedule and prediction the UNet was trained with.

    Raises ValueError when the parts do not fit each other.
    """

    def __init__(
        self,
        unet: UNet,
        text_encoder: CLIPText,
        autoencoder: AutoencoderKL | None,
        scheduler: Scheduler,
        tokenizer: CLIPTokenizer | None = None,
    ) -> None:
        super().__init__()
        self.unet, self.text_encoder, self.autoencoder = unet, text_encoder, autoencoder
        self.scheduler, self.tokenizer = scheduler, tokenizer
        self._check_parts()

    @classmethod
    def from_preset(cls, name: str, tokenizer: CLIPTokenizer | None = None) -> "StableDiffusion":
        """Published shapes with random weights. On the meta device it takes no memory."""
        parts = find_preset(name, PRESETS)
        return cls(
            UNet.from_preset(parts["unet"]),
            CLIPText.from_preset(parts["text"]),
            AutoencoderKL.from_preset("sd-vae"),
            parts["scheduler"],
            tokenizer,
        )

    @classmethod
    def from_pretrained(cls, source: str | Path) -> "StableDiffusion":
        """From a folder or hub repository in diffusers' layout; see pipeline_files.load."""
        from fmlab.models.diffusion.pipeline_files import load

        return load(source)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the folder that diffusers' StableDiffusionPipeline reads."""
        from fmlab.models.diffusion.pipeline_files import save

        save(self, folder)

    def num_parameters(self) -> int:
        """Parameters of the three networks together."""
        return sum(parameter.numel() for parameter in self.parameters())

    # ---- training ------------------------------------------------------------------------------------------

    def forward(self, sample: Tensor, timestep: Tensor, input_ids: Tensor) -> State:
        """What the UNet predicts for noisy latents [b,c,h,w] at timesteps [b], given prompts [b,l].

        Returns a State with `sample` [b,c,h,w]; fmlab.objectives.Denoising trains this.
        """
        return self.unet(sample, timestep, self.text_encoder(input_ids).text_hidden)

    # ---- sampling ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[str],
        steps: int = 50,
        guidance: float = 7.5,
        seed: int | Sequence[int] = 0,
        scheduler: Scheduler | type[Scheduler] | None = None,
        negative_prompts: Sequence[str] | None = None,
        guidance_rescale: float = 0.0,
        height: int | None = None,
        width: int | None = None,
        too_long: str = "refuse",
        one_batch: bool = True,
        on_step: Callable[[int, Tensor], None] | None = None,
    ) -> Tensor:
        """Images [b,3,H,W] in [0, 1], one for each prompt; `to_uint8` makes bytes of them.

        seed: prompt i is drawn from seed + i, or from seed[i]. Its image does not depend on the batch that it
            is in.
        scheduler: another method, or its class, which takes over this pipeline's schedule and prediction.
        negative_prompts: what to move away from, instead of the empty prompt.
        height, width: of the images in pixels; default: what the UNet was trained on.
        too_long: "refuse" or "cut", for prompts that exceed the text encoder; see CLIPTokenizer.batch.
        one_batch: run the UNet with and without the prompt at once; False takes half the memory.
        on_step: called with the step's index and the latents after it.

        Raises ValueError before any work for input that cannot be.
        """
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        check_guidance(guidance, guidance_rescale)
        negative = [""] * len(prompts) if negative_prompts is None else list(negative_prompts)
        if len(negative) != len(prompts):
            raise ValueError(
                f"{len(negative)} negative prompts for {len(prompts)} prompts; give one for each"
            )
        if negative_prompts is not None and guidance == 1:
            raise ValueError("negative prompts do nothing with guidance 1; use more, such as 7.5")
        method = self._method(scheduler)
        shape = self._latent_shape(height, width)
        seeds = _seeds(seed, len(prompts))
        condition = self.encode_prompts(prompts, too_long)
        empty = self.encode_prompts(negative, too_long) if guidance != 1 else condition

        def predict(sample: Tensor, timesteps: Tensor, hidden: Tensor) -> Tensor:
            return self.unet(sample, timesteps, hidden).sample

        draw = _Noise(seeds, shape, condition)
        guided = guided_predictor(predict, condition, empty, guidance, guidance_rescale, one_batch)
        latents = denoise(guided, method, steps, draw(), lambda i: draw(), on_step)
        images = latents if self.autoencoder is None else self.autoencoder.decode(latents)
        return (images / 2 + 0.5).clamp(0, 1)

    def encode_prompts(self, prompts: Sequence[str], too_long: str = "refuse") -> Tensor:
        """Hidden states of prompts [b,l,d]. Padding is read like any other token, as in training."""
        if self.tokenizer is None:
            raise ValueError("this pipeline has no tokenizer; give one to read prompts")
        ids = self.tokenizer.batch(prompts, too_long)
        return self.text_encoder(ids.to(next(self.text_encoder.parameters()).device)).text_hidden

    # ---- checks --------------------------------------------------------------------------------------------

    def _check_parts(self) -> None:
        unet, text = self.unet.config, self.text_encoder.config
        if unet.in_channels != unet.out_channels:
            raise ValueError(
                f"the UNet predicts {unet.out_channels} channels for {unet.in_channels}: "
                "text-to-image needs as many"
            )
        if unet.text_size != text.hidden_size:
            raise ValueError(
                f"the UNet reads text of width {unet.text_size}, the text encoder writes {text.hidden_size}"
            )
        if self.autoencoder is not None and self.autoencoder.config.latent_channels != unet.in_channels:
            raise ValueError(
                f"the autoencoder's latents have {self.autoencoder.config.latent_channels} channels, "
                f"the UNet's {unet.in_channels}"
            )
        if self.tokenizer is not None:
            if self.tokenizer.max_length > text.max_positions:
                raise ValueError(
                    f"the tokenizer makes rows of {self.tokenizer.max_length} tokens, the text encoder "
                    f"has {text.max_positions} positions; build it with max_length={text.max_positions}"
                )
            if self.tokenizer.vocab_size > text.vocab_size:
                raise ValueError(
                    f"the tokenizer has {self.tokenizer.vocab_size} tokens, the text encoder "
                    f"{text.vocab_size}"
                )

    def _method(self, scheduler: Scheduler | type[Scheduler] | None) -> Scheduler:
        if scheduler is None:
            return self.scheduler
        if isinstance(scheduler, type):
            return scheduler.from_fields(self.scheduler.to_fields())
        if scheduler.prediction != self.scheduler.prediction or scheduler.schedule != self.scheduler.schedule:
            raise ValueError(
                f"the UNet was trained to predict {self.scheduler.prediction} on {self.scheduler.schedule}, "
                f"this scheduler expects {scheduler.prediction} on {scheduler.schedule}; pass its class"
            )
        return scheduler

    def _latent_shape(self, height: int | None, width: int | None) -> tuple[int, int, int]:
        """Shape of one image's latents, [c,h,w]."""
        factor = 1 if self.autoencoder is None else self.autoencoder.config.downscale
        default, multiple = self.unet.config.sample_size * factor, self.unet.config.multiple * factor
        sides = []
        for name, size in (("height", height), ("width", width)):
            size = default if size is None else size
            if size < 1 or size % multiple:
                raise ValueError(
                    f"{name} must be a multiple of {multiple} (latents are {factor} times smaller, and the "
                    f"UNet needs multiples of {self.unet.config.multiple} of them), got {size}"
                )
            sides.append(size // factor)
        return (self.unet.config.in_channels, sides[0], sides[1])


class _Noise:
    """Standard normal noise for each image from its own generator, on the CPU whatever the device."""

    def __init__(self, seeds: Sequence[int], shape: tuple[int, ...], like: Tensor):
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.shape, self.like = shape, like

    def __call__(self) -> Tensor:
        return torch.stack([torch.randn(self.shape, generator=g) for g in self.generators]).to(self.like)


def _seeds(seed: int | Sequence[int], count: int) -> list[int]:
    seeds = [seed + i for i in range(count)] if isinstance(seed, int) else list(seed)
    if len(seeds) != count:
        raise ValueError(f"{len(seeds)} seeds for {count} prompts; give one for each, or a single number")
    return seeds


def to_uint8(images: Tensor) -> Tensor:
    """Images [b,3,H,W] in [0, 1] as bytes [b,H,W,3], on the CPU, which PIL and matplotlib read.

    Raises ValueError for values outside: those of a network's output, in [-1, 1], are not meant.
    """
    if images.dim() != 4 or not images.is_floating_point():
        raise ValueError(f"images must be float [b,3,H,W], got {images.dtype} {list(images.shape)}")
    if images.numel() and (float(images.min()) < 0 or float(images.max()) > 1):
        raise ValueError(
            f"images must be in [0, 1], got {float(images.min()):.2f} to {float(images.max()):.2f}; "
            "bring a network's [-1, 1] there with image / 2 + 0.5"
        )
    return (images.float() * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu()
