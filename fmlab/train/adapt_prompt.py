"""Prompt tuning (Lester et al. 2021, arXiv:2104.08691): a frozen decoder reads trained vectors first.

The vectors are tokens that the vocabulary lacks: ids from vocab_size on, which a larger embedding knows. So
they take positions, are masked, cached and packed as any token, and no model has to know of them.

Shapes: b batch, l length, p prompt vectors, d hidden width, v vocabulary.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fmlab.data.batch import IGNORE
from fmlab.models import State
from fmlab.models.attention import KVCache
from fmlab.models.layers import Embedding
from fmlab.train.adapt import freeze, only_train
from fmlab.train.lora import replace


class PromptedEmbedding(Embedding):
    """An embedding with p more rows, ids v to v + p - 1, which alone learn. `weight` is the base's."""

    def __init__(self, base: Embedding, prompt_pd: Tensor):
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim = base.num_embeddings, base.embedding_dim
        self.padding_idx, self.max_norm, self.norm_type = base.padding_idx, None, 2.0
        self.scale_grad_by_freq = self.sparse = False
        self.weight, self.prompt = base.weight, nn.Parameter(prompt_pd)

    def forward(self, ids: Tensor) -> Tensor:
        """ids [...] -> [...,d]."""
        ours = ids - self.num_embeddings
        texts = super().forward(ids.where(ours < 0, 0))
        return torch.where((ours >= 0)[..., None], self.prompt[ours.clamp(min=0)].to(texts.dtype), texts)


class Prefixed(nn.Module):
    """A decoder with `length` trained things before its input; called, trained and generated from like it.

    `config` is the decoder's, with the positions that are left.
    """

    def __init__(self, model: Any, length: int):
        super().__init__()
        most = model.config.max_positions - 1
        if not hasattr(model, "new_cache") or not hasattr(model.config, "max_positions"):
            raise ValueError(f"this is for decoders such as GPT and Llama, got {type(model).__name__}")
        if not 1 <= length <= most:
            raise ValueError(
                f"the model has positions for 1 to {most} vectors before the input, got {length}"
            )
        self.model, self.length = model, length
        self.config = dataclasses.replace(model.config, max_positions=model.config.max_positions - length)

    def new_cache(self, batch: int, max_length: int | None = None) -> KVCache:
        """An empty cache for `batch` rows of up to `max_length` tokens."""
        raise NotImplementedError

    def remove(self) -> Any:
        """Give the decoder back as it was; what was learnt is lost."""
        raise NotImplementedError

    def _check(self, input_ids: Tensor, document_ids: Tensor | None, past: int) -> None:
        if document_ids is not None:
            raise ValueError(
                "document_ids cannot be used here: packed documents would share what stands before the first "
                "of them; give each a row of its own"
            )
        total = past + input_ids.shape[-1]
        if total > self.config.max_positions:
            raise ValueError(
                f"a sequence of {total} tokens and {self.length} trained vectors before it is longer than "
                f"the model's {self.model.config.max_positions} positions; shorten it"
            )


class PromptTuned(Prefixed):
    """A decoder that reads trained vectors before every input. The decoder is frozen and changed in place.

    Args:
        length: of the prompt (the paper takes 100; longer helps little).
        start: token ids whose vectors the prompt begins as, `length` of them: then it starts as if these
            tokens stood there. By default drawn from the vocabulary with `seed`, as the paper prefers to
            random numbers (section 3.2).
    """

    def __init__(self, model: Any, length: int = 20, start: Sequence[int] | None = None, seed: int = 0):
        super().__init__(model, length)
        base = model.embedding.tokens
        if type(base) is not Embedding:
            raise ValueError(f"the embedding is a {type(base).__name__} already; remove() that first")
        ids = start_ids(start, length, base.num_embeddings, seed)
        freeze(model)
        prompt_pd = base.weight.detach()[ids.to(base.weight.device)].clone()
        self.base = [base]  # in a list: not a module of ours
        self.place = next(name for name, module in model.named_modules() if module is base)
        replace(model, self.place, PromptedEmbedding(base, prompt_pd))

    @property
    def prompt(self) -> nn.Parameter:
        """What learns, [p,d]."""
        prompt = self.model.embedding.tokens.prompt
        assert isinstance(prompt, nn.Parameter)
        return prompt

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: KVCache | None = None,
        last: int | None = None,
    ) -> State:
        """As the decoder's, without packing. The prompt carries no loss; logits are of `input_ids` alone."""
        past = 0 if cache is None else cache.length
        self._check(input_ids, document_ids, max(0, past - self.length))
        if past > 0:
            state: State = self.model(input_ids, None, attention_mask, None, position_ids, cache, last=last)
            return state
        shape = (len(input_ids), self.length)
        first = self.config.vocab_size
        prompt = torch.arange(first, first + self.length, device=input_ids.device).expand(shape)
        # Before padding on the left too: the mask hides that from the text and from its positions alike.
        before = lambda tensor, new: None if tensor is None else torch.cat([new.to(tensor), tensor], 1)  # noqa: E731
        positions = None if position_ids is None else position_ids + self.length
        state = self.model(
            before(input_ids, prompt),
            before(labels, torch.full(shape, IGNORE)),
            before(attention_mask, torch.ones(shape)),
            position_ids=before(positions, torch.arange(self.length).expand(shape)),
            cache=cache,
            last=last,
        )
        if labels is None and last is None:
            state = state.updated(logits=state.logits[:, self.length :])
        return state

    def new_cache(self, batch: int, max_length: int | None = None) -> KVCache:
        """An empty cache for `batch` rows of up to `max_length` tokens, and the prompt."""
        cache: KVCache = self.model.new_cache(batch, None if max_length is None else max_length + self.length)
        return cache

    def remove(self) -> Any:
        replace(self.model, self.place, self.base[0])
        only_train(self.model)
        return self.model


def start_ids(start: Sequence[int] | None, length: int, vocab_size: int, seed: int) -> Tensor:
    """The tokens to start from, [p]. Raises ValueError for another number of them, or unknown ones."""
    if start is None:
        return torch.randint(vocab_size, (length,), generator=torch.Generator().manual_seed(seed))
    if len(start) != length or not all(0 <= i < vocab_size for i in start):
        raise ValueError(f"start needs {length} token ids of 0 to {vocab_size - 1}, got {list(start)}")
    return torch.tensor(list(start))
