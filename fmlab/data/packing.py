"""Several short documents in one row: less padding, and attention that stays inside a document.

Finding the fewest rows is bin packing. Best fit on documents sorted from long to short needs at most 11/9 of
the fewest rows plus a few (Johnson 1974), and hardly more than the fewest where many are short.

Shapes: r rows, l = seq_len.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fmlab.data.batch import IGNORE, Batch


@dataclass(frozen=True)
class Packed:
    """Rows of documents.

    batch: input_ids, document_ids, position_ids and labels, each int64 [r, l]. A document's number counts
           from 0 in its row; padding is a document of its own (so that it is attended by nobody else) and has
           no labels. Positions start at 0 in each document.
    waste: share of the r * l positions that are padding
    rows:  the documents of each row, by their place in the list given to `pack`
    """

    batch: Batch
    waste: float
    rows: list[list[int]]

    def __repr__(self) -> str:
        count, length = self.batch["input_ids"].shape
        documents = sum(map(len, self.rows))
        return f"Packed({documents:,} documents in {count:,} rows of {length}, {self.waste:.1%} padding)"


def pack(
    documents: Sequence[Sequence[int]],
    seq_len: int,
    pad: int,
    labels: Sequence[Sequence[int]] | None = None,
) -> Packed:
    """Put documents into as few rows as best fit finds.

    documents: token ids of each, closed by the end-of-text token if the model is to learn where to stop
    labels:    of each document, ALREADY SHIFTED; by default the next token, so that none is predicted across
               a border. For instruction tuning: -100 where the prompt is predicted.
    Raises ValueError for an empty list or document, one longer than seq_len (cut it first; it is never cut
    here), or labels of another length.
    """
    if not documents:
        raise ValueError("no documents to pack")
    lengths = [len(document) for document in documents]
    for what, wrong in (
        ("empty", [i for i, n in enumerate(lengths) if n == 0]),
        (f"longer than seq_len {seq_len}; cut it first", [i for i, n in enumerate(lengths) if n > seq_len]),
    ):
        if wrong:
            raise ValueError(f"document {wrong[0]} of {lengths[wrong[0]]} tokens is {what}")
    if labels is None:
        labels = [[*document[1:], IGNORE] for document in documents]
    if [len(row) for row in labels] != lengths:
        raise ValueError("each document needs as many labels as tokens")
    rows = best_fit(lengths, seq_len)
    shape = (len(rows), seq_len)
    ids, targets = np.full(shape, pad, np.int64), np.full(shape, IGNORE, np.int64)
    numbers, positions = np.empty(shape, np.int64), np.empty(shape, np.int64)
    for r, row in enumerate(rows):
        place = 0
        for number, index in enumerate(row):
            inside = slice(place, place + lengths[index])
            ids[r, inside], targets[r, inside] = documents[index], labels[index]
            numbers[r, inside], positions[r, inside] = number, np.arange(lengths[index])
            place = inside.stop
        numbers[r, place:], positions[r, place:] = len(row), np.arange(seq_len - place)
    arrays = {"input_ids": ids, "labels": targets, "document_ids": numbers, "position_ids": positions}
    batch = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return Packed(batch, 1 - sum(lengths) / (len(rows) * seq_len), rows)


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Rows of indices whose lengths add up to at most `capacity`: from the longest on, each goes into the row
    that it leaves the least room in. Equal input gives equal rows.
    """
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (room left, row), sorted
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = bisect.bisect_left(free, (lengths[index], -1))
        if place < len(free):
            room, row = free.pop(place)
        else:
            room, row = capacity, len(rows)
            rows.append([])
        rows[row].append(index)
        bisect.insort(free, (room - lengths[index], row))
    return rows
