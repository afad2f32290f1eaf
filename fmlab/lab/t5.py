"""What chapter 3.5 runs: a small T5, its step on every device, and what two ranks send each other."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fmlab.backends import Backend
from fmlab.data import Corpus, SpanSampler, Unigram, encode, load
from fmlab.meter import link_traffic, traffic
from fmlab.models import T5, T5Config
from fmlab.objectives import Seq2SeqLM
from fmlab.parallel import Layout, parallelize
from fmlab.parallel.select import EngineChoice
from fmlab.planner import ModelShape, flops_per_step
from fmlab.train import TrainConfig, TrainResult, adamw, train

VOCABULARY, LENGTH, ROWS = 2048, 64, 8
SHAPE: dict[str, Any] = dict(
    vocab_size=VOCABULARY, num_layers=2, hidden_size=64, num_heads=4, head_size=16, ffn_size=256
)


class Kept(dict[str, Any]):
    """Results by name that a cell hands on; what it shows of them are the names alone."""

    def __repr__(self) -> str:
        return "kept: " + ", ".join(self)


def small_t5(seed: int = 0, **changes: Any) -> T5:
    """Two layers of width 64 in each stack, four heads."""
    torch.manual_seed(seed)
    return T5(T5Config(**(SHAPE | changes)))


def manual() -> tuple[Corpus, Unigram]:
    """Python's manual, and a Unigram of 2,048 pieces made from it."""
    corpus = load("python-docs")
    return corpus, Unigram.train_cached(corpus.documents, VOCABULARY)


@cache
def span_batches(count: int, rows: int = ROWS) -> list[dict[str, Tensor]]:
    """Rows of Python's manual with hidden spans, and what was hidden."""
    corpus, tokenizer = manual()
    sampler = SpanSampler(encode(corpus, tokenizer), tokenizer, LENGTH, rows)
    return [sampler.batch(step) for step in range(count)]


def random_batches(count: int, rows: int = ROWS, length: int = 24) -> list[dict[str, Tensor]]:
    """Random pieces in and half as many out, some without a target: for what needs no text."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(count):
        ids = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
        labels = torch.randint(3, VOCABULARY, (rows, length // 2), generator=generator)
        labels[0, -3:] = -100
        batches.append({"input_ids": ids, "labels": labels})
    return batches


def pretrain(model: T5, corpus: Corpus, tokenizer: Unigram, steps: int) -> TrainResult:
    """What `fmlab train` does, on a model of your own: new spans for every batch."""
    settings: dict[str, Any] = dict(batch_size=16, seq_len=LENGTH, lr=6e-3, eval_every=steps // 4)
    settings |= dict(objective="span", log_every=0, backend="cpu", steps=steps)
    return train(TrainConfig(**settings), model=model, tokenizer=tokenizer, corpus=corpus)


# region program
def step_losses(backend: Backend, steps: int = 3) -> list[float]:
    """The losses of `steps` steps of the small T5 on a backend, in bf16."""
    model = backend.to_device(small_t5())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for batch in span_batches(steps):
        targets = int((batch["labels"] != -100).sum())  # counted on the host, before the batch moves
        batch = backend.to_device(dict(batch))
        with backend.step():
            with backend.autocast("bf16"):
                loss = model(**batch)["loss_sum"] / targets
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# endregion


def losses_under(
    layout: Layout,
    batches: Sequence[Mapping[str, Tensor]],
    engine: EngineChoice = "fmlab",
    model: T5 | None = None,
    lr: float = 6e-3,
) -> list[float]:
    """The loss of each step in fp64; every rank of the layout calls it."""
    whole = small_t5() if model is None else model
    run = parallelize(whole.double(), layout, Seq2SeqLM(), adamw(lr), engine, max_grad_norm=1.0)
    try:
        return [run.step(layout.split(dict(batch), 0)).loss for batch in batches]
    finally:
        run.close()


def sent_in_a_step(layout: Layout, batch: Mapping[str, Tensor], rank: int, **shape: Any) -> dict[str, int]:
    """Payload bytes of a step on this rank: of its collectives, and of its messages to another rank."""
    run = parallelize(small_t5(**shape), layout, Seq2SeqLM(), adamw(1e-3))
    try:
        mine = layout.split(dict(batch), layout.data_rank(rank))
        run.step(mine)  # the first step also compares what the ranks were given
        with traffic() as together, link_traffic() as links:
            run.step(mine)
    finally:
        run.close()
    collectives = sum(size for op, (_, size) in together.by_op().items() if op not in ("send", "recv"))
    return {"collectives": collectives, "messages": sum(links.bytes.values())}


def flops_of_run(shape: ModelShape, tokens: float, lengths: Mapping[str, int]) -> float:
    """Model FLOPs of a training run of so many tokens, inputs and outputs counted."""
    return flops_per_step(shape, 1, lengths, "6nd").model * tokens / sum(lengths.values())
