"""The contract of every way to run a training step, and the order of what happens in one.

An engine owns everything between "here are this rank's micro-batches" and "the weights are updated": how
gradients are scaled, summed over micro-batches and ranks, clipped and applied. Nobody else divides by
anything.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from fmlab.backends import Backend
from fmlab.models.dropout import drawing_masks
from fmlab.objectives import LossTerms, total_loss
from fmlab.parallel import dropout, legal, state
from fmlab.parallel.engine_checks import (
    check_gradients,
    check_objective,
    check_own_parameters,
    check_terms,
    check_unwrapped,
    checked_max_grad_norm,
    give_norms,
    trainable_names,
)
from fmlab.parallel.layout import Batch, Layout
from fmlab.parallel.lazy import kept_unless
from fmlab.parallel.ledger import Ledger

if TYPE_CHECKING:
    from fmlab.parallel.checkpoint import Snapshot

OptimizerFactory = Callable[[Iterable[tuple[str, nn.Parameter]]], Optimizer]


class Objective(Protocol):
    """What a model is trained for; see fmlab.objectives."""

    def __call__(self, model: Any, batch: Batch) -> LossTerms:
        """The loss terms of a batch."""

    def counts(self, batch: Batch) -> Mapping[str, Tensor]:
        """The counts of those terms, before any forward pass."""


@dataclass(frozen=True)
class StepResult:
    """What one step did, the same on every rank.

    loss_sum:  the loss summed over all targets of the global batch (of the first term, if there are several)
    count:     how many targets those were
    grad_norm: norm of the whole gradient, before clipping
    skipped:   the gradient was not finite, or the loss above the engine's `loss_limit`, so that the
               weights and the optimizer were left alone
    terms:     mean loss of each term
    total:     the loss that was minimised: the weighted sum of the terms' means
    """

    loss_sum: float
    count: int
    grad_norm: float
    skipped: bool
    terms: Mapping[str, float] = field(default_factory=dict)
    total: float | None = None

    @property
    def loss(self) -> float:
        """The loss that was minimised: a mean over all targets of all ranks and micro-batches."""
        return self.loss_sum / max(self.count, 1) if self.total is None else self.total


class Engine(ABC):
    """Runs steps of `layout` on `model`; one object on each rank.

    Subclasses say how gradients come about (`_accumulate`) and how ranks agree on numbers (`_sum_over_ranks`,
    `_agree`). What stands here holds for any strategy that keeps whole parameters on each rank.
    """

    name: ClassVar[str]
    #: Seed of the dropout masks (fmlab.models.dropout), the same on all ranks; None: torch's own dropout.
    dropout_seed: int | None = None
    #: Number of the next step, which masks depend on. A run that resumes sets it.
    steps: int = 0
    #: A loss above this, or one that is not finite, leaves the weights alone, too; None: only the gradient
    #: counts. The same on all ranks.
    loss_limit: float | None = None
    _closed = False

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        objective: Objective,
        optimizer: OptimizerFactory,
        backend: Backend,
        max_grad_norm: float | None = None,
    ) -> None:
        """Raises ValueError when nothing is trainable, max_grad_norm is not above 0, a gradient would be
        sparse or complex, the model is wrapped for data parallelism already, the objective counts nothing or
        needs the batch in one piece and gets micro-batches, or the optimizer has parameters of its own."""
        #: Whether the objective compares all samples of a batch, so that it cannot be run in parts.
        self.whole_batch: bool = getattr(objective, "whole_batch", False)
        if self.whole_batch and layout.micro_batches > 1:
            raise ValueError(f"micro_batches={layout.micro_batches}: {legal.in_one_piece(objective)}")
        max_grad_norm = checked_max_grad_norm(max_grad_norm)
        check_objective(objective)
        check_unwrapped(model)
        self.model, self.layout, self.objective, self.backend = model, layout, objective, backend
        self.max_grad_norm = max_grad_norm
        whole = Ledger(model)
        if not whole.trainable():
            raise ValueError("no parameter of the model requires a gradient: there is nothing to train")
        check_gradients(model, whole)
        self._trained = trainable_names(model)
        self._drops, self._first_row = dropout.drops(model), 0
        self._unhook = dropout.number_blocks(model) if self._drops else lambda: None
        self.ledger = self._divide(whole)
        self.optimizer = optimizer(list(self.ledger.trainable().items()))
        check_own_parameters(self.optimizer, self.ledger)
        self._check_optimizer()
        give_norms(self.optimizer, self.ledger, self.name)
        self._terms: list[str] = []
        self._at_rest = False

    def _divide(self, ledger: Ledger) -> Ledger:
        """Divide the model among the ranks, if that is what the engine does; returns where what lives."""
        return ledger

    def _check_optimizer(self) -> None:  # noqa: B027
        """Raise ValueError for an optimizer that would be wrong on what a rank holds."""

    # region step
    def step(self, micro_batches: Sequence[Batch]) -> StepResult:
        """One training step on this rank's micro-batches; every rank calls it.

        Ranks may hold different numbers of targets, of micro-batches, or none. The weights move as on one
        device that sees all micro-batches. A step whose gradient is not finite on any rank, or whose loss is
        above `loss_limit`, changes nothing and says so (`skipped`). The host waits for the device to read the
        losses with the norm before it decides on the update; on a lazy device the device decides and the host
        reads afterwards.
        """
        self._check_step(micro_batches)
        counts = self._global_counts(micro_batches)
        self._first_row = self._rows_before(micro_batches)
        sums = self._accumulate(micro_batches, counts)  # afterwards .grad holds the global gradient
        self.steps += 1
        gradients = self.ledger.gradients()
        norm = self.ledger.norm(gradients)
        fine = self._is_fine(sums[-1], norm)
        numbers = torch.cat([sums, norm.reshape(1).to(sums), fine.reshape(1).to(sums)])
        if self.backend.lazy:
            with self.backend.step(), kept_unless(fine, not self._at_rest, self.optimizer) as kept:
                self._update(gradients, norm)
        *losses, total, grad_norm, made = numbers.tolist()
        skipped = not made
        if self.backend.lazy:
            if skipped:
                kept.undo()
        elif not skipped:
            with self.backend.step():
                self._update(gradients, norm)
        means = {term: loss / max(counts[term], 1) for term, loss in zip(self._terms, losses, strict=True)}
        return StepResult(losses[0], counts[self._terms[0]], grad_norm, skipped, means, total)

    # endregion

    def _is_fine(self, loss: Tensor, norm: Tensor) -> Tensor:
        """Whether the update is made: [] (bool), decided where the loss and the norm are."""
        fine = norm.isfinite()
        if self.loss_limit is None:
            return fine
        limit = torch.tensor(self.loss_limit).to(loss.device)  # data, not a constant of a lazy program
        return fine & loss.isfinite() & (loss <= limit)

    def _update(self, gradients: Mapping[str, Tensor], norm: Tensor) -> None:
        if self.max_grad_norm is not None:
            self.ledger.clip_(gradients, norm, self.max_grad_norm)
        self.optimizer.step()

    @abstractmethod
    def _accumulate(self, micro_batches: Sequence[Batch], counts: Mapping[str, int]) -> Tensor:
        """Forward and backward over the micro-batches, leaving the gradient of the global mean in `.grad`.

        Returns, summed over all ranks, [terms + 1]: the loss sum of each term, then the total loss.
        """

    def _sum_over_ranks(self, values: Tensor) -> Tensor:
        """`values` added up over the ranks that hold different data."""
        return values

    def _agree(self, names: list[str]) -> list[str]:
        """The term names of all ranks: a rank without a micro-batch does not know them."""
        return names

    # region counts
    def _global_counts(self, micro_batches: Sequence[Batch]) -> dict[str, int]:
        """Targets of each term over all ranks and micro-batches, from the labels alone."""
        local = [self.objective.counts(batch) for batch in micro_batches]
        if not self._terms:
            self._terms = self._agree(list(local[0]) if local else [])
        summed = [sum(int(counts[term]) for counts in local) for term in self._terms]
        if self.layout.world_size == 1:
            return dict(zip(self._terms, summed, strict=True))
        over_ranks = self._sum_over_ranks(torch.tensor(summed, device=self.backend.device))
        return dict(zip(self._terms, over_ranks.tolist(), strict=True))

    # endregion

    def _check_step(self, micro_batches: Sequence[Batch]) -> None:
        """Raise ValueError for what is no list of micro-batches, or not what this objective takes; and for
        parameters that were frozen when the engine was made."""
        if self._closed:
            raise ValueError("this engine was closed and has let go of its model; make a new one")
        listed = isinstance(micro_batches, Sequence) and not isinstance(micro_batches, str)
        if not listed or not all(isinstance(batch, Mapping) for batch in micro_batches):
            raise ValueError(
                "step takes the list of this rank's micro-batches, each a mapping of names to tensors, not a "
                f"{type(micro_batches).__name__}: step([batch]), or step(layout.split(global_batch, place))"
            )
        self._check_trainable()
        if self.whole_batch:
            self._check_one_piece(micro_batches)

    def _check_trainable(self) -> None:
        thawed = sorted((trainable_names(self.model) | self.ledger.trainable().keys()) - self._trained)
        if thawed:
            raise ValueError(
                f"{state.some(thawed)} were frozen when the engine was made and are trainable now, so that "
                "the optimizer does not know them and their gradients would not be summed over ranks; make a "
                "new engine after thawing"
            )

    def _check_one_piece(self, micro_batches: Sequence[Batch]) -> None:
        """Raise ValueError on every rank unless each has one micro-batch with a row at least."""
        filled = len(micro_batches) == 1 and any(
            int(count) for count in self.objective.counts(micro_batches[0]).values()
        )
        wrong = self._sum_over_ranks(torch.tensor([int(not filled)], device=self.backend.device))
        if int(wrong):
            here = "another rank has not" if filled else f"this one has {len(micro_batches)}"
            reason = legal.in_one_piece(self.objective)
            raise ValueError(f"each rank needs one micro-batch with rows, {here}: {reason}")

    def _with_targets(self, micro_batches: Sequence[Batch]) -> list[Batch]:
        """The micro-batches that have a target. The others add nothing to the loss or to a gradient."""
        return [
            b
            for b in dropout.number_rows(micro_batches, self._first_row)
            if any(int(count) > 0 for count in self.objective.counts(b).values())
        ]

    def _rows_before(self, micro_batches: Sequence[Batch]) -> int:
        """How many rows of the global batch stand before this rank's first one, where masks need to know."""
        if not self._drops or self.dropout_seed is None or self.layout.data == 1:
            return 0
        place = self.layout.data_rank(dist.get_rank())
        rows = torch.zeros(self.layout.data, dtype=torch.int64, device=self.backend.device)
        rows[place] = sum(dropout.rows_of(batch) for batch in micro_batches)
        return int(self._sum_over_ranks(rows)[:place].sum())

    def masks(self, batch: Batch) -> AbstractContextManager[None]:
        """The context of a forward pass of one of the step's micro-batches: its dropout masks."""
        if self.dropout_seed is None or not self._drops:
            return nullcontext()
        rank = dist.get_rank() if self.layout.world_size > 1 else 0
        first_row = getattr(batch, "first_row", 0)
        return drawing_masks(dropout.masks_of(self.layout, rank, self.dropout_seed, self.steps, first_row))

    # region forward
    def _forward(self, batch: Batch, counts: Mapping[str, int], model: Any = None) -> tuple[Tensor, Tensor]:
        """One micro-batch: (its share of the global mean loss [], what `_accumulate` returns of it).

        model: called in place of the whole model (a stage of a pipeline).
        """
        model = self.model if model is None else model
        with self.backend.autocast(self.layout.precision), self.masks(batch):  # type: ignore[arg-type]
            terms = self.objective(model, self.backend.to_device(batch))
            check_terms(self.objective, terms, self._terms)
        share = total_loss(terms, counts)  # the only division: by the global count
        sums = [terms[name].sum.detach() for name in self._terms]
        return share, torch.stack([*sums, share.detach()]).to(self._sum_dtype)

    # endregion

    def _zero_sums(self) -> Tensor:
        return torch.zeros(len(self._terms) + 1, dtype=self._sum_dtype, device=self.backend.device)

    @property
    def _sum_dtype(self) -> torch.dtype:
        """Losses add up in fp32, or in fp64 for a model in fp64."""
        double = any(entry.dtype == torch.float64 for entry in self.ledger.entries.values())
        return torch.float64 if double else torch.float32

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the next steps, in all parameter groups."""
        self._at_rest = self.backend.lazy and lr == 0  # see fmlab.parallel.lazy
        for group in self.optimizer.param_groups:
            if not self._at_rest:
                group["lr"] = lr

    def full_params(self) -> dict[str, Tensor]:
        """Every parameter, whole, by its first name; every rank calls it. Not copies."""
        return self.ledger.all_whole({name: p.detach() for name, p in self.ledger.parameters()})

    def full_grads(self) -> dict[str, Tensor]:
        """The gradients of the last step as they were applied (after clipping), without unused parameters;
        every rank calls it."""
        return self.ledger.all_whole({name: g.detach() for name, g in self.ledger.gradients().items()})

    def full_optimizer_state(self) -> dict[str, Tensor]:
        """The optimizer's state, whole: "parameter/key" -> tensor (scalars such as the step count too); every
        rank calls it."""
        tensors = state.optimizer_tensors(self.optimizer, dict(self.ledger.parameters()))
        return self.ledger.all_whole(tensors)

    def extra_state(self) -> dict[str, Any]:
        """What else the next step depends on and `save` does not write: plain values, alike on all ranks."""
        return {}

    def load_extra_state(self, extra: Mapping[str, Any]) -> None:
        """Take up what `extra_state` gave. Raises ValueError for that of another kind of engine."""
        if extra:
            raise ValueError(f"a {type(self).__name__} has no {', '.join(sorted(extra))} to take up")

    def _loaded(self) -> None:  # noqa: B027
        """The ledger's parameters were filled from a checkpoint: bring the model's up to date."""

    def save(self, directory: str | Path) -> None:
        """Write weights, buffers and optimizer state; every rank calls it, and all learn of a failure.

        One rank writes, or where the state is divided every rank its own pieces; see
        fmlab.parallel.checkpoint. The files know nothing of the layout: any other layout or engine loads
        them. The folder appears as a whole or not at all; one that exists is refused. Raises
        fmlab.storage.StorageError or ValueError.
        """
        state.save(self, directory)

    def load(self, directory: str | Path) -> None:
        """Take up what `save` wrote, under any layout; every rank calls it.

        Raises ValueError that names the parameters that are missing, unknown or of another shape.
        """
        state.load(self, directory)

    def snapshot(self, copy: bool = False) -> "Snapshot":
        """What this rank would write now; every rank calls it. See fmlab.parallel.checkpoint.take."""
        from fmlab.parallel import checkpoint

        return checkpoint.take(self, copy)

    @property
    def ranks(self) -> Any:
        """The process group of all ranks that run this engine; None if it runs alone."""
        return None

    @property
    def is_writer(self) -> bool:
        """Whether this rank writes what all hold alike."""
        return self.ranks is None or dist.get_rank(self.ranks) == 0

    def close(self) -> None:
        """Detach the engine from the model, which can then be given to another one."""
        self._closed = True
        self._unhook()
