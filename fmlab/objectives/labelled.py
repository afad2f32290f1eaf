"""Objectives whose targets come with the batch, as labels that lie where the model predicts them.

Shapes: b batch, l sequence length, t output length.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fmlab.data.batch import IGNORE, Batch
from fmlab.objectives.causal import CausalLM
from fmlab.objectives.terms import LossTerms, Term, check_weights


@dataclass(frozen=True)
class Part:
    """One term: the batch's labels, where the model leaves the sum of their losses, and the weight."""

    labels: str
    loss: str
    weight: float = 1.0


class Labelled:
    """Cross-entropies that the model sums itself, a term for each set of labels.

    The model is called as model(**batch) and leaves an fp32 sum for each set of labels in its State. Labels
    of -100 are no targets; a batch of nothing else gives a loss of 0 and zero gradients.
    """

    def __init__(self, parts: Mapping[str, Part]) -> None:
        """parts: term -> Part. The first must be in every batch, the others where the batch has labels.

        Raises ValueError for a negative weight.
        """
        check_weights({name: part.weight for name, part in parts.items()})
        self.parts = dict(parts)

    def __call__(self, model: Any, batch: Batch) -> LossTerms:
        """Run the model and return {term: Term}. Raises ValueError when the batch has no labels."""
        counts = self.counts(batch)
        state = model(**batch)
        return {
            name: Term(state[self.parts[name].loss], count, self.parts[name].weight)
            for name, count in counts.items()
        }

    def counts(self, batch: Batch) -> dict[str, Tensor]:
        """How many targets the batch has, by term, from the labels alone: no forward pass is needed."""
        first = next(iter(self.parts.values())).labels
        if first not in batch:
            raise ValueError(
                f"{type(self).__name__} needs {first!r} in the batch, which has {sorted(batch)}; "
                f"{self.makers}"
            )
        present = {name: part for name, part in self.parts.items() if part.labels in batch}
        return {name: (batch[part.labels] != IGNORE).sum() for name, part in present.items()}

    def labels(self, batch: Batch) -> Tensor:
        """The labels of the first term."""
        return batch[next(iter(self.parts.values())).labels]

    #: Who makes batches for this, for the message.
    makers: ClassVar[str] = "add the labels, -100 where there is no target"

    def __repr__(self) -> str:
        weights = ", ".join(f"{name}: {part.weight:g}" for name, part in self.parts.items())
        return f"{type(self).__name__}({weights})"


class MaskedLM(Labelled):
    """BERT's pre-training: the term "masked", of "labels" [b,l], and if the batch has "sentence_labels" [b],
    the term "sentence": does the second text follow, or are the two swapped?

    sentence: weight of that term
    """

    makers = "MaskedSampler and SentencePairSampler make such batches"

    def __init__(self, sentence: float = 1.0) -> None:
        super().__init__(
            {
                "masked": Part("labels", "loss_sum"),
                "sentence": Part("sentence_labels", "sentence_loss_sum", sentence),
            }
        )


class Seq2SeqLM(Labelled):
    """An encoder-decoder's loss over its output, "labels" [b,t]: T5's span corruption, translation, answers.

    The model makes the decoder's inputs from the labels.
    """

    makers = "SpanSampler makes such batches"

    def __init__(self) -> None:
        super().__init__({"span": Part("labels", "loss_sum")})


class Classification(Labelled):
    """A class for each row, "class_labels" [b]: the term "class"."""

    makers = "add the classes, -100 for rows without one"

    def __init__(self) -> None:
        super().__init__({"class": Part("class_labels", "class_loss_sum")})


class PrefixLM(CausalLM):
    """Next-token prediction behind a prefix that is seen in both directions: the term "prefix".

    The batch has "prefix_lengths" [b]. Labels are made like those of CausalLM if there are none, and a next
    token that lies in the prefix is never a target: the model has seen it.
    """

    name = "prefix"

    @staticmethod
    def labels(batch: Batch) -> Tensor:
        """The next tokens [b,l], -100 for those in the prefix. Raises ValueError without prefix_lengths."""
        if "prefix_lengths" not in batch:
            raise ValueError(
                f"PrefixLM needs 'prefix_lengths' in the batch, which has {sorted(batch)}; PrefixSampler "
                "makes such batches, and CausalLM trains without a prefix"
            )
        labels_bl = CausalLM.labels(batch)
        real_bl = batch.get("attention_mask", torch.ones_like(labels_bl)).bool()
        # A prefix is counted in real tokens: a row may be padded in front.
        positions_bl = real_bl.cumsum(1) - 1
        return labels_bl.masked_fill(positions_bl < batch["prefix_lengths"][:, None] - 1, IGNORE)
