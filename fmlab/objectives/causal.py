"""Next-token prediction.

Shapes: b batch, l sequence length.
"""

from typing import Any

import torch
from torch import Tensor

from fmlab.data.batch import IGNORE, Batch
from fmlab.objectives.terms import LossTerms, Term


def shift_labels(
    input_ids: Tensor, attention_mask: Tensor | None = None, document_ids: Tensor | None = None
) -> Tensor:
    """Labels for next-token prediction: labels[t] is input_ids[t + 1], or -100 where there is no target.

    input_ids [b, l]; attention_mask [b, l] (1 real, 0 pad); document_ids [b, l]. The last position, a pad,
    a position whose next token is a pad, and the last token of a document have no target.
    """
    labels_bl = torch.full_like(input_ids, IGNORE)
    labels_bl[:, :-1] = input_ids[:, 1:]
    if attention_mask is not None:
        real = attention_mask.bool()
        labels_bl[:, :-1].masked_fill_(~(real[:, :-1] & real[:, 1:]), IGNORE)
    if document_ids is not None:
        labels_bl[:, :-1].masked_fill_(document_ids[:, :-1] != document_ids[:, 1:], IGNORE)
    return labels_bl


class CausalLM:
    """Cross-entropy of the next token, as one loss term named "causal".

    The model is called as model(**batch) and returns a mapping with "loss_sum" [] (fp32), the sum over
    the labels that are not -100. A batch without "labels" [b, l] gets them by `shift_labels`.
    """

    name = "causal"

    def __call__(self, model: Any, batch: Batch) -> LossTerms:
        """Run the model and return {"causal": Term}."""
        labels_bl = self.labels(batch)
        state = model(**{**batch, "labels": labels_bl})
        return {self.name: Term(sum=state["loss_sum"], count=self._count(labels_bl))}

    def counts(self, batch: Batch) -> dict[str, Tensor]:
        """How many targets the batch has, by term, from the labels alone: no forward pass is needed."""
        return {self.name: self._count(self.labels(batch))}

    @staticmethod
    def labels(batch: Batch) -> Tensor:
        """The batch's labels [b,l], or the next tokens."""
        if "labels" in batch:
            return batch["labels"]
        return shift_labels(batch["input_ids"], batch.get("attention_mask"), batch.get("document_ids"))

    @staticmethod
    def _count(labels_bl: Tensor) -> Tensor:
        return (labels_bl != IGNORE).sum()

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"
