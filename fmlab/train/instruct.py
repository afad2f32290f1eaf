"""Instruction tuning: the loss lies on the responses alone, and short pairs share a row."""

from collections.abc import Sequence

from fmlab.data.examples import Example, response_examples
from fmlab.data.packing import pack
from fmlab.data.text_pairs import TextPairs
from fmlab.data.tokenizer import TextTokenizer


def instruction_examples(
    pairs: TextPairs,
    tokenizer: TextTokenizer,
    template: str = "{}\n",
    max_length: int | None = None,
    responses_only: bool = True,
) -> list[Example]:
    """Prompt, response and the end-of-text token in one row, for an ExampleSampler and CausalLM.

    responses_only: labels ask for the response and the end only; else for the prompt's tokens too, and the
                    model also learns to write instructions
    For the rest see fmlab.data.response_examples.
    """
    examples = response_examples(pairs, tokenizer, template, max_length)
    if responses_only:
        return examples
    whole = []
    for example in examples:
        ids, labels = list(_list(example["input_ids"])), _list(example["labels"])
        whole.append({"input_ids": ids, "labels": [*ids[1:], labels[-1]]})
    return list(whole)


def packed_examples(examples: Sequence[Example], seq_len: int, pad: int) -> list[Example]:
    """Examples of `input_ids` and `labels` put into as few rows of `seq_len` as best fit finds.

    With document_ids and position_ids: no example sees another, so that each has the loss it has alone, and
    the rows hold the same targets.

    pad: tokenizer.pad
    Raises ValueError for an example longer than seq_len.
    """
    documents = [_list(example["input_ids"]) for example in examples]
    packed = pack(documents, seq_len, pad, [_list(example["labels"]) for example in examples])
    names = list(packed.batch)
    return [{name: packed.batch[name][row].tolist() for name in names} for row in range(len(packed.rows))]


def _list(value: Sequence[int] | int) -> Sequence[int]:
    assert not isinstance(value, int)
    return value
