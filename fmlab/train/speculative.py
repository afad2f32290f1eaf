"""Speculative decoding: a small model drafts a few tokens, the large one checks them all in one call.

What is written has exactly the distribution of the large model alone (Leviathan et al. 2023,
arXiv:2211.17192, section 2.3; Chen et al. 2023, arXiv:2302.01318, algorithm 2): a token x drafted with
probability q(x) is kept with probability min(1, p(x) / q(x)); the first one that is not is replaced by a draw
from what p has more of than q, max(0, p - q) rescaled. If all are kept, the large model's last distribution
gives one more for nothing. How alike the models are decides only how many are kept.

Shapes: n drafted tokens, v vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fmlab.train.decode import check_prompts, evaluating, open_stream
from fmlab.train.generate import check_options, probabilities


@dataclass(frozen=True)
class Speculation:
    """A text and what it took."""

    ids: list[int]  # the new tokens, without end_of_text
    calls: int  # of the target after it read the prompt
    drafted: int
    accepted: int

    @property
    def acceptance_rate(self) -> float:
        """Share of the drafted tokens that were kept; 0 if none was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0


class Dice(Protocol):
    """Where chance enters: an interface, so that a proof can go through all outcomes."""

    def draw(self, chances_v: Tensor) -> int:
        """A token, each with its probability."""

    def accept(self, probability: float) -> bool:
        """True with this probability."""


class SeededDice:
    """Chance from a seed."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self, chances_v: Tensor) -> int:
        return int(torch.multinomial(chances_v, 1, generator=self.generator))

    def accept(self, probability: float) -> bool:
        return float(torch.rand((), dtype=torch.float64, generator=self.generator)) < probability


def speculative_ids(
    target: Any,
    draft: Any,
    prompts: Sequence[Sequence[int]],
    end_of_text: int,
    max_new_tokens: int = 100,
    draft_tokens: int = 4,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    greedy: bool = False,
    seed: int = 0,
    num_tokens: int | None = None,
    dice: Dice | None = None,
) -> list[Speculation]:
    """Continue (or answer) each prompt as `generate_ids` with `target` alone would, in fewer calls of it.

    With greedy=True the tokens are those of generate_ids(target, greedy=True); otherwise their distribution
    is the same, not the tokens of the same seed. The prompts are taken one after the other, since rows keep
    different numbers of drafted tokens.

    draft:        a model with the same tokens, of either kind
    draft_tokens: how many are drafted before each check; the best number grows with the acceptance rate
    dice:         where chance comes from, instead of `seed`

    The other options are those of generate_ids. Raises ValueError for values out of range and models whose
    vocabularies differ.
    """
    if draft_tokens < 1:
        raise ValueError(f"draft_tokens must be at least 1, got {draft_tokens}")
    if num_tokens is None and target.config.vocab_size != draft.config.vocab_size:
        raise ValueError(
            f"the target has {target.config.vocab_size} tokens and the draft {draft.config.vocab_size}; both "
            "must have the same tokenizer; if it has fewer tokens than either, give num_tokens"
        )
    vocab_size = target.config.vocab_size if num_tokens is None else num_tokens
    for model in (target, draft):
        check_prompts(prompts, max_new_tokens, model)
    check_options(temperature, top_k, top_p, greedy, vocab_size)
    dice = dice or SeededDice(seed)

    def chances(logits_nv: Tensor) -> Tensor:
        logits_nv = logits_nv[:, :vocab_size].double().cpu()
        if greedy:
            return torch.nn.functional.one_hot(logits_nv.argmax(-1), vocab_size).double()
        return probabilities(logits_nv, temperature, top_k, top_p)

    with evaluating(target, draft):
        return [
            _one(
                _Reader(target, prompt, max_new_tokens, chances),
                _Reader(draft, prompt, max_new_tokens, chances),
                (end_of_text, max_new_tokens, draft_tokens),
                dice,
            )
            for prompt in prompts
        ]


class _Reader:
    """One model on one text: it reads what it has not read yet, and forgets what was turned down."""

    def __init__(self, model: Any, prompt: Sequence[int], room: int, chances: Callable[[Tensor], Tensor]):
        self.stream = open_stream(model, [prompt], room)
        self.chances = chances
        self.next_v = chances(self.stream.start())[0]  # of the token after the last one read
        self.prompt_length = self.stream.length
        self.done = 0  # new tokens read
        self.calls = 0

    def after(self, text: list[int], first: int) -> list[Tensor]:
        """The distributions of new tokens `first`, first + 1, ..., len(text): the last has no token yet."""
        found = {self.done: self.next_v}
        if len(text) > self.done:
            rows = self.chances(self.stream.read(torch.tensor([text[self.done :]]))[0])
            found |= {self.done + 1 + i: row for i, row in enumerate(rows)}
            self.done, self.next_v = len(text), rows[-1]
            self.calls += 1
        return [found[i] for i in range(first, len(text) + 1)]

    def forget(self, count: int) -> None:
        """Keep the first `count` new tokens only; `after` must then be asked for later ones."""
        if self.done > count:
            self.stream.crop(self.prompt_length + count)
            self.done = count


def _one(target: _Reader, draft: _Reader, limits: tuple[int, int, int], dice: Dice) -> Speculation:
    end_of_text, max_new_tokens, draft_tokens = limits
    text: list[int] = []
    drafted = accepted = 0
    while len(text) < max_new_tokens and text[-1:] != [end_of_text]:
        start, guess, guessed = len(text), list(text), []
        # a check gives one token more than were drafted, so the last one needs no draft
        for _ in range(min(draft_tokens, max_new_tokens - start - 1)):
            q_v = draft.after(guess, len(guess))[0]
            guessed.append(q_v)
            guess.append(dice.draw(q_v))
            if guess[-1] == end_of_text:
                break
        ended = len(guess) > start and guess[-1] == end_of_text  # then nothing can follow
        checked = target.after(guess[:-1] if ended else guess, start)
        new, kept = verify(checked, guessed, guess[start:], dice)
        text += new
        drafted, accepted = drafted + len(guessed), accepted + kept
        for reader in (target, draft):
            reader.forget(len(text) - 1)  # the last token is new to both
    return Speculation(text[:-1] if text[-1] == end_of_text else text, target.calls, drafted, accepted)


def verify(
    target: Sequence[Tensor], draft: Sequence[Tensor], tokens: Sequence[int], dice: Dice
) -> tuple[list[int], int]:
    """Which drafted tokens stay, and the token after them: (new tokens, how many were drafted ones).

    Args:
        target: n + 1 distributions [v] of the target, at each drafted token and after the last; only n if
            nothing may follow the last.
        draft: n distributions [v] that the tokens were drawn from.
        tokens: n drafted tokens.
    """
    for i, (p_v, q_v, token) in enumerate(zip(target, draft, tokens, strict=False)):
        if not dice.accept(min(1.0, float(p_v[token] / q_v[token]))):
            return [*tokens[:i], dice.draw(residual(p_v, q_v))], i
    more = [dice.draw(target[-1])] if len(target) > len(tokens) else []
    return [*tokens, *more], len(tokens)


def residual(p_v: Tensor, q_v: Tensor) -> Tensor:
    """What p has more of than q, rescaled to a distribution; p itself if they are the same."""
    more = (p_v - q_v).clamp(min=0)
    total = more.sum()
    return more / total if total > 0 else p_v
