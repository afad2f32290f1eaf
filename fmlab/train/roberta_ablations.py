"""What RoBERTa changed in BERT's recipe (Liu et al. 2019, arXiv:1907.11692, section 4), one change at a time.

    python -m fmlab.train.roberta_ablations --out runs.jsonl     all, some minutes of one core
    measured()                                                   the results of that command, as committed
    run_arm("static masks", seed=0, steps=60)                    one of them, now, in seconds

All arms read the same number of tokens of Python's manual and have the same two layers of width 64. All are
judged alike: masked tokens of full rows of text that none has read, with the same masks.
"""

import json
import math
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import torch
import tyro

from fmlab.backends import get_backend
from fmlab.data import Corpus, MaskedSampler, RoBERTaBPE, TextTokenizer, WordPiece, encode, load
from fmlab.data.batch import IGNORE
from fmlab.models import BERT, RoBERTa
from fmlab.objectives import MaskedLM
from fmlab.train.config import TrainConfig
from fmlab.train.evaluate import evaluate
from fmlab.train.loop import train

VOCABULARY, LENGTH, BATCH, STEPS, SEEDS = 2048, 64, 32, 300, 3
SHAPE: Mapping[str, Any] = dict(
    vocab_size=VOCABULARY, max_positions=LENGTH + 2, num_layers=2, hidden_size=64, num_heads=2, init_std=0.09
)
LR = 4e-3
COMMITTED = "roberta_ablations.jsonl"
RECIPE = "the recipe"
#: name -> settings that differ from the recipe: dynamic masks, full rows, no sentence pairs, WordPiece
ARMS: Mapping[str, dict[str, Any]] = {
    RECIPE: {},
    "static masks": {"mask_versions": 1},
    "10 versions of masks": {"mask_versions": 10},
    "sentence pairs, next-sentence loss": {"objective": "next-sentence"},
    "documents kept apart": {"pack_documents": True},
    "batch 4x, steps / 4, rate 2x": {"batch_size": 4 * BATCH, "steps": STEPS // 4, "lr": 2 * LR},
    "byte BPE": {"model": "roberta-tiny"},
}


@dataclass(frozen=True)
class Ablation:
    """One run.

    loss:      nats a hidden token; per_character: nats a hidden character, for unlike vocabularies
    tokens:    read in training, padding included
    """

    arm: str
    seed: int
    loss: float
    per_character: float
    tokens: int
    steps: int
    seconds: float


def run_arm(arm: str, seed: int = 0, steps: int = STEPS) -> Ablation:
    """Train one arm and judge it. steps: of the recipe; an arm with larger batches makes fewer.

    Raises ValueError for an arm that there is not.
    """
    if arm not in ARMS:
        raise ValueError(f"there is no arm {arm!r}; legal are {', '.join(ARMS)}")
    texts, held_out = _texts()
    changes = dict(ARMS[arm])
    settings: dict[str, Any] = dict(objective="masked", batch_size=BATCH, lr=LR) | changes
    settings["steps"] = steps * BATCH // settings["batch_size"]
    family: type[BERT] = RoBERTa if changes.get("model") else BERT
    tokenizer = _tokenizer(family is RoBERTa)
    torch.manual_seed(seed)
    heads = "pretraining" if settings["objective"] == "next-sentence" else "masked"
    model = family(family.CONFIG(**SHAPE, heads=heads))
    start = time.perf_counter()
    config = TrainConfig(seq_len=LENGTH, seed=seed, eval_every=0, log_every=0, backend="cpu", **settings)
    result = train(config, model=model, tokenizer=tokenizer, corpus=texts)
    seconds = time.perf_counter() - start
    loss, per_character = judge(result.model, tokenizer, held_out)
    tokens = config.steps * config.batch_size * LENGTH
    return Ablation(arm, seed, loss, per_character, tokens, config.steps, round(seconds, 1))


def judge(model: Any, tokenizer: TextTokenizer, text: Corpus) -> tuple[float, float]:
    """(nats a hidden token, nats a hidden character) on full rows of `text`, with masks that never change."""
    sampler = MaskedSampler(encode(text, tokenizer), tokenizer, LENGTH, BATCH)
    found = evaluate(model, sampler.evaluation(), MaskedLM(), get_backend("cpu"))
    hidden = [i for b in sampler.evaluation() for i in b["labels"][b["labels"] != IGNORE].tolist()]
    lengths = [len(tokenizer.decode([i]).removeprefix("##").strip()) for i in range(tokenizer.vocab_size)]
    characters = sum(max(1, lengths[i]) for i in hidden)
    return found.loss, found.loss * found.count / characters


@cache
def _texts() -> tuple[Corpus, Corpus]:
    """For training, a twentieth of which its own split keeps, and for judging."""
    return load("python-docs").split(0.1)


@cache
def _tokenizer(byte_bpe: bool) -> TextTokenizer:
    kind: type[TextTokenizer] = RoBERTaBPE if byte_bpe else WordPiece
    return kind.train_cached(_texts()[0].documents, VOCABULARY)


def measured() -> list[Ablation]:
    """The committed results. The file's first line, which says where they were measured, is `provenance`."""
    return [Ablation(**row) for row in _lines()[1:]]


def provenance() -> dict[str, Any]:
    """Command, date, machine and versions of the committed results."""
    return _lines()[0]


def _lines() -> list[dict[str, Any]]:
    text = resources.files("fmlab.train").joinpath(COMMITTED).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


@dataclass(frozen=True)
class Compared:
    """An arm against the recipe, over the same seeds.

    gain:  mean over seeds of (recipe's loss - arm's loss), nats a hidden token: above 0, the arm is better
    noise: half of a 95 % interval of that mean (Student's t over the seeds' differences)
    """

    arm: str
    gain: float
    noise: float

    @property
    def verdict(self) -> str:
        if abs(self.gain) <= self.noise:
            return "within noise"
        return "better" if self.gain > 0 else "worse"


#: 97.5 % quantiles of Student's t by degrees of freedom
_STUDENT = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


# region compared
def compared(runs: Sequence[Ablation], arm: str, by: str = "loss") -> Compared:
    """The differences from the recipe, seed by seed. Raises ValueError for fewer than two common seeds."""
    losses = {(run.arm, run.seed): getattr(run, by) for run in runs}
    seeds = sorted(seed for name, seed in losses if name == arm and (RECIPE, seed) in losses)
    if len(seeds) < 2:
        raise ValueError(
            f"{arm!r} and {RECIPE!r} have {len(seeds)} seeds in common; noise needs two at least"
        )
    gains = torch.tensor([losses[RECIPE, seed] - losses[arm, seed] for seed in seeds], dtype=torch.float64)
    quantile = _STUDENT.get(len(seeds) - 1, 2.0)
    return Compared(arm, gains.mean().item(), quantile * gains.std().item() / math.sqrt(len(seeds)))


# endregion


def main(out: Path, seeds: int = SEEDS, steps: int = STEPS) -> None:
    """Run all arms with that many seeds and write one line of JSON for each."""
    torch.set_num_threads(1)
    module = "fmlab.train.roberta_ablations"
    first = {
        "command": f"python -m {module} --out {COMMITTED} --seeds {seeds} --steps {steps}",
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, one core",
        "versions": f"torch {torch.__version__}",
    }
    lines = [json.dumps(first)]
    for seed in range(seeds):
        for arm in ARMS:
            run = run_arm(arm, seed, steps)
            lines.append(json.dumps(asdict(run)))
            print(lines[-1], flush=True)
    out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    tyro.cli(main)
