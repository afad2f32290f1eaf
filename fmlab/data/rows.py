"""From rows of different lengths to a batch, and checks that batches and tokenizers belong together."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fmlab.data.batch import IGNORE, Batch
from fmlab.data.encoded import Tokens
from fmlab.data.tokenizer import TextTokenizer


def stack(length: int, rows: Mapping[str, tuple[Sequence[Any], int]], real: str | None = None) -> Batch:
    """Pad on the right and stack: name -> (rows, the padding) becomes name -> [rows, length].

    real: the name whose rows say which positions are real; if any row is short, "attention_mask" comes too.
    """
    batch = {name: padded(values, fill, length) for name, (values, fill) in rows.items()}
    if real is not None and any(len(row) < length for row in rows[real][0]):
        batch["attention_mask"] = padded([np.ones(len(row)) for row in rows[real][0]], 0, length)
    return batch


def padded(rows: Sequence[Any], fill: int, length: int) -> Tensor:
    """int64 [rows, length]: each row, then `fill`."""
    table = np.full((len(rows), length), fill, dtype=np.int64)
    for place, row in zip(table, rows, strict=True):
        place[: len(row)] = row
    return torch.from_numpy(table)


def check_encoded(tokens: Tokens, tokenizer: TextTokenizer) -> None:
    """Raise ValueError unless `tokens` can have been made by `tokenizer`."""
    _, _, made_by = tokens.fingerprint.rpartition("-")
    highest = int(tokens.ids.max(initial=0))
    if highest >= tokenizer.vocab_size or (made_by != tokenizer.fingerprint and "-" in tokens.fingerprint):
        raise ValueError(
            f"the corpus was encoded by another tokenizer ({made_by}, ids up to {highest}) than {tokenizer}; "
            "encode it again: encode(corpus, tokenizer)"
        )


def check_batch(batch: Batch, vocab_size: int, max_positions: int | None = None, classes: int = 2) -> None:
    """Raise ValueError when a batch cannot be for a model with this vocabulary and so many positions.

    A check for the first batch of a run: it reads the values, for which an accelerator has to be waited for.
    classes: how many there are in "sentence_labels".
    """
    for name, limit in {"input_ids": vocab_size, "labels": vocab_size, "sentence_labels": classes}.items():
        if name not in batch:
            continue
        values = batch[name] if name == "input_ids" else batch[name][batch[name] != IGNORE]
        if values.numel() and not 0 <= int(values.min()) <= int(values.max()) < limit:
            also = "" if name == "input_ids" else f", and {IGNORE} for no target"
            raise ValueError(
                f"{name} has values from {int(values.min())} to {int(values.max())}; legal: 0 to {limit - 1}"
                f"{also}; check that tokenizer and model have the same vocabulary"
            )
    length = batch["input_ids"].shape[1]
    if max_positions is not None and length > max_positions:
        raise ValueError(
            f"rows of {length} tokens for a model with {max_positions} positions; make them with a seq_len "
            f"or max_length of at most {max_positions}"
        )
