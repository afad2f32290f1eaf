"""Everything a run needs, made and checked before its first step."""

import dataclasses
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fmlab.backends import Backend
from fmlab.data import ByteBPE, Corpus, Tokens, TokenSampler, encode, load
from fmlab.models import GPT, GPTConfig
from fmlab.models.presets import GPT_PRESETS, find_preset
from fmlab.objectives import CausalLM
from fmlab.parallel import Engine, parallelize
from fmlab.ranks import available_memory
from fmlab.storage import check_writable, exclusive
from fmlab.train import checkpoint
from fmlab.train.config import TrainConfig
from fmlab.train.launch import World
from fmlab.train.optim import adamw


@dataclass
class Run:
    """The parts of a run. `config` is complete: the layout is for the ranks there are, lr is a number."""

    config: TrainConfig
    world: World
    backend: Backend
    tokenizer: ByteBPE
    engine: Engine
    objective: CausalLM
    sampler: TokenSampler
    validation: Tokens
    parameters: int


def prepare(
    config: TrainConfig,
    world: World,
    backend: Backend,
    model: nn.Module | None = None,
    tokenizer: ByteBPE | None = None,
    corpus: Corpus | None = None,
) -> Run:
    """Check the settings against each other and build the run; cheap checks first.

    Raises ValueError, StorageError, ImportError or ConnectionError that says what is legal.
    """
    shape: Any = model.config if model is not None else GPTConfig(**find_preset(config.model, GPT_PRESETS))
    layout, lr = config.layout_for(world.size), config.lr_for(shape.hidden_size)
    config = dataclasses.replace(config, layout=layout, lr=lr)
    check_seq_len(config.seq_len, shape.max_positions)
    if model is None:
        with torch.device("meta"):
            planned = GPT(shape).num_parameters()
        world.on_first(lambda: check_memory(planned, world, backend))
    if config.layout.precision not in backend.precisions:
        backend.autocast(config.layout.precision)  # type: ignore[arg-type]  # raises, naming the legal ones
    _check_folder(config, world)
    corpus = corpus or load(config.corpus)
    train_text, validation_text = corpus.split(config.validation)
    tokenizer = tokenizer or _tokenizer(config, train_text, shape.vocab_size)
    check_vocabulary(tokenizer, shape.vocab_size)

    if model is None:
        backend.seed(config.seed)  # the same on every rank: identical weights at the start
        model = GPT(shape)
    parameters = sum(p.numel() for p in model.parameters())
    if config.out is not None:
        out, keep = config.out, config.keep
        world.on_first(lambda: checkpoint.check_space(out, parameters, keep))
    objective = CausalLM()
    engine = parallelize(
        model,
        config.layout,
        objective,
        adamw(lr, (config.beta1, config.beta2), config.weight_decay),
        engine=config.engine,
        backend=backend,
        max_grad_norm=config.clip or None,
    )
    sampler = TokenSampler(
        encode(train_text, tokenizer),
        config.seq_len,
        config.batch_size,
        config.seed,
        world.rank,
        world.size,
        config.pack_documents,
    )
    validation = encode(validation_text, tokenizer)
    return Run(config, world, backend, tokenizer, engine, objective, sampler, validation, parameters)


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


def check_memory(parameters: int, world: World, backend: Backend) -> None:
    """Raise ValueError unless weights, gradients and AdamW's two moments fit into memory, in fp32.

    On the CPU the ranks of this host share its memory; elsewhere each has a device.
    """
    if backend.device.type == "cpu":
        copies, free = int(os.environ.get("LOCAL_WORLD_SIZE", world.size)), available_memory()
    else:
        stats = backend.memory_stats()
        copies, free = 1, stats["total"] - stats["current"]
    needed = 16 * parameters * copies
    if needed > free:
        raise ValueError(
            f"training {parameters / 1e6:,.0f} million parameters on {copies} rank(s) takes at least "
            f"{needed / 1e9:.1f} GB for weights, gradients and AdamW, and {free / 1e9:.1f} GB are free; "
            "choose a smaller model or fewer ranks"
        )


def check_seq_len(seq_len: int, max_positions: int) -> None:
    """Raise ValueError when sequences are longer than the model has positions."""
    if seq_len > max_positions:
        raise ValueError(
            f"seq_len {seq_len} is longer than the model's {max_positions} positions; "
            f"legal: 1 to {max_positions}"
        )


def check_vocabulary(tokenizer: ByteBPE, vocab_size: int) -> None:
    """Raise ValueError when the tokenizer makes ids that the model has no row for.

    A model with more rows than tokens is fine: the last rows stay unused, as when a vocabulary is padded.
    """
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} tokens and the model only {vocab_size}; use a "
            f"tokenizer of at most {vocab_size}, or a model with vocab_size={tokenizer.vocab_size}"
        )


def _tokenizer(config: TrainConfig, text: Corpus, vocab_size: int) -> ByteBPE:
    if config.tokenizer is not None:
        return ByteBPE.load(config.tokenizer)
    return ByteBPE.train_cached(text.documents, vocab_size)


def _check_folder(config: TrainConfig, world: World) -> None:
    if config.out is None:
        return
    out = config.out
    world.on_first(lambda: _check_out(out, config.resume))


def _check_out(out: str, resume: bool) -> None:
    if resume:
        checkpoint.latest(out)
    check_writable(out)
    if not resume and (found := checkpoint.steps(out)):
        raise ValueError(
            f"{out} holds a run already, with checkpoints up to step {found[-1]}; set resume "
            "(--resume) to go on with it, or choose another folder"
        )
