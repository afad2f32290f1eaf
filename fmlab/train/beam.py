"""Beam search: the likeliest whole text found by keeping several beginnings alive.

Shapes: b prompts, k beams, v vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fmlab.train.decode import Stream, check_prompts, evaluating, open_stream


class Beam(NamedTuple):
    """A finished text. `score`: its log-probability divided by length ** length_penalty."""

    ids: list[int]  # without end_of_text
    score: float


@dataclass
class _Row:
    """One prompt's search: its open beams, best first, and its best finished texts, best first."""

    texts: list[list[int]]
    scores: list[float]
    finished: list[Beam] = field(default_factory=list)
    improvable: bool = True


def beam_search(
    model: Any,
    prompts: Sequence[Sequence[int]],
    end_of_text: int,
    max_new_tokens: int = 100,
    beams: int = 4,
    length_penalty: float = 1.0,
    early_stopping: bool | Literal["never"] = False,
    num_tokens: int | None = None,
) -> list[list[Beam]]:
    """For each prompt its finished texts, at most `beams`, best first. Works for both kinds of models.

    At each step the 2k likeliest continuations of the k open beams are looked at. Those of the first k that
    end are finished; the first k that do not end stay open. A text is also finished when it has
    `max_new_tokens`. The rules, their order and the stopping are those of transformers' `generate`.

    length_penalty: a score is log-probability / length ** this; above 0 favours long texts, below 0 short
    early_stopping: True ends a search once it has `beams` finished texts; False also once no open beam, at
                    its present length, beats the worst of them; "never" only if none could at any length
    num_tokens:     consider ids below this one only

    Raises ValueError for values out of range; see also generate_ids.
    """
    vocab_size = model.config.vocab_size if num_tokens is None else num_tokens
    check_prompts(prompts, max_new_tokens, model)
    if not 2 <= beams <= vocab_size // 2:
        raise ValueError(
            f"beams must be between 2 and {vocab_size // 2} (half of the tokens), got {beams}; "
            "for one beam use generate_ids(greedy=True)"
        )
    if early_stopping not in (True, False, "never"):
        raise ValueError(f'early_stopping must be True, False or "never", got {early_stopping!r}')
    with evaluating(model):
        stream = open_stream(model, prompts, max_new_tokens)
        logits = stream.start()[:, :vocab_size]
        rows = [_Row([[]], [0.0]) for _ in prompts]
        rules = _Rules(beams, end_of_text, max_new_tokens, length_penalty, early_stopping)
        for length in range(1, max_new_tokens + 1):
            likeliest = _continuations(logits, rows, beams)
            parents = [
                _advance(row, found, length, rules) for row, found in zip(rows, likeliest, strict=True)
            ]
            full = early_stopping is True and all(len(row.finished) == beams for row in rows)
            if length == max_new_tokens or full or not any(row.improvable for row in rows):
                break
            logits = _step(stream, rows, parents, 1 if length == 1 else beams)[:, :vocab_size]
    return [row.finished for row in rows]


class _Rules(NamedTuple):
    """The arguments of `beam_search` that decide what ends and what stays."""

    beams: int
    end_of_text: int
    max_length: int
    length_penalty: float
    early_stopping: bool | str


def _continuations(logits: Tensor, rows: list[_Row], beams: int) -> list[list[tuple[float, int, int]]]:
    """For each prompt the 2k best (log-probability of the whole text, beam, token), best first."""
    scores = torch.tensor([row.scores for row in rows], device=logits.device)  # [b, k], at first [b, 1]
    totals = logits.float().log_softmax(-1).view(*scores.shape, -1) + scores[..., None]
    best, index = totals.flatten(1).topk(2 * beams)
    beam, token = index // logits.shape[1], index % logits.shape[1]
    return [
        list(zip(*row, strict=True)) for row in zip(best.tolist(), beam.tolist(), token.tolist(), strict=True)
    ]


def _advance(row: _Row, found: list[tuple[float, int, int]], length: int, rules: _Rules) -> list[int]:
    """Finish what ends and keep the rest open; the old beam that each new one continues."""
    beams, end_of_text, max_length, length_penalty, early_stopping = rules
    texts = [(score, beam, [*row.texts[beam], token]) for score, beam, token in found]
    ended = [length == max_length or text[-1] == end_of_text for _, _, text in texts]
    closed = not row.improvable or (early_stopping is True and len(row.finished) == beams)
    if not closed:
        row.finished += [
            Beam(text[:-1] if text[-1] == end_of_text else text, score / length**length_penalty)
            for (score, _, text), end in zip(texts[:beams], ended, strict=False)
            if end
        ]
        row.finished = sorted(row.finished, key=lambda beam: -beam.score)[:beams]
    alive = [text for text, end in zip(texts, ended, strict=True) if not end][:beams]
    if not alive:  # the last step
        return []
    row.scores, row.texts = [score for score, _, _ in alive], [text for _, _, text in alive]
    longest = max_length if early_stopping == "never" and length_penalty > 0 else length
    if len(row.finished) == beams:
        best_possible = row.scores[0] / longest**length_penalty
        row.improvable = row.improvable and best_possible > row.finished[-1].score
    return [beam for _, beam, _ in alive]


def _step(stream: Stream, rows: list[_Row], parents: list[list[int]], width: int) -> Tensor:
    """Let each new beam take over its parent's cache and read its token; the logits, [b * k, v]."""
    sources = [i * width + parent for i, row in enumerate(parents) for parent in row]
    if sources != list(range(len(rows) * width)):
        stream.select(torch.tensor(sources))
    return stream.step(torch.tensor([text[-1] for row in rows for text in row.texts]))
