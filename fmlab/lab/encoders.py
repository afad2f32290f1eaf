"""What chapter 3.3 runs: a small BERT, its step on every device, and the faults that encoders meet."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fmlab.backends import Backend
from fmlab.chips import host
from fmlab.data import Corpus, TextTokenizer, WordPiece, load
from fmlab.models import BERT
from fmlab.objectives import MaskedLM
from fmlab.parallel import Layout, parallelize
from fmlab.train import TrainConfig, TrainResult, lamb, train

VOCABULARY, LENGTH, ROWS = 2048, 64, 32
SHAPE: dict[str, Any] = dict(
    vocab_size=VOCABULARY, max_positions=LENGTH, num_layers=2, hidden_size=64, num_heads=2, init_std=0.09
)


def small_bert(seed: int = 0, **changes: Any) -> BERT:
    """Two layers of width 64 with a masked-token head."""
    torch.manual_seed(seed)
    return BERT(BERT.CONFIG(**(SHAPE | {"heads": "masked"} | changes)))


def manual() -> tuple[Corpus, WordPiece]:
    """Python's manual, and a WordPiece of 2,048 tokens made from it."""
    corpus = load("python-docs")
    return corpus, WordPiece.train_cached(corpus.documents, VOCABULARY)


def pretrain(
    model: BERT,
    corpus: Corpus,
    tokenizer: TextTokenizer,
    steps: int,
    callbacks: Sequence[Any] = (),
    **changes: Any,
) -> TrainResult:
    """What `fmlab train` does, on a model of your own: masked tokens, new masks for every batch."""
    settings: dict[str, Any] = dict(batch_size=ROWS, seq_len=LENGTH, lr=4e-3, eval_every=steps // 4)
    settings |= dict(objective="masked", log_every=0, backend="cpu", steps=steps) | changes
    config = TrainConfig(**settings)
    return train(config, model=model, tokenizer=tokenizer, corpus=corpus, callbacks=callbacks)


def masked_batch(seed: int = 0, rows: int = 4, length: int = 32) -> dict[str, Tensor]:
    """Random tokens of which 15 % are targets."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, VOCABULARY, (rows, length), generator=generator)
    hidden = torch.rand(rows, length, generator=generator) < 0.15
    return {"input_ids": ids.masked_fill(hidden, 4), "labels": ids.masked_fill(~hidden, -100)}


# region program
def step_losses(backend: Backend, steps: int = 3) -> list[float]:
    """The losses of `steps` steps of the small BERT on a backend, in bf16."""
    model = backend.to_device(small_bert())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        batch = masked_batch(step)
        targets = int((batch["labels"] != -100).sum())  # counted on the host, before the batch moves
        batch = backend.to_device(batch)
        with backend.step():
            with backend.autocast("bf16"):
                loss = model(**batch)["loss_sum"] / targets
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# endregion


def lamb_weights(layout: Layout, places: Sequence[int] = (0,)) -> dict[str, Tensor]:
    """The weights after two steps of LAMB under a layout; every rank calls it. places: of the data axis."""
    engine = parallelize(small_bert(), layout, MaskedLM(), lamb(0.02), max_grad_norm=1.0)
    try:
        for step in range(2):
            engine.step(layout.split(masked_batch(step), places[0]))
        return {name: p.clone() for name, p in engine.full_params().items()}
    finally:
        engine.close()


def hourly(where: str, chips: int) -> float | None:
    """Dollars an hour for so many chips on hosts called `where`; None where no price is known.

    Raises ValueError for an unknown host.
    """
    machine = host(where)
    return chips * machine.usd_per_chip_hour() if machine.prices else None


@torch.no_grad()
def leak(model: BERT, mask_of_rows: bool) -> float:
    """How far a real token's hidden state moves when only a padded token changes; 0 if the mask is right.

    mask_of_rows: the fault, a padding mask laid over the queries instead of the keys.
    """
    ids = torch.randint(5, VOCABULARY, (1, 10), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1] * 6 + [0] * 4])
    other = ids.clone()
    other[0, 7] = 77
    given = {} if mask_of_rows else {"attention_mask": mask}  # keys seen by all: what the fault amounts to
    hidden = [model.eval()(tokens, **given)["hidden"][0, :6] for tokens in (ids, other)]
    return (hidden[0] - hidden[1]).abs().max().item()
