"""A language model that reads tokens and remembers them: what every way of generating text is built on.

A `Stream` hides the difference between a decoder (the prompt is the beginning of the text) and an
encoder-decoder (the prompt goes through the encoder once; the text begins with a start token).

Shapes: b rows, l length, n new tokens, v vocabulary.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from fmlab.backends import get_backend
from fmlab.models.attention import FixedKVCache

Prompts = Sequence[Sequence[int]]


class Stream:
    """Rows of text that a model continues, with the cache that holds what it has read.

    Args:
        model: its forward takes input_ids, attention_mask and cache and gives `logits`; `new_cache(rows,
            tokens)` gives the cache.
        prompts: a list of token ids for each row; shorter ones are padded on the left, with any token.
        room: how many tokens may follow the longest prompt.
        static_shapes: with a cache that makes every step one program (fmlab.models.attention.FixedKVCache).
            Prompts are then padded to `length`, if it is given: one program for all of them, too.
    """

    def __init__(
        self,
        model: Any,
        prompts: Prompts,
        room: int,
        static_shapes: bool = False,
        length: int | None = None,
    ):
        self.model = model
        self.device = next(model.parameters()).device
        length = max(map(len, prompts)) if length is None else length
        ids = [[0] * (length - len(prompt)) + list(prompt) for prompt in prompts]
        self.prompt_ids = torch.tensor(ids, device=self.device)
        real = [[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        padded = static_shapes or any(len(prompt) < length for prompt in prompts)
        self.prompt_mask = torch.tensor(real, device=self.device) if padded else None
        self.cache = model.new_cache(len(prompts), length + room)
        if static_shapes:
            self.cache = FixedKVCache.like(self.cache)
        takes = inspect.signature(getattr(model, "forward", model)).parameters
        self.last = {"last": 1} if "last" in takes else {}

    def start(self) -> Tensor:
        """Read the prompts; the logits of the next token, [b,v]."""
        mask = {} if self.prompt_mask is None else {"attention_mask": self.prompt_mask}
        with self._program():
            state = self.model(self.prompt_ids, cache=self.cache, **mask, **self.last)
            return state["logits"][:, -1]

    def read(self, tokens: Tensor) -> Tensor:
        """Read `tokens` [b,n] after all before; the logits of the token after each, [b,n,v]."""
        with self._program():
            return self.model(tokens.to(self.device), cache=self.cache)["logits"]

    def _program(self) -> AbstractContextManager[Any]:
        """On a lazy device each call is a program: what a call leaves in the cache is not noted down for the
        next ones, whose program would grow with each token."""
        return get_backend("xla").step() if self.device.type == "xla" else nullcontext()

    def step(self, tokens: Tensor) -> Tensor:
        """Read one token a row, [b]; the logits of the next one, [b,v]."""
        return self.read(tokens[:, None])[:, -1]

    def select(self, rows: Tensor) -> None:
        """Go on with these rows [n] of the batch, in this order; a row may come several times."""
        self.cache.select(rows.to(self.device))

    @property
    def length(self) -> int:
        """Tokens read so far, padding included."""
        return self.cache.length

    def crop(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        self.cache.crop(length)


class SourceStream(Stream):
    """The output of an encoder-decoder for each prompt. `start` runs the encoder, and nothing else does: the
    cache keeps the keys and values of the encoded prompts. Prompts are padded on the right.

    Args:
        start_token: begins every output.
    """

    def __init__(self, model: Any, prompts: Prompts, room: int, start_token: int):
        self.model = model
        self.device = next(model.parameters()).device
        length = max(map(len, prompts))
        ids = [list(prompt) + [0] * (length - len(prompt)) for prompt in prompts]
        self.prompt_ids = torch.tensor(ids, device=self.device)
        real = [[1] * len(prompt) + [0] * (length - len(prompt)) for prompt in prompts]
        self.prompt_mask = torch.tensor(real, device=self.device)
        self.first = torch.full((len(prompts), 1), start_token, device=self.device)
        self.cache = model.new_cache(len(prompts), 1 + room)

    def start(self) -> Tensor:
        """Encode the prompts and read the start token; the logits of the first token, [b,v]."""
        state = self.model(
            self.prompt_ids,
            attention_mask=self.prompt_mask,
            decoder_input_ids=self.first,
            cache=self.cache,
        )
        return state["logits"][:, -1]

    def read(self, tokens: Tensor) -> Tensor:
        """Read `tokens` [b,n] of the output; the logits of the token after each, [b,n,v]."""
        tokens = tokens.to(self.device)
        return self.model(None, decoder_input_ids=tokens, cache=self.cache)["logits"]


def has_encoder(model: Any) -> bool:
    """Whether the model reads the prompt with an encoder of its own."""
    return "decoder_input_ids" in inspect.signature(getattr(model, "forward", model)).parameters


def open_stream(
    model: Any, prompts: Prompts, room: int, static_shapes: bool = False, length: int | None = None
) -> Stream:
    """The stream for a model of either kind.

    Raises ValueError for static shapes with a model that has an encoder or another kind of cache, and for a
    length that is shorter than a prompt.
    """
    if length is not None and not static_shapes:
        raise ValueError("length= pads prompts for a device with static shapes: give static_shapes=True too")
    if length is not None and length < max(map(len, prompts)):
        raise ValueError(
            f"length={length} is shorter than the longest prompt, {max(map(len, prompts))} tokens"
        )
    if has_encoder(model):
        from fmlab.models.t5 import START

        if static_shapes:
            raise ValueError(f"static shapes are for decoders, and a {type(model).__name__} has an encoder")
        return SourceStream(model, prompts, room, START)
    return Stream(model, prompts, room, static_shapes, length)


@contextmanager
def evaluating(*models: Any) -> Iterator[None]:
    """The models in eval mode and without gradients; their modes come back."""
    modes = [model.training for model in models]
    try:
        for model in models:
            model.eval()
        with torch.no_grad():
            yield
    finally:
        for model, training in zip(models, modes, strict=True):
            model.train(training)


def check_prompts(prompts: Prompts, max_new_tokens: int, model: Any) -> None:
    """Raise ValueError for an empty prompt, another model's tokens and more tokens than there is room for."""
    config = model.config
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    if not prompts or not all(prompts):
        raise ValueError("every prompt needs at least one token; to start a document use end_of_text")
    strangers = [token for prompt in prompts for token in prompt if not 0 <= token < config.vocab_size]
    if strangers:
        raise ValueError(
            f"token {strangers[0]} is not one of the model's {config.vocab_size}: "
            "this is another model's tokenizer"
        )
    positions = getattr(config, "max_positions", None)  # T5 has no largest one
    longest = max(map(len, prompts))
    if positions is not None and max_new_tokens > positions - longest:
        raise ValueError(
            f"the longest prompt has {longest} tokens and the model {positions} "
            f"positions: max_new_tokens can be at most {max(positions - longest, 0)}, got {max_new_tokens}"
        )
