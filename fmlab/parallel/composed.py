"""The training step of any layout by hand: every strategy that the layout names, one after the other.

The order: tensor, context, expert, recompute, pipeline, then the states (DDP, ZeRO or FSDP) of what is left
on this rank. Each strategy changes the model in place and notes in the ledger what became of its parameters.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fmlab.parallel import context, expert, fsdp, pipeline, recompute, tensor, zero
from fmlab.parallel.build import Build
from fmlab.parallel.ddp import replicas
from fmlab.parallel.ddp.states import Replicas
from fmlab.parallel.dropout import numbered
from fmlab.parallel.engine import Engine
from fmlab.parallel.layout import Batch
from fmlab.parallel.ledger import Ledger
from fmlab.parallel.mesh import Mesh
from fmlab.parallel.same_batches import check_same_batches
from fmlab.parallel.states import States


class Composed(Engine):
    """Runs any layout. Starts from the first rank's weights."""

    name = "fmlab"
    dropout_seed = 0

    # region divide
    def _divide(self, ledger: Ledger) -> Ledger:
        """Raises ValueError when the ranks' models differ and where a strategy cannot do what is asked."""
        layout, model = self.layout, self.model
        self.mesh = Mesh(layout.grid(), ours=layout.collectives == "fmlab")
        self.data, self.stages = self.mesh.axis("data"), self.mesh.axis("pipeline")
        self._start_equal()
        declared: Any = getattr(model, "parallel_plan", None)
        ledger = Ledger(model, self.mesh)
        build = Build(
            model,
            layout,
            self.mesh,
            declared() if declared else None,
            ledger,
            self.backend,
            objective=self.objective,
            initial=fsdp.first_values(model, self.mesh.axis(*self.mesh.grid.order)),
        )
        if layout.tensor > 1:
            tensor.apply(build)
        if layout.context > 1:
            context.apply(build)
        if layout.expert > 1:
            expert.apply(build)
        #: Whether ranks with different rows talk in every forward pass.
        self.counts_together = expert.count_over_ranks(build)
        if layout.recompute != "none":
            recompute.apply(build)
        self.pipeline = pipeline.cut(build) if layout.pipeline > 1 else None
        self.states = self._states(build)
        self.build = build
        return ledger

    # endregion

    #: Whether the micro-batches of the first step were compared over the ranks that share them.
    _compared = False

    def _check_optimizer(self) -> None:
        self.states.check_optimizer(self.optimizer)

    def _states(self, build: Build) -> States:
        if self.layout.zero:
            return zero.states(build)
        return fsdp.states(build) if self.layout.fsdp else Replicas(build)

    def _start_equal(self) -> None:
        if not dist.is_initialized():
            return
        world = dist.group.WORLD
        replicas.check_same_model(self.model, world)
        if self.layout.data * self.layout.context * self.layout.micro_batches > 1:
            replicas.check_no_batch_statistics(self.model)
        if not fsdp.is_on_meta(self.model):
            replicas.broadcast_from_first(self.model, world)
        if self.whole_batch and self.data.size > 1:  # it must see the samples of all ranks
            self.objective = self.objective.across(self.data.group)  # type: ignore[attr-defined]

    # region accumulate
    def _accumulate(self, micro_batches: Sequence[Batch], counts: Mapping[str, int]) -> Tensor:
        if not self._compared and self.layout.tensor * self.layout.context > 1:
            check_same_batches(micro_batches, self.mesh)
            self._compared = True
        for prepare in self.build.before_step:
            prepare(self.steps)
        self.states.start()
        batches = self._in_step(self._with_targets(micro_batches))
        for change in self.build.batch_steps:
            batches = [numbered(change(batch), getattr(batch, "first_row", 0)) for batch in batches]
        if self.pipeline is not None:
            sums = self.pipeline.run(batches, counts, self)
        else:
            sums = self._one_after_another(batches, counts)
        sums = self.states.finish(sums)  # also where this rank had no target at all
        if self.pipeline is not None:
            self.pipeline.finish()
        self.ledger.sum_partial_(self.ledger.gradients())
        return self.stages.all_reduce_(sums)  # only the last stage knows the losses

    def _one_after_another(self, batches: Sequence[Batch], counts: Mapping[str, int]) -> Tensor:
        sums = self._zero_sums()
        for i, batch in enumerate(batches):
            share, of_batch = self._forward(batch, counts)
            if i == len(batches) - 1:
                self.states.last_backward()
            share.backward()
            sums += of_batch
        return sums

    # endregion

    def _in_step(self, batches: list[Batch]) -> list[Batch]:
        """As many micro-batches as the data rank with the most, where passes communicate: empty ones
        added."""
        talks = self.states.lockstep or self.layout.expert > 1 or self.counts_together
        if not talks or self.data.size == 1:
            return batches
        shapes = {name: (tuple(t.shape[1:]), t.dtype) for name, t in batches[0].items()} if batches else {}
        every = self.data.gather_objects((len(batches), shapes))
        most = max(number for number, _ in every)
        known: dict[str, Any] = next((s for _, s in every if s), {})
        empty = {
            name: self._zero_sums().new_empty((0, *shape), dtype=dtype)
            for name, (shape, dtype) in known.items()
        }
        return batches + [empty] * (most - len(batches))

    def _update(self, gradients: Mapping[str, Tensor], norm: Tensor) -> None:
        super()._update(gradients, norm)
        self.states.updated()

    def _loaded(self) -> None:
        self.states.updated()

    def _sum_over_ranks(self, values: Tensor) -> Tensor:
        return self.data.all_reduce_(values)

    def _agree(self, names: list[str]) -> list[str]:
        known = [theirs for theirs in self.data.gather_objects(names) if theirs]
        if not known:
            raise ValueError("no rank has a micro-batch in its first step; give at least one rank some data")
        if any(theirs != known[0] for theirs in known):
            raise ValueError(f"the objectives of the ranks return different loss terms: {known}")
        return list(known[0])

    def differing_replicas(self) -> list[str]:
        """Names of parameters that are not bitwise equal on all ranks (none, if all is well)."""
        return replicas.differing(self.full_params(), dist.group.WORLD) if dist.is_initialized() else []

    @property
    def ranks(self) -> Any:
        return dist.group.WORLD if dist.is_initialized() else None

    def close(self) -> None:
        super().close()
        for undo in reversed(self.build.at_close):
            undo()
        self.states.close()
        self.mesh.close()
