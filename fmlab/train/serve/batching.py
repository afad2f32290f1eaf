"""Continuous batching: texts join and leave the batch between any two steps.

A batch that starts and ends together is as slow as its longest text, and who comes late waits for all of it.
Here every step asks anew who runs (Yu et al. 2022, "Orca", section 3.2): the requests that wait are let in as
soon as pages are free, and the pages of a text that has ended serve the next one.

Shapes: b texts, l tokens, v vocabulary.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fmlab.models.attention.paged import OutOfPages, PagedKVCache, PagePool, PageTable
from fmlab.train.generate import sample

HOTTEST = 1e30  # of temperatures: far beyond this a number does not fit into fp32


@dataclass(frozen=True)
class Request:
    """One text to continue. `greedy` takes the most likely token; else one is drawn, by `seed` alone.

    The same request gives the same text whatever runs beside it, up to rounding: a batch of another size may
    add up a product in another order.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int = 16
    greedy: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0


@dataclass(frozen=True)
class Event:
    """What one step did to one request: a new token, or None where it ended without one.

    reason: None while it goes on, then "stop" (the end-of-text token, not part of the text) or "length".
    """

    request_id: int
    token: int | None
    reason: str | None = None


@dataclass
class _Text:
    """A request on its way."""

    request_id: int
    request: Request
    generator: torch.Generator
    table: PageTable = field(default_factory=PageTable)
    new: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [*self.request.prompt, *self.new]


@dataclass
class Counts:
    """What a batcher has done: calls of the model, tokens read and written, texts that lost their pages."""

    prefills: int = 0
    decodes: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    evictions: int = 0


class Batcher:
    """Runs requests on one model; call `step` until `idle`.

    Args:
        pages, page_size: of the pool; its size bounds how many texts run at once, see PagePool.
        max_batch: texts that run at once, at most.
        end_of_text: the token that ends a text; None if there is none.
        continuous: False lets new texts in only when the batch is empty, as a static batch does; to compare.
        num_tokens: draw ids below this one only, where a model has more rows than its tokenizer tokens.

    Raises ValueError for sizes that cannot be.
    """

    def __init__(
        self,
        model: Any,
        pages: int = 256,
        page_size: int = 16,
        max_batch: int = 16,
        end_of_text: int | None = None,
        continuous: bool = True,
        num_tokens: int | None = None,
    ):
        if max_batch < 1:
            raise ValueError(f"max_batch must be at least 1, got {max_batch}")
        if not hasattr(model, "new_cache") or not hasattr(model.config, "max_positions"):
            raise ValueError(
                f"a {type(model).__name__} is no decoder that continues a text; serve a GPT or a Llama"
            )
        self.model, self.pool = model.eval(), PagePool.for_model(model, pages, page_size)
        self.max_batch, self.end_of_text, self.continuous = max_batch, end_of_text, continuous
        self.num_tokens = model.config.vocab_size if num_tokens is None else num_tokens
        self.waiting: deque[_Text] = deque()
        self.running: list[_Text] = []
        self.counts = Counts()
        self._next_id = 0

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self.waiting and not self.running

    def check(self, request: Request) -> None:
        """Raise ValueError for a request that this batcher could never finish, saying what is legal."""
        config, total = self.model.config, len(request.prompt) + request.max_new_tokens
        if not request.prompt:
            raise ValueError("the prompt is empty; give at least one token")
        strangers = [token for token in request.prompt if not 0 <= token < config.vocab_size]
        if strangers:
            raise ValueError(f"token {strangers[0]} is not one of the model's {config.vocab_size}")
        if request.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {request.max_new_tokens}")
        if total > config.max_positions:
            raise ValueError(
                f"{len(request.prompt)} tokens of prompt and {request.max_new_tokens} new ones are more than "
                f"the model's {config.max_positions} positions"
            )
        if self.pool.pages_for(total) > self.pool.pages:
            raise ValueError(
                f"{total} tokens take {self.pool.pages_for(total)} pages and the pool has {self.pool.pages}"
            )
        if not request.greedy and not 0 < request.temperature <= HOTTEST:
            raise ValueError(
                f"temperature must be above 0 and at most {HOTTEST:g}, got {request.temperature}; "
                "or set greedy"
            )
        if request.top_k is not None and not 1 <= request.top_k <= self.num_tokens:
            raise ValueError(f"top_k must be between 1 and {self.num_tokens}, got {request.top_k}")
        if request.top_p is not None and not 0 < request.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {request.top_p}")

    def submit(self, request: Request) -> int:
        """Queue a request; its number. Raises ValueError for one that could never be finished."""
        self.check(request)
        text = _Text(self._next_id, request, torch.Generator().manual_seed(request.seed))
        self._next_id += 1
        self.waiting.append(text)
        return text.request_id

    def cancel(self, request_id: int) -> bool:
        """End a request and give its pages back; False if it is not here (any more)."""
        for texts in (self.running, self.waiting):
            for text in list(texts):
                if text.request_id == request_id:
                    texts.remove(text)
                    self.pool.release(text.table)
                    return True
        return False

    # region step
    @torch.no_grad()
    def step(self) -> list[Event]:
        """Let in who waits and fits, read their prompts, then write one token of every other text."""
        admitted = self._admit()
        older = list(self.running)
        events = self._read(admitted) if admitted else []
        if older:
            events += self._write(older)
        return events

    def _admit(self) -> list[_Text]:
        """The texts that come in now: first come, first served, while there are pages for their tokens."""
        if not self.continuous and self.running:
            return []
        admitted: list[_Text] = []
        reserved = len(self.running)  # a page for the next token of every text that runs
        while self.waiting and len(self.running) + len(admitted) < self.max_batch:
            needed = self.pool.pages_for(len(self.waiting[0].tokens) + 1)
            if needed + reserved > self.pool.free:
                break
            reserved += needed
            admitted.append(self.waiting.popleft())
        return admitted

    # endregion

    def _read(self, texts: list[_Text]) -> list[Event]:
        """Prefill: all tokens of these texts in one call, shorter ones padded on the left; a token each."""
        length = max(len(text.tokens) for text in texts)
        rows = [[0] * (length - len(text.tokens)) + text.tokens for text in texts]
        mask = [[0] * (length - len(text.tokens)) + [1] * len(text.tokens) for text in texts]
        self.counts.prefills += 1
        self.counts.prompt_tokens += sum(len(text.tokens) for text in texts)
        self.running += texts
        return self._call(texts, torch.tensor(rows), torch.tensor(mask))

    def _write(self, texts: list[_Text]) -> list[Event]:
        """Decode: one token of each text. Who has no page left makes the youngest wait and start over."""
        for text in list(texts):
            while text in texts:
                try:
                    self.pool.grow(text.table, text.table.length + 1)
                    break
                except OutOfPages:
                    self._evict(texts)
        if not texts:
            return []
        self.counts.decodes += 1
        return self._call(texts, torch.tensor([[text.new[-1]] for text in texts]), None)

    def _evict(self, texts: list[_Text]) -> None:
        """Take the pages of the youngest running text; what it wrote is kept and read again later."""
        youngest = max(self.running, key=lambda text: text.request_id)
        self.running.remove(youngest)
        if youngest in texts:
            texts.remove(youngest)
        self.pool.release(youngest.table)
        self.waiting.appendleft(youngest)
        self.counts.evictions += 1

    def _call(self, texts: list[_Text], ids: Tensor, mask: Tensor | None) -> list[Event]:
        device = self.pool.key.device
        cache = PagedKVCache(self.pool, [text.table for text in texts])
        state = self.model(
            ids.to(device), attention_mask=None if mask is None else mask.to(device), cache=cache
        )
        logits_bv = state["logits"][:, -1, : self.num_tokens].float().cpu()
        return [self._choose(text, logits_v) for text, logits_v in zip(texts, logits_bv, strict=True)]

    def _choose(self, text: _Text, logits_v: Tensor) -> Event:
        request = text.request
        if request.greedy:
            token = int(logits_v.argmax())
        else:
            options = (request.temperature, request.top_k, request.top_p)
            token = int(sample(logits_v[None], text.generator, *options))
        if token == self.end_of_text:
            self._end(text)
            return Event(text.request_id, None, "stop")
        text.new.append(token)
        self.counts.new_tokens += 1
        if len(text.new) == request.max_new_tokens:
            self._end(text)
            return Event(text.request_id, token, "length")
        return Event(text.request_id, token)

    def _end(self, text: _Text) -> None:
        self.running.remove(text)
        self.pool.release(text.table)

    def run(self, requests: list[Request]) -> list[list[int]]:
        """The new tokens of each request, when all are done; without a server."""
        ids = [self.submit(request) for request in requests]
        new: dict[int, list[int]] = {number: [] for number in ids}
        while not self.idle:
            for event in self.step():
                if event.token is not None:
                    new[event.request_id].append(event.token)
        return [new[number] for number in ids]
