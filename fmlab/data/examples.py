"""Fine-tuning data: examples of different lengths, made once, padded into batches of one shape.

Shapes: b rows of this rank, l tokens of the longest input, t of the longest output.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fmlab.data.batch import IGNORE, Batch
from fmlab.data.corpus import Corpus
from fmlab.data.labelled import LabelledTexts
from fmlab.data.order import Window, WindowSampler
from fmlab.data.rows import padded
from fmlab.data.text_pairs import TextPairs
from fmlab.data.text_to_text import TextToText, short_pairs
from fmlab.data.tokenizer import TextTokenizer
from fmlab.data.unigram import Unigram

#: name -> a list of token ids, or a number.
Example = Mapping[str, Sequence[int] | int]


class ExampleSampler(WindowSampler):
    """Batches of this rank from a list of examples, each once an epoch, in the order of WindowSampler.

    Lists become int64 [b, longest]: input_ids filled up with `pad`, names ending in "labels" with -100,
    others with 0; numbers become [b]. An attention_mask says which input_ids are real, if lengths differ.

    examples:   all with the same names, "input_ids" among them
    pad:        tokenizer.pad
    batch_size: examples of the global batch, over all ranks
    """

    def __init__(
        self,
        examples: Sequence[Example],
        pad: int,
        batch_size: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """Raises ValueError for no examples, an empty input, or examples with different names."""
        if not examples:
            raise ValueError("no examples to make batches of")
        names = set(examples[0])
        for number, example in enumerate(examples):
            if set(example) != names or not example.get("input_ids"):
                raise ValueError(
                    f"example {number} has {sorted(example)}; all need the names of the first, "
                    f"{sorted(names)}, and at least one token of input_ids"
                )
        super().__init__(len(examples), len(examples), batch_size, seed, rank, world_size)
        self.examples, self.pad = examples, pad
        lists = [name for name, value in examples[0].items() if not isinstance(value, int)]
        self.lengths = {name: max(len(_list(example[name])) for example in examples) for name in lists}
        self._ragged = any(len(_list(e["input_ids"])) < self.lengths["input_ids"] for e in examples)

    def _identity(self) -> dict[str, Any]:
        digest = hashlib.sha256(json.dumps([dict(e) for e in self.examples], sort_keys=True).encode())
        return {"seed": self.seed, "batch_size": self.batch_size, "examples": digest.hexdigest()[:12]}

    def _rows(self, windows: Sequence[Window]) -> Batch:
        rows = [self.examples[w.number] if w.number >= 0 else self._empty() for w in windows]
        batch: Batch = {}
        for name in self.examples[0]:
            values = [row[name] for row in rows]
            if name in self.lengths:
                fill = self.pad if name == "input_ids" else IGNORE if name.endswith("labels") else 0
                batch[name] = padded([_list(value) for value in values], fill, self.lengths[name])
            else:
                batch[name] = torch.tensor(values)
        if self._ragged or any(w.number < 0 for w in windows):
            real = [[1] * len(_list(row["input_ids"])) for row in rows]
            batch["attention_mask"] = padded(real, 0, self.lengths["input_ids"])
        return batch

    def _empty(self) -> Example:
        """A row that fills up the last batch of an evaluation: one token, no targets."""
        none = {name: IGNORE if name.endswith("labels") else 0 for name in self.examples[0]}
        return none | {name: [] for name in self.lengths} | {"input_ids": [self.pad]}


def _list(value: Sequence[int] | int) -> Sequence[int]:
    if isinstance(value, int):
        raise ValueError(f"an example has the number {value} where another has a list")
    return value


def class_examples(
    corpus: LabelledTexts, tokenizer: TextTokenizer, max_length: int | None = None
) -> list[Example]:
    """Framed texts with their "class_labels". Rows longer than max_length lose the end of the text."""
    ids = tokenizer.encode_batch(corpus.documents, special=False)
    rows = [tokenizer.frame(row, max_length=max_length)[0] for row in ids]
    return [{"input_ids": row, "class_labels": c} for row, c in zip(rows, corpus.labels, strict=True)]


def seq2seq_examples(pairs: TextPairs, tokenizer: Unigram, max_length: int | None = None) -> list[Example]:
    """For an encoder-decoder: input_ids from the first text and labels from the second, each closed by </s>.

    Rows longer than max_length lose the end of the text.
    """
    firsts, seconds = (
        [
            tokenizer.frame(row, max_length=max_length)[0]
            for row in tokenizer.encode_batch(texts, special=False)
        ]
        for texts in (pairs.firsts, pairs.seconds)
    )
    return [{"input_ids": a, "labels": b} for a, b in zip(firsts, seconds, strict=True)]


def text_to_text_examples(corpus: Corpus, tokenizer: Unigram, longest: int) -> list[Example]:
    """The examples of a TextToText whose texts are short enough; see short_pairs.

    Raises ValueError for a corpus without pairs.
    """
    if not isinstance(corpus, TextToText):
        raise ValueError(
            f"objective 'text-to-text' learns answers, and the texts of {corpus.name!r} have none; legal: "
            "corpus text-to-text, or a TextToText of your own given to train"
        )
    return seq2seq_examples(short_pairs(corpus.pairs, tokenizer, longest), tokenizer)


def response_examples(
    pairs: TextPairs, tokenizer: TextTokenizer, template: str = "{}\n", max_length: int | None = None
) -> list[Example]:
    """For a decoder: prompt, response and the end-of-text token in one row, with labels ALREADY SHIFTED that
    ask for the response and the end only.

    template:   what the prompt is written in
    max_length: pairs that are longer are left out: a cut response would teach to break off
    Raises ValueError when none is left.
    """
    prompts = tokenizer.encode_batch([template.format(first) for first in pairs.firsts], special=False)
    responses = tokenizer.encode_batch(pairs.seconds, special=False)
    examples: list[Example] = []
    for prompt, response in zip(prompts, responses, strict=True):
        ids = [*prompt, *response, tokenizer.end_of_text]
        if max_length is None or len(ids) <= max_length + 1:
            asked = max(1, len(prompt))  # nothing comes before the first token, so nothing can predict it
            hidden = [IGNORE] * (asked - 1)
            examples.append({"input_ids": ids[:-1], "labels": [*hidden, *ids[asked:]]})
    if not examples:
        raise ValueError(f"no pair of {len(pairs)} fits into max_length {max_length}")
    return examples
