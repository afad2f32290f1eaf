"""A handful of small GPTs, each trained on several amounts of text: the points a scaling law is fitted to.

    python -m fmlab.train.scaling_sweep --out runs.jsonl      all of them, 5 minutes of one core
    measured()                                                the results of that command, as committed
    run_point("32x3", tokens=131_072)                         one of them, now, in seconds

Each point is a run of its own, with a cosine schedule that ends where its text does: the loss in the middle
of a longer run is that of other learning rates. No text is read twice: at most half a million tokens of 2.8
million.
"""

import hashlib
import json
import math
import os
import platform
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from numpy.typing import NDArray
from torch import nn

from fmlab.data import ByteBPE, Corpus, Tokens, TokenSampler, encode, evaluation_batches, load
from fmlab.models import GPT
from fmlab.models.gpt import GPTConfig
from fmlab.train.config import TrainConfig
from fmlab.train.context import loss_by_position
from fmlab.train.loop import TrainResult, train
from fmlab.train.samples import PROMPT

CORPUS = "python-docs+python-source"
VOCABULARY = 512  # small, so that most parameters of a small model are not in its table
LENGTH = 128
BATCH = 4
VALIDATION = 0.02
#: Highest learning rate times width: the better of two or three tried at widths 16, 64 and 128.
LR_WIDTH = 0.18
#: Standard deviation of the first weights times the root of the width: GPT-2's 0.02 at its width of 768. The
#: same 0.02 at a width of 24 costs a quarter of a million tokens before more is learnt than single tokens.
INIT_ROOT_WIDTH = 0.5
COMMITTED = "scaling_runs.jsonl"


@dataclass(frozen=True)
class Size:
    """Shape of a GPT of the sweep."""

    width: int
    layers: int
    heads: int

    def build(self) -> GPT:
        std = INIT_ROOT_WIDTH / math.sqrt(self.width)
        return GPT(GPTConfig(VOCABULARY, LENGTH, self.layers, self.width, self.heads, init_std=std))


#: width x layers -> shape; the last is held out: the law is to predict it
SIZES: Mapping[str, Size] = {
    "16x2": Size(16, 2, 2),
    "24x2": Size(24, 2, 2),
    "32x3": Size(32, 3, 2),
    "48x3": Size(48, 3, 3),
    "64x4": Size(64, 4, 4),
    "128x4": Size(128, 4, 4),
}
HELD_OUT = "128x4"
TOKENS = (131_072, 262_144, 524_288)


@dataclass(frozen=True)
class Point:
    """One run of the sweep.

    parameters:  without the tables of tokens and positions, as Kaplan et al. (2020) count
    loss:        nats a token, over the whole validation text
    by_position: mean loss of the validation tokens at each position of a row, [LENGTH]
    curve:       training loss, means over 16 equal parts of the run
    cpu_seconds: of the whole process, training and validation
    weights:     SHA-256 of the trained weights, in the order of their names
    sample:      what it writes after samples.PROMPT
    """

    size: str
    parameters: int
    all_parameters: int
    tokens: int
    seed: int
    loss: float
    bits_per_byte: float
    by_position: list[float] = field(repr=False)
    curve: list[float] = field(repr=False)
    cpu_seconds: float
    wall_seconds: float
    weights: str = field(repr=False)
    sample: str = field(repr=False)
    made_on: dict[str, str] = field(repr=False)


@cache
def _corpus() -> Corpus:
    return load(CORPUS)


@cache
def texts() -> tuple[Corpus, Corpus, ByteBPE]:
    """Training text, validation text (Python's manual and library source) and their tokenizer."""
    training, validation = _corpus().split(VALIDATION)
    return training, validation, ByteBPE.train_cached(training.documents, VOCABULARY)


def num_bytes(text: Corpus) -> int:
    """Bytes of all documents in UTF-8, and one for the end of each: what a model of it must tell."""
    return sum(len(document.encode()) + 1 for document in text.documents)


def settings(size: Size, tokens: int, seed: int = 0, **more: Any) -> TrainConfig:
    """How the sweep trains: batches of 4 x 128, AdamW, one cosine to a tenth."""
    fixed: dict[str, Any] = dict(batch_size=BATCH, seq_len=LENGTH, validation=VALIDATION, eval_every=0)
    return TrainConfig(
        **fixed | dict(log_every=0, backend="cpu") | more,
        corpus=CORPUS,
        steps=tokens // (BATCH * LENGTH),
        lr=LR_WIDTH / size.width,
        seed=seed,
    )


def train_size(size: Size, tokens: int, seed: int = 0, **more: Any) -> TrainResult:
    """Train one size on so many tokens; `more`: other settings of TrainConfig."""
    torch.manual_seed(seed)
    corpus = load(CORPUS)
    return train(
        settings(size, tokens, seed, **more), model=size.build(), tokenizer=texts()[2], corpus=corpus
    )


def run_point(name: str, tokens: int, seed: int = 0) -> tuple[Point, TrainResult]:
    """Train the size called `name` and measure it. Raises ValueError for an unknown size, and for fewer
    tokens than a batch."""
    if name not in SIZES:
        raise ValueError(f"unknown size {name!r}; legal: {', '.join(SIZES)}")
    if tokens < BATCH * LENGTH:
        raise ValueError(f"tokens={tokens} is less than a batch; legal: {BATCH * LENGTH} and more")
    wall, cpu = time.perf_counter(), time.process_time()
    result = train_size(SIZES[name], tokens, seed)
    model = result.model
    assert isinstance(model, GPT)
    validation = encode(texts()[1], texts()[2])
    by_position, count_l = loss_by_position(model, validation_batches(validation))
    loss_sum = float((by_position * count_l).sum())
    loss = loss_sum / float(count_l.sum())
    point = Point(
        size=name,
        parameters=model.num_parameters(embeddings=False, positions=False),
        all_parameters=model.num_parameters(),
        tokens=tokens,
        seed=seed,
        loss=loss,
        bits_per_byte=loss_sum / math.log(2) / num_bytes(texts()[1]),
        by_position=[round(value, 4) for value in by_position.tolist()],
        curve=[round(value, 4) for value in in_parts(result.losses, 16)],
        cpu_seconds=round(time.process_time() - cpu, 1),
        wall_seconds=round(time.perf_counter() - wall, 1),
        weights=weights_hash(model),
        sample=result.generate(PROMPT, max_new_tokens=LENGTH - 24, temperature=0.7, top_p=0.9),
        made_on=made_on(),
    )
    return point, result


def text_read(tokens: int, seed: int = 0) -> NDArray[np.int32]:
    """The rows of LENGTH + 1 token ids that a run of the sweep reads, [rows, LENGTH + 1], in its order."""
    training, _, tokenizer = texts()
    sampler = TokenSampler(encode(training, tokenizer), LENGTH, BATCH, seed)
    batches = [sampler.batch(step) for step in range(tokens // (BATCH * LENGTH))]
    rows = [torch.cat([batch["input_ids"], batch["labels"][:, -1:]], 1) for batch in batches]
    return np.asarray(torch.cat(rows).numpy(), dtype=np.int32)


def validation_batches(tokens: Tokens) -> Iterator[dict[str, torch.Tensor]]:
    """The whole validation text in rows of LENGTH, each token a target once."""
    return evaluation_batches(tokens, LENGTH, batch_size=16)


def in_parts(values: list[float], parts: int) -> list[float]:
    """Means over so many equal parts of a list."""
    return [float(part.mean()) for part in torch.tensor(values).tensor_split(min(parts, len(values)))]


def weights_hash(model: nn.Module) -> str:
    """SHA-256 of all weights, by name."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def made_on() -> dict[str, str]:
    """What the numbers depend on: versions, processor, text and tokenizer."""
    training, validation, tokenizer = texts()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "training": training.fingerprint,
        "validation": validation.fingerprint,
        "tokenizer": tokenizer.fingerprint,
    }


def measured() -> list[Point]:
    """The committed points, in the order in which they were run."""
    text = resources.files("fmlab.train").joinpath(COMMITTED).read_text("utf-8")
    return [Point(**json.loads(line)) for line in text.splitlines()]


def planned() -> Iterator[tuple[str, int, int]]:
    """(size, tokens, seed) of each run: the law's points, the size held out, one point with more seeds."""
    fitted = [name for name in SIZES if name != HELD_OUT]
    for tokens in TOKENS:
        yield from ((name, tokens, 0) for name in fitted)
    yield HELD_OUT, TOKENS[-1], 0
    yield from (("32x3", TOKENS[0], seed) for seed in (1, 2, 3))


@dataclass(frozen=True)
class Sweep:
    """Run what is missing in the file `out`, a line of JSON for each point, on one thread."""

    out: Path

    def run(self) -> None:
        torch.set_num_threads(1)
        lines = self.out.read_text().splitlines() if self.out.exists() else []
        done = {(p["size"], p["tokens"], p["seed"]) for p in map(json.loads, lines)}
        for size, tokens, seed in planned():
            if (size, tokens, seed) in done:
                continue
            point, _ = run_point(size, tokens, seed)
            with self.out.open("a") as file:
                file.write(json.dumps(asdict(point)) + os.linesep)
            print(point, flush=True)


if __name__ == "__main__":
    tyro.cli(Sweep).run()
