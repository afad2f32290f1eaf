"""Several tasks as one: pairs of texts, with the task's name in front of each first text, as T5 learns them.

Raffel et al. 2020, arXiv:1910.10683, section 2.4.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fmlab.data.card import card
from fmlab.data.corpus import Corpus
from fmlab.data.holding_out import words_only
from fmlab.data.problems import arithmetic
from fmlab.data.text_pairs import TextPairs
from fmlab.data.tokenizer import TextTokenizer
from fmlab.data.translations import LANGUAGES, load_parallel

#: Task -> what stands in front of its texts.
PREFIXES: Mapping[str, str] = {"en-fr": "French: ", "en-zh": "Chinese: ", "sums": "Sum: "}
TEST = 0.1  # the part of each task that nothing is ever trained on


@dataclass(frozen=True, repr=False)
class TextToText(Corpus):
    """A corpus of pairs: `pairs` has the questions with their tasks in front, and `kinds` are the tasks."""

    pairs: TextPairs

    def split(self, validation: float = 0.1) -> tuple["TextToText", "TextToText"]:
        """Two parts, for training and for validation: the same English is on the same side in all tasks.

        Raises ValueError when `validation` is not between 0 and 1 or there are too few texts.
        """
        learn, held = self.pairs.split(validation, by=lambda first, _: _without_task(first))
        return (
            replace(self, documents=learn.documents, pairs=learn),
            replace(self, name=held.name, documents=held.documents, pairs=held),
        )

    def __repr__(self) -> str:
        return f"TextToText({self.pairs!r})"


# region tasks
def text_to_text_tasks() -> dict[str, tuple[TextPairs, TextPairs]]:
    """Task -> pairs to learn from and pairs to test on: English to French and to Chinese, and sums.

    Raises ImportError when a language pack is not installed (extra "data").
    """
    found = {name: load_parallel(name) for name in LANGUAGES}
    found["sums"] = arithmetic(1500, steps=True, digits=1, terms=3)
    parts = {name: pairs.split(TEST) for name, pairs in found.items()}
    return {name: (_named(learn, name), _named(test, name)) for name, (learn, test) in parts.items()}


def _named(pairs: TextPairs, task: str) -> TextPairs:
    """The same pairs, each first text behind the name of its task."""
    firsts = [PREFIXES[task] + text for text in pairs.firsts]
    return TextPairs(pairs.name, firsts, pairs.seconds, pairs.card, [task] * len(pairs))


# endregion


def text_to_text() -> TextToText:
    """The pairs to learn from, of all tasks together; see text_to_text_tasks."""
    parts = [learn for learn, _ in text_to_text_tasks().values()]
    firsts, seconds, kinds = (
        [each for part in parts for each in getattr(part, name)] for name in ("firsts", "seconds", "kinds")
    )
    pairs = TextPairs("text-to-text", firsts, seconds, card("text-to-text"), kinds)
    return TextToText(pairs.name, pairs.documents, pairs.card, pairs)


def short_pairs(pairs: TextPairs, tokenizer: TextTokenizer, longest: int) -> TextPairs:
    """Those pairs of which neither text has more than `longest` pieces, its closing one included.

    A text that is cut off would teach to break off. Raises ValueError when none is left.
    """
    sizes = [[len(row) + 1 for row in tokenizer.encode_batch(t)] for t in (pairs.firsts, pairs.seconds)]
    kept = [i for i, pair in enumerate(zip(*sizes, strict=True)) if max(pair) <= longest]
    if not kept:
        raise ValueError(f"no pair of {len(pairs)} in {pairs.name} is as short as {longest} tokens")
    return pairs.take(kept)


def _without_task(text: str) -> str:
    """What must not be on both sides of a split."""
    plain = next((text.removeprefix(p) for p in PREFIXES.values() if text.startswith(p)), text)
    return words_only(plain) or plain
