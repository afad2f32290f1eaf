"""Fully sharded states: every rank keeps some rows of every parameter, of its gradient and its moments."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fmlab.parallel.build import Build
from fmlab.parallel.fsdp.build import make_units
from fmlab.parallel.fsdp.hooks import Schedule
from fmlab.parallel.fsdp.messages import Group
from fmlab.parallel.fsdp.record import Record
from fmlab.parallel.states import States


class FullyShardedStates(States):
    """Parameters are gathered unit by unit, when they are needed and as long as they are (Zhao et al. 2023).

    The units are the model's blocks. What belongs to no single block (tied weights, tables that several
    blocks share) is the root unit: gathered when a step begins, given back when it ends.

    Every micro-batch sums its gradients over the ranks at once, so that no rank ever holds more of them than
    one unit's. To sum once a step instead ("no sync") would save (micro_batches - 1) reduce-scatters of the
    model and cost whole gradients on every rank: 4 bytes a parameter in fp32.
    """

    lockstep = True

    def __init__(self, build: Build) -> None:
        """Raises ValueError for parameters that are offloaded: FSDP here keeps its shards on the device."""
        super().__init__(build)
        layout = build.layout
        if layout.offload != "none":
            raise ValueError(
                f"Layout(fsdp=True, offload={layout.offload!r}): FSDP keeps its shards on the device here; "
                "use zero=1, 2 or 3, which can offload"
            )
        self._axis = build.mesh.axis("shard")
        self.root, self.units, modules = make_units(build)
        self.schedule = Schedule(self.units, layout.reshard, prefetch=1)
        self._in_step = self._last_backward = False
        self._handles: list[Any] = []
        for unit in (self.root, *self.units):
            unit.agree = self._agree if self._axis.size > 1 else None
        for unit, module in zip(self.units, modules, strict=True):
            self._handles += self.schedule.attach(unit, module)
            self._handles += [m.register_forward_pre_hook(_gathered_only(unit)) for m in _owners(unit)]
        self._handles += [
            build.model.register_forward_pre_hook(self._before_model),
            build.model.register_forward_hook(self._after_model),
        ]

    @property
    def groups(self) -> list[Group]:
        """All messages' parameters: the root's, then unit by unit."""
        return [group for unit in (self.root, *self.units) for group in unit.groups]

    # ---- a step ----------------------------------------------------------------------------------------

    # region step
    def start(self) -> None:
        self._in_step, self._last_backward = True, False
        self.schedule.begin()
        self._in_pass(True)
        for group in self.groups:
            group.forget()
        self.root.gather()

    def last_backward(self) -> None:
        self._last_backward = True

    def finish(self, sums: Tensor) -> Tensor:
        self.root.reduce()  # in the first step a rank that did something else learns of it here at the latest
        for unit in (self.root, *self.units):
            if any(p.full.grad is not None for p in unit.parameters):
                unit.reduce()  # of a backward pass that was made in parts
            unit.free()
        for group in self.groups:
            group.settle()
        waiting = [group.start_replicas() for group in self.groups]
        sums = self._give_gradients(sums)
        for work in waiting:
            if work is not None:
                work.wait()
        self._in_step = False
        self._in_pass(False)
        for unit in (self.root, *self.units):
            unit.record = unit.agree = None
        return sums

    def _in_pass(self, begins: bool) -> None:
        for unit in (self.root, *self.units):
            unit.enter_pass(begins)

    def _give_gradients(self, sums: Tensor) -> Tensor:
        """Gradients for all parameters that some rank has used; which those are travels with the losses."""
        trained = [(group, p) for group in self.groups for p in group.trained]
        used = torch.tensor([float(p.name in group.used) for group, p in trained]).to(sums)
        message = self.summed.all_reduce_(torch.cat([sums, used]))
        for group in self.groups:
            group.give_gradients()
        for (_, p), ranks in zip(trained, message[len(sums) :].tolist(), strict=True):
            if not ranks:
                p.shard.grad = None
        return message[: len(sums)]

    # endregion

    def _agree(self, what: str) -> None:
        """In the first step, before each message: do all ranks send the same? Else they would wait for ever.

        Raises ValueError on all of them.
        """
        here, every = self._axis.ranks[self._axis.rank], self._axis.gather_objects(what)
        for other, theirs in zip(self._axis.ranks, every, strict=True):
            if theirs != what:
                raise ValueError(
                    f"rank {other} {theirs} while rank {here} {what}: with fsdp every rank must call "
                    "the same blocks in the same order in each step. Leave no block out by the data of one "
                    "rank, or move the choice inside a block"
                )

    def record_next_step(self) -> Record:
        """Record the events of the next step; what is returned is filled by it."""
        record = Record()
        for unit in (self.root, *self.units):
            unit.record = record
        return record

    # ---- outside a step --------------------------------------------------------------------------------

    def _before_model(self, *_: Any) -> None:
        self.schedule.enter_model()
        if not self._in_step:
            self._in_pass(True)
        self.root.gather()

    def _after_model(self, *_: Any) -> None:
        self.schedule.leave_model()
        if not self._in_step:
            self.root.free()
            self._in_pass(False)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """All parameters whole, on every rank, inside the block, to be read only; every rank enters it."""
        every = (self.root, *self.units)
        for unit in every:
            unit.gather()
            unit.keep = True
        try:
            yield
        finally:
            for unit in every:
                unit.keep = False
                unit.free()

    def close(self) -> None:
        """Take the hooks off and put whole parameters back; every rank calls it.

        Not after a step that failed, and not for a model that was built on the meta device because no rank
        could hold it: those keep their shards.
        """
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._in_step or self.build.initial is not None:
            return
        with torch.no_grad():
            for unit in (self.root, *self.units):
                unit.gather()
                for p in unit.parameters:
                    p.full.data = p.full.data.to(p.shard.dtype, copy=True)
                    p.full.grad = None


def _owners(unit: Any) -> list[nn.Module]:
    return list({id(module): module for p in unit.parameters for module, _ in p.owners}.values())


def _gathered_only(unit: Any) -> Any:
    def check(module: nn.Module, _: Any) -> None:
        if not unit.gathered:
            raise RuntimeError(
                f"a {type(module).__name__} inside {unit.name!r} was called by itself, while only a part of "
                f"its rows is here; call {unit.name!r} as a whole, or enter engine.states.gathered()"
            )

    return check
