"""Everything a run on images needs, made and checked before its first step."""

import dataclasses
from typing import Any

from fmlab.backends import Backend
from fmlab.data.captioned import CaptionedImages, load_captioned
from fmlab.models.diffusion import AutoencoderKL, StableDiffusion
from fmlab.parallel import parallelize
from fmlab.parallel.engines import refusals
from fmlab.train import checkpoint
from fmlab.train.averages import averaged_adamw
from fmlab.train.images.config import AUTOENCODERS, ImageConfig
from fmlab.train.images.parts import check_latents, load_autoencoder, new_pipeline
from fmlab.train.images.recipes import AutoencoderRecipe, ImageRecipe, TextToImageRecipe
from fmlab.train.launch import World
from fmlab.train.optim import adamw
from fmlab.train.setup import Run, check_folder, check_memory, place_of

_LOOKED_AT = 64  # images whose latents are checked


def prepare_images(
    config: ImageConfig,
    world: World,
    backend: Backend,
    model: Any = None,
    data: tuple[CaptionedImages, CaptionedImages] | None = None,
) -> Run:
    """Check the settings against each other and build the run; cheap checks first.

    model: an AutoencoderKL or a StableDiffusion with its autoencoder, in place of the one that the settings
    name. data: images for training and for validation, in place of `corpus`.

    Raises ValueError, StorageError or ImportError that says what is legal.
    """
    config = dataclasses.replace(config, layout=config.layout_for(world.size), lr=config.lr_for(0))
    layout, lr = config.layout, config.lr
    assert lr is not None
    if layout.precision not in backend.precisions:
        backend.autocast(layout.precision)  # type: ignore[arg-type]  # raises, naming the legal ones
    check_folder(config, world)
    train, validation = data or load_captioned(
        config.corpus, config.image_size, config.validation, captions=config.model not in AUTOENCODERS
    )
    backend.seed(config.seed)  # the same on every rank: identical weights at the start
    recipe = _recipe(config, model, train, backend)
    layout.validate(world.size, config.batch_size, recipe.model, None, recipe.objective)
    refusals.check(config.engine, layout, recipe.model)
    parameters = sum(p.numel() for p in recipe.model.parameters())
    world.on_first(lambda: check_memory(parameters, world, backend, layout))
    if config.out is not None:
        out, keep = config.out, config.keep
        world.on_first(lambda: checkpoint.check_space(out, parameters, keep))
    betas, decay = (config.beta1, config.beta2), 0.0 if config.learn_word else config.weight_decay
    optimizer = averaged_adamw(config.ema, lr, betas, decay) if config.ema else adamw(lr, betas, decay)
    engine = parallelize(
        recipe.model,
        layout,
        recipe.objective,
        optimizer,
        engine=config.engine,
        backend=backend,
        max_grad_norm=config.clip or None,
    )
    place = place_of(layout, world, engine)
    sampler: Any = recipe.sampler(train, config, place)
    batches = recipe.evaluation(validation, config, place)
    made: Any = recipe
    return Run(config, world, place, backend, made, recipe.tokenizer, engine, sampler, batches, parameters)


def _recipe(config: ImageConfig, model: Any, train: CaptionedImages, backend: Backend) -> ImageRecipe:
    """Raises ValueError for a folder that holds another model, or images that do not fit it."""
    if config.model in AUTOENCODERS:
        if model is not None and not isinstance(model, AutoencoderKL):
            raise ValueError(f"{config.model} trains an AutoencoderKL, not a {type(model).__name__}")
        return AutoencoderRecipe(config, train, model)
    if model is not None:
        if not isinstance(model, StableDiffusion) or model.autoencoder is None or model.tokenizer is None:
            raise ValueError(f"{config.model} trains a StableDiffusion with its autoencoder and tokenizer")
        pipeline = model
    elif config.init is not None:
        pipeline = StableDiffusion.from_pretrained(config.init)
    else:
        assert config.autoencoder is not None
        autoencoder = load_autoencoder(config.autoencoder)
        pipeline = new_pipeline(config, train.captions, autoencoder, None)
    assert pipeline.autoencoder is not None
    assert pipeline.tokenizer is not None
    check_latents(pipeline.autoencoder, train.images(list(range(min(_LOOKED_AT, len(train))))))
    if config.learn_word is not None and not any(config.learn_word in c.split() for c in train.captions):
        raise ValueError(f"no caption has the word {config.learn_word!r}, so that nothing would learn it")
    return TextToImageRecipe(config, pipeline, backend.device)
