"""A rank's part of each sequence, taken from a micro-batch after its labels were made.

Labels say what follows each token, so they are shifted over the whole row first: shifted after the cut, the
last token of every part would lose its target, or get one that does not follow it. In the same way positions
and the numbers of documents are those of the whole row.

Shapes: b batch, l length.
"""

from typing import Any

import torch
from torch import Tensor

from fmlab.data.batch import IGNORE, Batch
from fmlab.models.attention import document_runs
from fmlab.models.plan import ParallelPlan
from fmlab.parallel.context.positions import columns_of, indices, padded_length
from fmlab.parallel.mesh import Axis

#: What a padded column holds, where it is not 0.
_PADDING = {"labels": IGNORE}


class SequenceCut:
    """Turns a micro-batch into this rank's part of it; every rank of `axis` has the same micro-batch.

    model: gives positions and defaults (`prepare`). A row whose length cannot be divided is padded at its
    end; padding is called so in the attention mask, and has no target.
    """

    def __init__(self, model: Any, plan: ParallelPlan, objective: Any, axis: Axis, balance: str) -> None:
        self.prepare, self.plan, self.objective = model.prepare, plan, objective
        self.axis, self.balance = axis, balance

    # region cut
    def __call__(self, batch: Batch) -> Batch:
        """Raises ValueError for an input that the plan does not know how to cut."""
        unknown = sorted(set(batch) - {*self.plan.sequence, *self.plan.first_token})
        if unknown:
            raise ValueError(
                f"context parallelism cannot cut {unknown[0]!r}: the model's plan names the inputs "
                f"{', '.join(self.plan.sequence)} along the sequence and "
                f"{', '.join(self.plan.first_token) or 'none'} of whole rows; leave it out, or use context=1"
            )
        batch = self._labelled(batch)
        state = self.prepare(**batch)  # positions of the whole rows
        along = {name: state[name] for name in self.plan.sequence if name in state}
        if "document_ids" in along:
            along["document_ids"] = -1 - document_runs(along["document_ids"])  # numbers that survive a cut
        along = padded(along, padded_length(batch["input_ids"].shape[1], self.axis.size, self.balance))
        length = along["input_ids"].shape[1]
        mine = indices(columns_of(self.axis.rank, self.axis.size, length, self.balance))
        part = {name: tensor[:, mine.to(tensor.device)] for name, tensor in along.items()}
        return part | {name: self._of_rows(batch[name]) for name in self.plan.first_token if name in batch}

    # endregion

    def _labelled(self, batch: Batch) -> Batch:
        """The micro-batch with its labels of tokens, if the objective makes them itself."""
        make = getattr(self.objective, "labels", None)
        if "labels" in batch or "labels" not in self.plan.sequence or make is None:
            return batch
        labels: Tensor = make(batch)
        return {**batch, "labels": labels} if labels.shape == batch["input_ids"].shape else batch

    def _of_rows(self, labels_b: Tensor) -> Tensor:
        """Labels of rows, where the first token is: on the first rank, whatever the balance."""
        return labels_b if self.axis.rank == 0 else torch.full_like(labels_b, IGNORE)


def padded(tensors: Batch, length: int) -> Batch:
    """[b,l] tensors lengthened to `length` columns, with an attention mask that says so."""
    ids = tensors["input_ids"]
    more = length - ids.shape[1]
    if not more:
        return tensors
    tensors = {"attention_mask": torch.ones_like(ids), **tensors}
    return {
        name: torch.cat([t, t.new_full((len(t), more), _PADDING.get(name, 0))], 1)
        for name, t in tensors.items()
    }
