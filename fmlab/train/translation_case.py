"""One T5 for several tasks, each named in front of the text: translation to French and to Chinese, and sums.

    python -m fmlab.train.translation_case --out fmlab/train/translation_case.jsonl
    kept()                  the committed result: T5, and three baselines without a network

The texts are those of JupyterLab's menus and messages. Scores are BLEU on texts whose English was not read in
training; short texts only, and their number is given.
"""

import hashlib
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

from fmlab.data import ExampleSampler, TextPairs, Unigram, load_parallel
from fmlab.data.examples import seq2seq_examples
from fmlab.data.problems import arithmetic
from fmlab.models import T5
from fmlab.objectives.labelled import Seq2SeqLM
from fmlab.parallel import StepResult
from fmlab.train.adapt import fine_tune
from fmlab.train.beam import beam_search
from fmlab.train.generate import generate, prompt_ids
from fmlab.train.metrics import BLEU, Accuracy

#: Language pair -> (what stands in front of the text, how sacrebleu cuts the words of the answer).
LANGUAGES = {"en-fr": ("French: ", "13a"), "en-zh": ("Chinese: ", "zh")}
SUMS = "Sum: "
VOCABULARY, LONGEST, ROWS, TESTED = 4096, 24, 32, 150
COMMITTED = "translation_case.jsonl"
TORCH = torch.__version__.partition("+")[0]
_WORD = re.compile(r"\w+|[^\w\s]")
Parts = tuple[TextPairs, TextPairs]


# region tasks
def tasks() -> dict[str, Parts]:
    """Task -> pairs to learn from and pairs to test on, the task's name in front of each first text."""
    found = {name: load_parallel(name).split(0.1) for name in LANGUAGES}
    prefixes = {name: prefix for name, (prefix, _) in LANGUAGES.items()}
    found["sums"], prefixes["sums"] = arithmetic(1000, digits=1, terms=3).split(0.1), SUMS
    return {
        name: (with_prefix(learn, prefixes[name]), with_prefix(test, prefixes[name]))
        for name, (learn, test) in found.items()
    }


def with_prefix(pairs: TextPairs, prefix: str) -> TextPairs:
    """The same pairs, each first text behind the name of its task."""
    return TextPairs(pairs.name, [prefix + text for text in pairs.firsts], pairs.seconds, pairs.card)


# endregion


def short(pairs: TextPairs, tokenizer: Unigram, longest: int = LONGEST) -> TextPairs:
    """Those pairs of which neither text has more than `longest` pieces."""
    sizes = zip(
        *(map(len, tokenizer.encode_batch(texts)) for texts in (pairs.firsts, pairs.seconds)), strict=True
    )
    return pairs.take([i for i, pair in enumerate(sizes) if max(pair) <= longest])


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


def baselines(
    learn: TextPairs, test: TextPairs, tokenizer: Unigram, prefix: str, style: str
) -> dict[str, float]:
    """BLEU of what needs no network: the English itself, word by word, the nearest known text."""
    sources = [text.removeprefix(prefix) for text in test.firsts]
    plain = TextPairs(learn.name, [t.removeprefix(prefix) for t in learn.firsts], learn.seconds, "")
    chinese = style == "zh"
    known = dictionary(plain, pieces_of(tokenizer) if chinese else _WORD.findall)
    answers = {
        "copy": sources,
        "dictionary": [by_words(known, text, "" if chinese else " ") for text in sources],
        "nearest": [nearest(plain, text) for text in sources],
    }
    return {name: bleu(texts, test.seconds, style) for name, texts in answers.items()}


def pieces_of(tokenizer: Unigram) -> Callable[[str], list[str]]:
    """Chinese has no spaces between words: the tokenizer's pieces stand for them."""
    return lambda text: [piece.strip("▁ ") for piece in tokenizer.pieces(text) if piece.strip("▁ ")]


def digest(model: torch.nn.Module) -> str:
    """The first 12 hexadecimal digits of the SHA-256 of all weights."""
    whole = hashlib.sha256()
    for parameter in model.parameters():
        whole.update(parameter.detach().contiguous().numpy().tobytes())
    return whole.hexdigest()[:12]


def kept() -> list[dict[str, Any]]:
    """The committed result: one entry for each task, the training first."""
    text = resources.files("fmlab.train").joinpath(COMMITTED).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def judge(model: T5, tokenizer: Unigram, learn: TextPairs, test: TextPairs, name: str) -> dict[str, Any]:
    """What is kept of a task: the scores, and the first answers beside what was wanted."""
    answers = generate(model, tokenizer, test.firsts, greedy=True, max_new_tokens=2 * LONGEST)
    row: dict[str, Any] = {"task": name, "learnt from": len(learn), "tested on": len(test)}
    row["samples"] = list(zip(test.firsts, answers, test.seconds, strict=True))[:4]
    if name not in LANGUAGES:
        right = Accuracy()
        right.add_texts(answers, test.seconds)
        return row | {"right": right.value}
    prefix, style = LANGUAGES[name]
    prompts = [prompt_ids(model, tokenizer, text) for text in test.firsts]
    beams = beam_search(model, prompts, tokenizer.eos, 2 * LONGEST, num_tokens=tokenizer.vocab_size)
    best = [tokenizer.decode(found[0].ids) for found in beams]
    row |= baselines(learn, test, tokenizer, prefix, style)
    return row | {"T5": bleu(answers, test.seconds, style), "T5, 4 beams": bleu(best, test.seconds, style)}


def report(step: int, result: StepResult) -> None:
    """A line every hundred steps."""
    if step % 100 == 0:
        print(f"step {step}: {result.loss:.2f} nats/token", flush=True)


def main(out: Path, steps: int = 3000, seed: int = 0, lr: float = 3e-3) -> None:
    """Train on all tasks at once and judge each; writes one JSON line for the training and one a task."""
    torch.set_num_threads(1)
    started, spent = time.time(), time.process_time()
    everything = tasks()
    texts = [text for learn, _ in everything.values() for text in learn.documents]
    tokenizer = Unigram.train_cached(texts, VOCABULARY)
    parts = {name: tuple(short(part, tokenizer) for part in both) for name, both in everything.items()}
    examples = [e for learn, _ in parts.values() for e in seq2seq_examples(learn, tokenizer)]
    torch.manual_seed(seed)
    model = T5.from_preset("t5-tiny", vocab_size=VOCABULARY, dropout=0.1)
    sampler = ExampleSampler(examples, tokenizer.pad, ROWS, seed)
    losses = fine_tune(model, sampler, Seq2SeqLM(), steps, lr, each=report)
    part = max(1, steps // 20)
    lines = [
        {
            "task": "training",
            "command": f"python -m fmlab.train.translation_case --steps {steps} --seed {seed} --lr {lr}",
            "seed": seed,
            "steps": steps,
            "examples": len(examples),
            "parameters": model.num_parameters(),
            "curve": [round(sum(losses[i : i + part]) / part, 3) for i in range(0, steps - part + 1, part)],
            "weights": digest(model),
        }
    ]
    for name, (learn, test) in parts.items():
        lines.append(judge(model, tokenizer, learn, test.take(range(min(TESTED, len(test)))), name))
    lines[0]["measured"] = f"{time.strftime('%-d %B %Y')}, one core ({platform.machine()}), torch {TORCH}"
    lines[0]["core seconds"] = round(time.process_time() - spent)
    lines[0]["wall seconds"] = round(time.time() - started)
    out.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), "utf-8")
    print(out.read_text("utf-8"))


if __name__ == "__main__":
    tyro.cli(main)
