"""How well a T5 does its tasks, each named in front of the text: translation to French and Chinese, sums.

    fmlab train t5-mini --corpus text-to-text --objective text-to-text --optimizer scaled-adamw --out runs/t5
    python -m fmlab.train.translation_case runs/t5/model --out translations.jsonl
    kept()                  the committed result: T5, and three baselines without a network

The texts are those of JupyterLab's menus and messages. Scores are BLEU on texts whose English was not read in
training; short texts only, and their number is given.
"""

import json
import platform
import re
import time
from collections import Counter
from collections.abc import Callable
from importlib import resources
from itertools import product
from pathlib import Path
from typing import Any

import torch
import tyro

from fmlab.backends import get_backend
from fmlab.data import (
    ExampleSampler,
    TextPairs,
    Unigram,
    answer_of,
    seq2seq_examples,
    short_pairs,
    text_to_text_tasks,
)
from fmlab.data.text_to_text import PREFIXES
from fmlab.models import T5
from fmlab.objectives import Seq2SeqLM
from fmlab.train import checkpoint
from fmlab.train.beam import beam_search
from fmlab.train.encoder_case import command_of, digest
from fmlab.train.evaluate import evaluate
from fmlab.train.generate import generate, prompt_ids
from fmlab.train.metrics import BLEU

#: Language pair -> how sacrebleu cuts the words of an answer.
LANGUAGES = {"en-fr": "13a", "en-zh": "zh"}
COMMITTED = "translation_case.jsonl"
TORCH = torch.__version__.partition("+")[0]
_LONGEST_ANSWER, _CHINESE_PIECES, _CURVE, _READ = 48, 4096, 20, 100
_NO_MATTER = ("save_every", "keep", "tensorboard", "backend", "resume")  # the result is the same
_WORD = re.compile(r"\w+|[^\w\s]")


def bleu(answers: list[str], wanted: list[str], tokenize: str) -> float:
    """Of the whole list, from 0 to 100."""
    score = BLEU(tokenize=tokenize)
    score.add(answers, wanted)
    return score.value


# region dictionary
def dictionary(learn: TextPairs, cut: Callable[[str], list[str]]) -> dict[str, str]:
    """Each word's partner: what stands in its translations and nowhere else, by Dice's coefficient.

    cut: a text of the second language -> its words
    """
    one, other, both = Counter[str](), Counter[str](), Counter[tuple[str, str]]()
    for first, second in learn:
        left, right = set(map(str.lower, _WORD.findall(first))), set(cut(second))
        one.update(left)
        other.update(right)
        both.update(product(left, right))
    best: dict[str, tuple[float, str]] = {}
    for (word, partner), count in both.items():
        dice = 2 * count / (one[word] + other[partner])
        best[word] = max(best.get(word, (0.0, "")), (dice, partner))
    return {word: partner for word, (_, partner) in best.items()}


# endregion


def by_words(known: dict[str, str], text: str, between: str = " ") -> str:
    """The text word by word; a word that is not known stays."""
    return between.join(known.get(word.lower(), word) for word in _WORD.findall(text))


def nearest(learn: TextPairs, text: str) -> str:
    """The translation of the most similar text that is known: the largest share of common words."""
    words = set(_WORD.findall(text.lower()))
    known = [set(_WORD.findall(first.lower())) for first in learn.firsts]
    return learn.seconds[max(range(len(known)), key=lambda i: len(words & known[i]) / len(words | known[i]))]


def baselines(learn: TextPairs, test: TextPairs, name: str) -> dict[str, float]:
    """BLEU of what needs no network: the English itself, word by word, the nearest known text."""
    style, prefix = LANGUAGES[name], PREFIXES[name]
    sources = [text.removeprefix(prefix) for text in test.firsts]
    plain = TextPairs(learn.name, [t.removeprefix(prefix) for t in learn.firsts], learn.seconds, "")
    chinese = style == "zh"
    known = dictionary(plain, pieces_of(plain.seconds) if chinese else _WORD.findall)
    answers = {
        "copy": sources,
        "dictionary": [by_words(known, text, "" if chinese else " ") for text in sources],
        "nearest": [nearest(plain, text) for text in sources],
    }
    return {way: bleu(texts, test.seconds, style) for way, texts in answers.items()}


def pieces_of(texts: list[str]) -> Callable[[str], list[str]]:
    """Chinese has no spaces between words: pieces that are learnt from the texts stand for them."""
    tokenizer = Unigram.train_cached(texts, _CHINESE_PIECES)
    return lambda text: [piece.strip("▁ ") for piece in tokenizer.pieces(text) if piece.strip("▁ ")]


def kept() -> list[dict[str, Any]]:
    """The committed result: one entry for each task, the training first."""
    text = resources.files("fmlab.train").joinpath(COMMITTED).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


# region worth
def worth(model: T5, tokenizer: Unigram, pairs: TextPairs) -> tuple[float, float]:
    """Mean loss of the answers, in nats a token: behind their own questions, and behind those of others.

    What lies between is all that the questions are worth to the model.
    """
    half = len(pairs) // 2
    swapped = TextPairs(pairs.name, pairs.firsts[half:] + pairs.firsts[:half], pairs.seconds, "")
    own, other = (
        evaluate(
            model,
            ExampleSampler(seq2seq_examples(one, tokenizer), tokenizer.pad, 32).evaluation(),
            Seq2SeqLM(),
            get_backend("cpu"),
        ).loss
        for one in (pairs, swapped)
    )
    return own, other


# endregion


def judge(model: T5, tokenizer: Unigram, learn: TextPairs, test: TextPairs, name: str) -> dict[str, Any]:
    """What is kept of a task: the scores, and some answers beside what was wanted."""
    answers = generate(model, tokenizer, test.firsts, greedy=True, max_new_tokens=_LONGEST_ANSWER)
    row: dict[str, Any] = {"task": name, "learnt from": len(learn), "tested on": len(test)}
    row["own question"], row["another question"] = worth(model, tokenizer, test)
    samples = list(zip(test.firsts, answers, test.seconds, strict=True))
    row["samples"] = samples[:: max(1, len(samples) // 8)][:8]  # evenly spread, not chosen
    if name not in LANGUAGES:
        right = [answer_of(a) == answer_of(b) for a, b in zip(answers, test.seconds, strict=True)]
        return row | {"right": sum(right) / len(right)}
    style = LANGUAGES[name]
    prompts = [prompt_ids(model, tokenizer, text) for text in test.firsts]
    beams = beam_search(model, prompts, tokenizer.eos, _LONGEST_ANSWER, num_tokens=tokenizer.vocab_size)
    best = [tokenizer.decode(found[0].ids) for found in beams]
    read = learn.take(range(0, len(learn), max(1, len(learn) // _READ)))
    again = generate(model, tokenizer, read.firsts, greedy=True, max_new_tokens=_LONGEST_ANSWER)
    return (
        row
        | baselines(learn, test, name)
        | {"T5": bleu(answers, test.seconds, style), "T5, 4 beams": bleu(best, test.seconds, style)}
        | {"T5, on texts it read": bleu(again, read.seconds, style)}
    )


def phases(folder: Path) -> list[dict[str, Any]]:
    """Command and curves of the run that left `folder`, after those of the run that it began from, if any."""
    state = checkpoint.run_state(checkpoint.latest(folder.parent))
    init = state.settings["init"]
    before = phases(Path(init)) if init else []
    said = {name: value for name, value in state.settings.items() if name not in _NO_MATTER}
    said |= {"out": f"runs/t5-{len(before) + 1}", "init": f"runs/t5-{len(before)}/model" if init else None}
    part = max(1, len(state.losses) // _CURVE)
    means = [sum(state.losses[i : i + part]) / part for i in range(0, part * _CURVE, part)]
    return [
        *before,
        {
            "command": command_of(said),
            "seed": state.settings["seed"],
            "steps": state.step,
            "curve": [round(loss, 3) for loss in means],
            "held out": [(step, round(loss, 3)) for step, loss, _ in state.validation],
        },
    ]


def main(
    folder: tyro.conf.Positional[Path], out: Path, core_seconds: int | None = None, note: str = ""
) -> None:
    """Judge the model in `folder` on texts that it has not read, each task by itself, beside the baselines.

    Writes one JSON line for the training and one a task. core_seconds: of the training, as `time`
    said. note: what the command does not tell of the run, such as an earlier part on another schedule.
    """
    torch.set_num_threads(1)
    model, tokenizer = T5.from_pretrained(folder).eval(), Unigram.load(folder)
    longest = checkpoint.run_state(checkpoint.latest(folder.parent)).settings["seq_len"]
    lines: list[dict[str, Any]] = [
        {
            "task": "training",
            "phases": phases(folder),
            "note": note,
            "parameters": model.num_parameters(),
            "weights": digest(folder),
            "measured": f"{time.strftime('%-d %B %Y')}, one core ({platform.machine()}), torch {TORCH}",
            "core seconds": core_seconds,
        }
    ]
    for name, parts in text_to_text_tasks().items():
        learn, test = (short_pairs(part, tokenizer, longest) for part in parts)
        lines.append(judge(model, tokenizer, learn, test, name))
    out.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), "utf-8")
    print(out.read_text("utf-8"))


if __name__ == "__main__":
    tyro.cli(main)
