"""How an autoencoder and a text-to-image model are trained: the parts that the loop asks a recipe for."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fmlab.data.batch import Batch
from fmlab.data.captioned import CaptionedImages, CaptionedSampler
from fmlab.models.diffusion import AutoencoderKL, StableDiffusion
from fmlab.models.diffusion.clip_tokenizer import CLIPTokenizer
from fmlab.objectives import Denoising, NoiseSeeds
from fmlab.objectives.reconstruction import Reconstruction
from fmlab.parallel import Engine
from fmlab.parallel.engine import Objective
from fmlab.train.adapt import only_train
from fmlab.train.averages import take_averages
from fmlab.train.images.config import ImageConfig
from fmlab.train.images.parts import rebuilt, undressed
from fmlab.train.launch import World
from fmlab.train.lora import LoRA, add_lora, merge_lora, remove_lora

#: The UNet's queries and values, of pixels among themselves and of pixels and words, and its outputs.
_LORA_TARGETS = (r"unet\..*attention.*\.(query|key|value|output)",)
_TOKENS = "text_encoder.blocks.0.tokens.weight"
_SCALE_IMAGES = 512
_LOG_VARIANCE = -6.0  # a deviation of 0.05
_EVALUATION_SEED = 1_000_003


class NoTokenizer:
    """Stands where a run without text has no tokenizer."""

    def save(self, folder: str | Path) -> None:
        """Nothing to write."""


class ImageRecipe:
    """What both have in common.

    model: what is trained, a torch module; objective: what is minimised
    """

    name: str
    model: nn.Module
    objective: Objective
    tokenizer: Any

    def build(self) -> nn.Module:
        """A model of the shape of `model`, with other weights."""
        raise NotImplementedError

    def finish(self, engine: Engine, model: nn.Module) -> nn.Module:
        """What is kept of a whole model after the last step; every rank calls it."""
        take_averages(model, engine.full_optimizer_state())
        return model.eval()

    def export(self, model: Any, tokenizer: Any, folder: Path) -> None:
        """Write the finished model in diffusers' format, with its tokenizer if it has one."""
        model.save_pretrained(folder)

    def sampler(self, data: CaptionedImages, config: ImageConfig, world: World) -> NoiseSeeds:
        """Training batches. Raises ValueError for too few images, and captions that do not fit."""
        return NoiseSeeds(self._images(data, config, world), config.seed)

    def evaluation(
        self, data: CaptionedImages, config: ImageConfig, world: World
    ) -> Callable[[], Iterator[Batch]]:
        """What makes the batches of a measurement: the same images and the same noise at each."""
        images = self._images(data, config, world)

        def batches() -> Iterator[Batch]:
            seeds = NoiseSeeds(images, _EVALUATION_SEED)
            for step, batch in enumerate(images.evaluation(config.eval_batches)):
                yield {**batch, "noise_seed": seeds.seeds(step)}

        return batches

    def _images(self, data: CaptionedImages, config: ImageConfig, world: World) -> CaptionedSampler:
        tokenizer = self.tokenizer if isinstance(self.tokenizer, CLIPTokenizer) else None
        return CaptionedSampler(data, tokenizer, config.batch_size, config.seed, world.rank, world.size)


class AutoencoderRecipe(ImageRecipe):
    """Reconstruction and KL; at the end the scale of the latents is measured on training images."""

    name = "reconstruction"

    def __init__(
        self, config: ImageConfig, data: CaptionedImages, model: AutoencoderKL | None = None
    ) -> None:
        self.model = model or quiet(AutoencoderKL.from_preset(config.model))
        self.shape = shape = self.model.config
        self.objective = Reconstruction(shape.latent_channels, shape.downscale, config.kl_weight)
        self.tokenizer, self.data = NoTokenizer(), data

    def build(self) -> nn.Module:
        return AutoencoderKL(self.shape)

    def finish(self, engine: Engine, model: Any) -> nn.Module:
        model = super().finish(engine, model)
        chosen = range(0, len(self.data), max(1, len(self.data) // _SCALE_IMAGES))
        model.measure_scale(engine.backend.to_device({"images": self.data.images(list(chosen))})["images"])
        return model


def quiet(model: AutoencoderKL) -> AutoencoderKL:
    """The model with latents of little noise, a twentieth of KL's: at first their means are small, and under
    noise of deviation 1 the decoder would see nothing of them for long."""
    bias = model.get_parameter(f"blocks.{model.latents_at - 1}.quantize.bias")
    with torch.no_grad():
        bias[model.config.latent_channels :] = _LOG_VARIANCE
    return model


class TextToImageRecipe(ImageRecipe):
    """Denoising of latents, with captions left out now and then; all weights, low-rank updates, or one word.

    pipeline: with the autoencoder, which is frozen, and a tokenizer
    """

    name = "denoising"

    def __init__(self, config: ImageConfig, pipeline: StableDiffusion, device: Any) -> None:
        assert pipeline.autoencoder is not None
        assert pipeline.tokenizer is not None
        self.config, self.pipeline, self.tokenizer = config, pipeline, pipeline.tokenizer
        pipeline.autoencoder.to(device).requires_grad_(False)
        self.model = self._prepared(undressed(pipeline))
        empty = {"input_ids": self.tokenizer.batch([""])[0]} if config.drop_captions else None
        self.objective = Denoising(
            pipeline.scheduler.schedule,
            pipeline.scheduler.prediction,
            config.min_snr_gamma,
            empty,
            config.drop_captions,
            encode=pipeline.autoencoder.encode,
        )

    def build(self) -> nn.Module:
        return self._prepared(rebuilt(self.pipeline))

    def finish(self, engine: Engine, model: Any) -> nn.Module:
        model = super().finish(engine, model)
        if self.config.lora_rank:
            merge_lora(model)
            remove_lora(model)
        whole = StableDiffusion(
            model.unet, model.text_encoder, self.pipeline.autoencoder, self.pipeline.scheduler, self.tokenizer
        )
        return whole.requires_grad_(False).eval()

    def _prepared(self, model: StableDiffusion) -> StableDiffusion:
        """The model with what learns made trainable, and nothing else."""
        if self.config.lora_rank:
            rank = self.config.lora_rank
            add_lora(model, LoRA(rank, alpha=float(rank), targets=_LORA_TARGETS), seed=self.config.seed)
        elif self.config.learn_word is not None:
            learn_word(model, self.tokenizer, self.config.learn_word)
        else:
            only_train(model)  # a finished model comes back with its weights frozen
        return model


def learn_word(model: StableDiffusion, tokenizer: CLIPTokenizer, word: str) -> int:
    """Let nothing of the model learn but the vector of one word; returns its id.

    Textual inversion (Gal et al. 2022, arXiv:2208.01618, section 3.2). The word must be one token that other
    captions do not need. Use no weight decay: it would move the other words.

    Raises ValueError for a word of several tokens.
    """
    ids = tokenizer.encode(word)
    if len(ids) != 1:
        raise ValueError(
            f"{word!r} is {len(ids)} tokens ({', '.join(tokenizer.decode([i]) for i in ids)}), and one is "
            "learned: choose a single rare letter or sign, such as 'x'"
        )
    only_train(model, _TOKENS.replace(".", r"\."))
    table = model.get_parameter(_TOKENS)
    mask = torch.zeros(len(table), 1)
    mask[ids[0]] = 1

    def one_row(gradient: Tensor) -> Tensor:
        return gradient * mask.to(gradient)

    table.register_hook(one_row)
    return ids[0]
