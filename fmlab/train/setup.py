"""Everything a run needs, made and checked before its first step."""

import dataclasses
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from fmlab.backends import Backend
from fmlab.data import Corpus, TextTokenizer, WindowSampler, load
from fmlab.data.batch import Batch
from fmlab.models.families import family_of, longest_row
from fmlab.parallel import Engine, Layout, parallelize
from fmlab.parallel.engines import refusals
from fmlab.parallel.mesh import Mesh
from fmlab.ranks import available_memory
from fmlab.storage import check_writable, exclusive
from fmlab.train import checkpoint
from fmlab.train.config import TrainConfig
from fmlab.train.launch import World
from fmlab.train.optim import OPTIMIZERS
from fmlab.train.precision.engine import FewBits
from fmlab.train.precision.numbers import Numbers, numbers_called
from fmlab.train.recipes import Recipe, recipe_for, tokenizer_of
from fmlab.train.resume import check_settings
from fmlab.train.start import CLASSES, starting_point


@dataclass
class Run:
    """The parts of a run.

    config:     complete: the layout is for the ranks there are, lr is a number
    world:      all ranks; the first one logs and writes
    place:      this rank among those that have different rows: its place on the layout's data axis
    validation: makes the batches of a measurement
    numbers:    of a run in few bits: the model is prepared for them, and finished at the end
    """

    config: TrainConfig
    world: World
    place: World
    backend: Backend
    recipe: Recipe
    tokenizer: TextTokenizer
    engine: Engine
    sampler: WindowSampler
    validation: Callable[[], Iterator[Batch]]
    parameters: int
    numbers: Numbers | None = None


def prepare(
    config: TrainConfig,
    world: World,
    backend: Backend,
    model: nn.Module | None = None,
    tokenizer: TextTokenizer | None = None,
    corpus: Corpus | None = None,
) -> Run:
    """Check the settings against each other and build the run; cheap checks first.

    Raises ValueError, StorageError, ImportError or ConnectionError that says what is legal.
    """
    if config.init is not None and model is not None:
        raise ValueError("a model was given, and init says which to start from; leave one of them out")
    if model is None and (config.init or config.teacher or config.objective == CLASSES):
        corpus = corpus or load(config.corpus)
        reads_by = tokenizer_of(family_of(config.model))
        model, tokenizer = starting_point(config, reads_by, tokenizer, corpus)
    config, recipe, planned = complete(config, world.size, model)
    layout, lr, shape = config.layout, config.lr, recipe.shape
    assert lr is not None  # complete has filled it in
    if model is None:
        size = sum(p.numel() for p in planned.parameters())
        world.on_first(lambda: check_memory(size, world, backend, layout))
    if config.layout.precision not in backend.precisions:
        backend.autocast(config.layout.precision)  # type: ignore[arg-type]  # raises, naming the legal ones
    numbers = None if config.numbers is None else numbers_called(config.numbers)
    if numbers is not None:
        check_numbers(numbers, backend, layout)
    elif model is not None:
        warn_of_moments(model)
    check_folder(config, world)
    corpus = corpus or load(config.corpus)
    train_text, validation_text = corpus.split(config.validation)
    tokenizer = tokenizer or _tokenizer(config, recipe, train_text)
    check_tokenizer(tokenizer, recipe)

    if model is None:
        backend.seed(config.seed)  # the same on every rank: identical weights at the start
        model = recipe.family(shape)
        assert isinstance(model, nn.Module)
    parameters = sum(p.numel() for p in model.parameters())
    if config.out is not None:
        out, keep = config.out, config.keep
        world.on_first(lambda: checkpoint.check_space(out, parameters, keep))
    betas, decay = (config.beta1, config.beta2), config.weight_decay
    engine = parallelize(
        model if numbers is None else numbers.prepare(model),
        config.layout,
        recipe.objective,
        OPTIMIZERS[config.optimizer](lr, betas, decay)
        if numbers is None
        else numbers.optimizer(lr, betas, decay),
        engine=config.engine if numbers is None else partial(FewBits, numbers=numbers),
        backend=backend,
        max_grad_norm=config.clip or None,
    )
    if engine.dropout_seed is not None:
        engine.dropout_seed = config.seed
    place = place_of(layout, world, engine)
    sampler = recipe.sampler(train_text, tokenizer, config, place)
    validation = recipe.evaluation(validation_text, tokenizer, config, place)
    return Run(
        config, world, place, backend, recipe, tokenizer, engine, sampler, validation, parameters, numbers
    )


def complete(
    config: TrainConfig, world_size: int, model: nn.Module | None = None
) -> tuple[TrainConfig, Recipe, nn.Module]:
    """The config with its layout and learning rate for that many ranks, its recipe, and the model: the given
    one, or the preset's on the meta device. No machine is looked at.

    Raises ValueError for what cannot run anywhere: layout, batch, rows and engine against the model.
    """
    recipe = recipe_for(config, model)
    shape: Any = recipe.shape
    layout, lr = config.layout_for(world_size), config.lr_for(shape.hidden_size, recipe.lr_factor)
    config = dataclasses.replace(config, layout=layout, lr=lr, objective=recipe.name)
    check_seq_len(config.seq_len, longest_row(shape))
    if model is None:
        with torch.device("meta"):
            model = recipe.family(shape)
    layout.validate(world_size, config.batch_size, model, config.seq_len, recipe.objective)
    refusals.check(config.engine, layout, model)
    return config, recipe, model


def check_numbers(numbers: Numbers, backend: Backend, layout: Layout) -> None:
    """Raise ValueError unless training in few bits can run here: one device, a CPU or a GPU, plain steps."""
    if layout.world_size > 1 or not layout.plain_data:
        raise ValueError(
            f"numbers={numbers.name!r} runs plain steps on one device, and the layout is {layout}; "
            "leave numbers out, or the layout (precision='bf16' runs under every layout)"
        )
    if backend.device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"numbers={numbers.name!r} runs on the backends cpu and cuda, and this is {backend.name}"
        )


def warn_of_moments(model: nn.Module) -> None:
    """Warn of weights of 16 bits: AdamW makes its moments in their type, and small updates are lost."""
    few = {str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.dtype.itemsize == 2}
    if few:
        warnings.warn(
            f"the weights are {', '.join(sorted(few))}: AdamW keeps its moments in that type too, and "
            "drops updates below half a gap; numbers='bf16-master' or 'bf16-kahan' keep both, or give the "
            "model in float32",
            stacklevel=3,
        )


def place_of(layout: Layout, world: World, engine: Engine) -> World:
    """This rank's place among those that have different rows of the batch.

    The ranks that divide one copy of the model (tensor, context, pipeline) are at the same place: they read
    the same rows.
    """
    if layout.data == world.size:
        return world
    mesh: Any = getattr(engine, "mesh", None)
    if mesh is None or not hasattr(mesh, "axis"):  # a production engine keeps its own groups
        mesh = Mesh(layout.grid())
    axis = mesh.axis("data")
    return World(axis.rank, axis.size, axis.group)


@contextmanager
def own_folder(run: Run) -> Iterator[None]:
    """Keep other runs out of the folder `out` meanwhile, and clear away what a killed one left there.

    Raises StorageError on every rank when another run is writing there.
    """
    out = run.config.out
    with ExitStack() as held:

        def take(folder: str) -> None:
            held.enter_context(exclusive(folder))
            _check_out(folder, run.config.resume)  # again: another run may have ended since
            checkpoint.sweep(folder)

        if out is not None:
            run.world.on_first(lambda: take(out))
        yield


def check_memory(parameters: int, world: World, backend: Backend, layout: Layout | None = None) -> None:
    """Raise ValueError unless weights, gradients and AdamW's two moments fit into memory, in fp32.

    On the CPU the ranks of this host share its memory; elsewhere each has a device. Every rank builds the
    whole model, which the layout then divides: its weights must fit in any case.
    """
    if backend.device.type == "cpu":
        copies, free = int(os.environ.get("LOCAL_WORLD_SIZE", world.size)), available_memory()
    else:
        stats = backend.memory_stats()
        if "total" not in stats:
            return  # nothing is known of this device's memory
        copies, free = 1, stats["total"] - stats.get("current", 0)
    needed = max(4.0, state_bytes(layout or Layout())) * parameters * copies
    if needed > free:
        raise ValueError(
            f"training {parameters / 1e6:,.0f} million parameters on {copies} rank(s) takes at least "
            f"{needed / 1e9:.1f} GB for weights, gradients and AdamW, and {free / 1e9:.1f} GB are free; "
            "choose a smaller model or fewer ranks"
        )


def state_bytes(layout: Layout) -> float:
    """Bytes of fp32 weights (4), gradients (4) and moments (8) that a rank keeps of each parameter."""
    shards = layout.data // layout.replicas
    weights = 4 / (shards if layout.zero == 3 or layout.fsdp else 1)
    gradients = 4 / (shards if layout.zero >= 2 or layout.fsdp else 1)
    moments = 8 / (shards if layout.zero >= 1 or layout.fsdp else 1)
    return (weights + gradients + moments) / (layout.tensor * layout.pipeline)


def check_seq_len(seq_len: int, limit: int | None) -> None:
    """Raise ValueError when rows are longer than the model has positions (None: nothing limits them)."""
    if limit is not None and seq_len > limit:
        raise ValueError(
            f"seq_len {seq_len} is longer than the model's {limit} positions; legal: 1 to {limit}"
        )


def check_tokenizer(tokenizer: TextTokenizer, recipe: Recipe) -> None:
    """Raise ValueError when the tokenizer is of another family, makes ids that the model has no row for, or
    pads with another id than the model expects.

    A model with more rows than tokens is fine: the last rows stay unused, as when a vocabulary is padded.
    """
    vocab_size = recipe.shape.vocab_size
    if not isinstance(tokenizer, recipe.tokenizer):
        raise ValueError(
            f"a {recipe.family.__name__} reads text by {recipe.tokenizer.__name__}, not by "
            f"{type(tokenizer).__name__}"
        )
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} tokens and the model only {vocab_size}; use a "
            f"tokenizer of at most {vocab_size}, or a model with vocab_size={tokenizer.vocab_size}"
        )
    pad = getattr(recipe.shape, "pad_token", None)
    if pad is not None and tokenizer.pad != pad:
        raise ValueError(
            f"the tokenizer pads with id {tokenizer.pad} and the model takes {pad} for padding; build "
            f"the model with pad_token={tokenizer.pad}"
        )


def _tokenizer(config: TrainConfig, recipe: Recipe, text: Corpus) -> TextTokenizer:
    if config.tokenizer is not None:
        return recipe.tokenizer.load(config.tokenizer)
    return recipe.tokenizer.train_cached(text.documents, recipe.shape.vocab_size)


def check_folder(config: TrainConfig, world: World) -> None:
    """Raise on every rank unless the folder `out` can be written and holds what `resume` says, of a run with
    these settings. Nothing in it changes."""
    if config.out is None:
        return
    out = config.out

    def check() -> None:
        _check_out(out, config.resume)
        if config.resume:
            check_settings(checkpoint.newest_whole(out).settings, config)

    world.on_first(check)


def _check_out(out: str, resume: bool) -> None:
    if resume:
        checkpoint.latest(out)
    check_writable(out)
    if not resume and (found := checkpoint.steps(out)):
        raise ValueError(
            f"{out} holds a run already, with checkpoints up to step {found[-1]}; set resume "
            "(--resume) to go on with it, or choose another folder"
        )
