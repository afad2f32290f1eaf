"""What a BERT is good for once it is trained: classes and search, beside counts of words, and what it costs.

    python -m fmlab.train.encoder_case runs/bert/model runs/distilbert/model --out results.jsonl
    kept()                  the results of the committed runs, with their commands

Tasks: the module of a docstring (10 classes), and the section of Python's language reference that a title
belongs to.
"""

import copy
import hashlib
import json
import time
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import torch
import tyro

from fmlab.backends import get_backend
from fmlab.data import (
    ExampleSampler,
    LabelledTexts,
    MaskedSampler,
    TextTokenizer,
    WordPiece,
    class_examples,
    encode,
    load,
)
from fmlab.data.passages import load_passages
from fmlab.models import BERT
from fmlab.models.families import family_of
from fmlab.models.minilm import sentence_embedding
from fmlab.models.presets import find_preset
from fmlab.objectives.labelled import Classification, MaskedLM
from fmlab.train import checkpoint
from fmlab.train.adapt import fine_tune
from fmlab.train.baselines import bm25_scores, retrieval_of, tfidf_accuracy, tfidf_scores
from fmlab.train.classify import judge_classes
from fmlab.train.config import TrainConfig
from fmlab.train.distil import load_teacher
from fmlab.train.embed import TextEncoder
from fmlab.train.evaluate import evaluate
from fmlab.train.recipes import recipe_for
from fmlab.train.retrieval import Retrieval

LENGTH, ROWS, CURVE = 64, 16, 20  # CURVE: points that are kept of the training losses
COMMITTED = "encoder_case.jsonl"


def texts() -> tuple[LabelledTexts, LabelledTexts]:
    """The docstrings to learn from and those to test on."""
    corpus = load("docstrings")
    assert isinstance(corpus, LabelledTexts)
    return corpus.split(0.2)


def accuracy_after(
    model: BERT, tokenizer: TextTokenizer, steps: int = 150, lr: float = 5e-4, seed: int = 0
) -> float:
    """Share of the test docstrings whose class a copy of the encoder finds after fine-tuning all of it."""
    learn, test = texts()
    torch.manual_seed(seed)
    tuned = copy.deepcopy(model).with_heads("classifier", num_classes=len(learn.classes))
    length = min(LENGTH, model.config.max_length)
    rows = [class_examples(part, tokenizer, length) for part in (learn, test)]
    fine_tune(tuned, ExampleSampler(rows[0], tokenizer.pad, ROWS, seed), Classification(), steps, lr)
    judged = judge_classes(tuned, ExampleSampler(rows[1], tokenizer.pad, ROWS).evaluation())
    return judged.accuracy.value


def search(model: BERT, tokenizer: TextTokenizer) -> Retrieval:
    """How well the mean of the hidden states finds the section of a title."""
    passages = load_passages()
    encoder = TextEncoder(model, tokenizer, sentence_embedding, min(128, model.config.max_length))
    scores = encoder(passages.firsts) @ encoder(passages.seconds).T
    return retrieval_of(scores, range(len(passages)))


def counted_words() -> dict[str, float]:
    """The same two tasks without a network."""
    passages = load_passages()
    both = (passages.firsts, passages.seconds)
    return {
        "accuracy": tfidf_accuracy(*texts()),
        "MRR, TF-IDF": retrieval_of(tfidf_scores(*both), range(len(passages))).mrr,
        "MRR, BM25": retrieval_of(bm25_scores(*both), range(len(passages))).mrr,
    }


@torch.no_grad()
def faster(teacher: BERT, student: BERT, rows: int = 8, length: int = LENGTH, pairs: int = 15) -> float:
    """How many times faster the student's encoder is than the teacher's: the median over passes in turn."""
    models = [model.with_heads("encoder").eval() for model in (teacher, student)]
    ids = torch.randint(5, teacher.config.vocab_size, (rows, length))
    ratios = []
    for _ in range(pairs + 2):
        seconds = []
        for model in models:
            start = time.perf_counter()
            model(ids)
            seconds.append(time.perf_counter() - start)
        ratios.append(seconds[0] / seconds[1])
    return sorted(ratios[2:])[pairs // 2]


def digest(folder: Path) -> str:
    """The first 12 hexadecimal digits of the SHA-256 of the weights in a folder."""
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()[:12]


def kept() -> list[dict[str, Any]]:
    """The committed results: one entry for each run, and one for the counted words."""
    text = resources.files("fmlab.train").joinpath(COMMITTED).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def command_of(settings: dict[str, Any]) -> str:
    """The command line of a run on one device, from the settings in its checkpoint."""
    usual = TrainConfig().to_dict() | {"log_every": settings["log_every"], "layout": settings["layout"]}
    model = settings["model"]
    shape = find_preset(model, dict(family_of(model).PRESETS))
    usual["lr"] = recipe_for(TrainConfig(model=model)).lr_factor / shape["hidden_size"]
    changed = {name: value for name, value in settings.items() if usual.get(name, value) != value}
    changed.pop("model", None)
    options = [f"--{name.replace('_', '-')} {value}" for name, value in changed.items()]
    return " ".join(["fmlab train", model, *options])


def measure(folder: Path, seeds: Sequence[int]) -> dict[str, Any]:
    """All that is kept of a run: `folder` is the model in its folder `out`."""
    model, tokenizer = load_teacher(folder), WordPiece.load(folder)
    state = checkpoint.run_state(checkpoint.latest(folder.parent))
    part = max(1, len(state.losses) // CURVE)
    held_out = load(state.settings["corpus"]).split(state.settings["validation"])[1]
    sampler = MaskedSampler(encode(held_out, tokenizer), tokenizer, LENGTH, ROWS)
    return {
        "model": folder.parent.name,
        "command": command_of(state.settings),
        "seed": state.settings["seed"],
        "steps": state.step,
        "curve": [round(sum(state.losses[i : i + part]) / part, 3) for i in range(0, part * CURVE, part)],
        "held out": evaluate(model, sampler.evaluation(), MaskedLM(), get_backend("cpu")).loss,
        "weights": digest(folder),
        "parameters": sum(p.numel() for p in model.parameters()),
        "accuracy": [accuracy_after(model, tokenizer, seed=seed) for seed in seeds],
        "MRR": search(model, tokenizer).mrr,
    }


def main(
    folders: tyro.conf.Positional[tuple[Path, ...]],
    out: Path,
    seeds: int = 3,
    not_tuned: tuple[Path, ...] = (),
) -> None:
    """Measure the models in these folders and the counted words. not_tuned: without fine-tuning."""
    torch.set_num_threads(1)
    lines = [{"model": "counted words", **counted_words()}]
    lines += [measure(folder, range(seeds)) for folder in folders]
    lines += [measure(folder, ()) for folder in not_tuned]
    out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    print(out.read_text())


if __name__ == "__main__":
    tyro.cli(main)
