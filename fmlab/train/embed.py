"""Vectors for texts: an encoder run over many texts, in batches of like length.

Shapes: n texts, d width of the encoder.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fmlab.data import TextTokenizer, WordPiece
from fmlab.data.batch import Batch
from fmlab.models import BERT
from fmlab.models.minilm import MAX_LENGTH, minilm_folder, sentence_embedding

Pooling = Callable[[Tensor, Tensor], Tensor]  # (hidden[b,l,d], attention_mask[b,l]) -> [b,d]


class TextEncoder:
    """An encoder and its tokenizer as one thing: texts in, vectors out.

    model:      called with input_ids, attention_mask and what else the tokenizer's `batch` gives; writes
                `hidden` [b,l,d]
    pooling:    from hidden states to a vector; by default the normalised mean
    max_length: tokens of a text that are read, with the special ones; the rest is cut off
    """

    def __init__(
        self,
        model: Any,
        tokenizer: TextTokenizer,
        pooling: Pooling = sentence_embedding,
        max_length: int = MAX_LENGTH,
    ) -> None:
        """Raises ValueError when the model has fewer positions than max_length, or fewer rows than tokens."""
        config = model.config
        if not 3 <= max_length <= config.max_length:
            raise ValueError(
                f"max_length must be from 3 to the model's {config.max_length}, got {max_length}"
            )
        if tokenizer.vocab_size > config.vocab_size:
            raise ValueError(
                f"the tokenizer has {tokenizer.vocab_size} tokens and the model only {config.vocab_size}"
            )
        self.model, self.tokenizer, self.pooling, self.max_length = model, tokenizer, pooling, max_length

    @classmethod
    def minilm(cls) -> "TextEncoder":
        """all-MiniLM-L6-v2. Raises ImportError that names the package with its weights."""
        folder = minilm_folder()
        return cls(BERT.from_pretrained(folder, heads="encoder"), WordPiece.load(folder))

    @torch.no_grad()
    def __call__(self, texts: Sequence[str], batch_size: int = 32) -> Tensor:
        """Vectors [n,d] on the CPU, in the order of `texts`; the model is in eval mode meanwhile.

        Texts of like length share a batch, so that little is padded. Raises ValueError without texts.
        """
        if not texts or batch_size < 1:
            raise ValueError(
                f"give at least one text and a batch_size of 1, got {len(texts)} and {batch_size}"
            )
        was_training = self.model.training
        self.model.eval()
        device = next(self.model.parameters()).device
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))  # characters, near enough
        rows: list[Tensor] = []
        try:
            for start in range(0, len(order), batch_size):
                chosen = [texts[i] for i in order[start : start + batch_size]]
                batch = self.tokenizer.batch(chosen, max_length=self.max_length)
                batch = {name: tensor.to(device) for name, tensor in taken(batch, self.model).items()}
                hidden = self.model(**batch)["hidden"]
                rows += self.pooling(hidden, batch["attention_mask"]).float().cpu().unbind()
        finally:
            self.model.train(was_training)
        placed: list[Tensor] = [rows[0]] * len(rows)
        for place, row in zip(order, rows, strict=True):
            placed[place] = row
        return torch.stack(placed)


def taken(batch: Batch, model: Any) -> Batch:
    """The batch of a tokenizer without the token types, for a model that has none (DistilBERT)."""
    if getattr(model.config, "token_types", 1):
        return batch
    return {name: tensor for name, tensor in batch.items() if name != "token_type_ids"}
