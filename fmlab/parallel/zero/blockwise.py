"""The training states of stage 3: who owns which vector, and what happens around each block."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fmlab.parallel.build import Build
from fmlab.parallel.placeholder import DividedParameter
from fmlab.parallel.zero.divided import DividedStates
from fmlab.parallel.zero.gathering import (
    Gathered,
    NotedViews,
    Owner,
    gather_forward_scatter_backward,
    pass_forward_enter_backward,
)
from fmlab.parallel.zero.owned import Owned
from fmlab.parallel.zero.partition import Flat
from fmlab.parallel.zero.whose import distinct, grouped_alike, owners_of, users_of

OUTSIDE = -1  # the model itself, outside of its blocks
IN_FLIGHT = 1  # gradients of vectors under way; more would keep more whole gradients in memory


class DividedParameters(DividedStates):
    """Stage 3: a rank has slices of everything, and whole parameters of one block and the next.

    The unit is the block: its parameters are gathered together. One that several blocks use (a tied
    embedding) stays from the first of them to the last. Frozen parameters are divided too. With several
    micro-batches each gathers anew, and gradients are summed over ranks after each, so that a rank never
    keeps more than its slices.

    Every rank must run the same blocks in the same order (the first step checks it); inside a block it may
    take its own way.
    """

    lockstep = True

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        model = build.model
        self.blocks = distinct(getattr(model, "blocks", ()))
        self._trigger = torch.zeros((), device=build.backend.device, requires_grad=True)
        self._noted = NotedViews()
        self._anchors: dict[Gathered, Tensor] = {}
        self._under_way: list[tuple[Gathered, Tensor, Any]] = []
        self._used: set[str] = set()
        self._emptied: dict[str, nn.Parameter] = {}  # the model's own, until it is given back
        self._in_step = False
        parameters = dict(self.ledger.parameters())
        self.vectors = [vector for group in self._groups(parameters) for vector in group]
        self.owned = [vector.owned for vector in self.vectors]
        self._of_block = {
            index: [vector for vector in self.vectors if index in vector.users]
            for index in (OUTSIDE, *range(len(self.blocks)))
        }
        for vector in self.vectors:
            vector.agree = self._agree if vector.flat.axis.size > 1 else None
        for index, block in enumerate(self.blocks):
            self._wrap(block, index)
        if self._of_block[OUTSIDE]:
            self._wrap(model, OUTSIDE)

    # region divide
    def _groups(self, parameters: dict[str, nn.Parameter]) -> Any:
        """Vectors of parameters that the same blocks use, in the order of the forward pass."""
        owners, users = owners_of(self.build.model), users_of(self.blocks)
        by_users: dict[tuple[int, ...], dict[str, nn.Parameter]] = {}
        for name, parameter in parameters.items():
            modules = [module for module, _ in owners[id(parameter)]]
            where = {index for module in modules for index in users.get(id(module), (OUTSIDE,))}
            by_users.setdefault(tuple(sorted(where)), {})[name] = parameter
        for places, group in sorted(by_users.items()):
            for kind in self.axes.kinds(group):
                for alike, cast in grouped_alike(kind, owners, self.build):
                    yield [self._divide(alike, places, {n: owners[id(p)] for n, p in alike.items()}, cast)]

    def _divide(
        self,
        parameters: dict[str, nn.Parameter],
        users: tuple[int, ...],
        owners: dict[str, list[Owner]],
        cast: bool,
    ) -> Gathered:
        """Keep this rank's slice of the parameters, and put placeholders into the modules."""
        flat = Flat(parameters, *self.axes.of(next(iter(parameters))))
        own = flat.fill(parameters)[flat.own].clone()
        owned = Owned(flat, own, self.on_host)
        owned.note(self.ledger)
        for name, parameter in parameters.items():
            placeholder = DividedParameter.standing_for(name, parameter, flat.axis.size, "zero=3")
            for module, leaf in owners[name]:
                module._parameters[leaf] = placeholder
            parameter.data = parameter.data.new_empty(0)
            self._emptied[name] = parameter
        in_host = self.build.layout.offload == "parameters" and flat.trainable
        return Gathered(owned, None if in_host else own, users, owners, cast)

    # endregion

    def _agree(self, vector: Gathered, what: str) -> None:
        """In the first step, before each message: do all ranks send the same? Else they would wait for ever.

        Raises ValueError on all of them.
        """
        axis, mine = vector.flat.axis, f"{what} {vector.flat.names[0]!r} and what goes with it"
        for other, theirs in zip(axis.ranks, axis.gather_objects(mine), strict=True):
            if theirs != mine:
                raise ValueError(
                    f"rank {other} {theirs} while rank {axis.ranks[axis.rank]} {mine}: with zero=3 every "
                    "rank must run the same blocks in the same order in each step. Leave no block out by the "
                    "data of one rank, or move the choice inside a block"
                )

    # region block
    def _run(self, index: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The forward pass of a block with its parameters gathered."""
        vectors = self._of_block[index]
        for vector in vectors:
            if index == vector.users[0] or not vector.shown:
                self._show(vector)
        for vector in self._of_block.get(index + 1, ()):
            vector.choose_dtype()
            vector.prefetch()
        try:
            with self._noted.hooks():
                result = forward(*args, **kwargs)
            return self._tie(index, result, (args, kwargs))
        finally:
            for vector in vectors:
                if index == vector.users[-1] or OUTSIDE in vector.users:
                    self._give_up(vector)

    def _show(self, vector: Gathered) -> None:
        self._noted.forget(vector)
        vector.choose_dtype()
        vector.gather()
        self._noted.watch(vector)
        if vector.flat.trainable:
            self._anchors[vector], tensors = gather_forward_scatter_backward(
                self._trigger, vector, self._scatter
            )
        else:
            tensors = vector.views()
        vector.show(tensors)

    def _give_up(self, vector: Gathered) -> None:
        vector.hide()
        self._noted.forget(vector)
        vector.free()

    def _tie(self, index: int, result: Any, given: Any) -> Any:
        """Let the backward pass announce itself where it enters the block: at what the block has made."""
        leaves, spec = pytree.tree_flatten(result)
        old = {id(leaf) for leaf in pytree.tree_leaves(given)}
        made = [
            i
            for i, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor) and leaf.requires_grad and id(leaf) not in old
        ]
        if not made:
            return result
        anchors = [self._anchors[vector] for vector in self._of_block[index] if vector in self._anchors]
        anchors = [anchor for anchor in anchors if anchor.requires_grad]
        tied = pass_forward_enter_backward(partial(self._enter, index), anchors, [leaves[i] for i in made])
        for i, tensor in zip(made, tied, strict=True):
            leaves[i] = tensor
        return pytree.tree_unflatten(leaves, spec)

    # endregion

    # region backward
    def _enter(self, index: int) -> None:
        """The backward pass enters a block: its parameters are needed again, and next those of the one
        before."""
        for vector in self.vectors:
            if not vector.flat.trainable and vector.users[0] > index:
                self._give_up(vector)  # nothing of theirs is left to do; others go when they have gradients
        for vector in self._of_block[index]:
            vector.gather()
            vector.show(
                [view.requires_grad_(vector.flat.trainable) for view in vector.views()]
            )  # for recompute
        for vector in self._of_block.get(index - 1, ()):
            vector.prefetch()

    def _scatter(self, vector: Gathered, gradients: Sequence[Tensor | None]) -> None:
        """All gradients of a vector are there: start their sum over ranks, and give its parameters up."""
        flat = vector.flat
        room = torch.zeros(flat.size, dtype=flat.wide, device=flat.device)
        for (name, view), gradient in zip(flat.views(room).items(), gradients, strict=True):
            if gradient is not None:
                view.copy_(gradient)
                self._used.add(name)
        self._give_up(vector)
        if vector.agree is not None:
            vector.agree(vector, "sums the gradients of")
        own = room.new_empty(flat.length)
        self._under_way.append((vector, own, self.reduce_scatter(flat, own, room)))
        while len(self._under_way) > IN_FLIGHT:
            self._arrive()

    def reduce_scatter(self, flat: Flat, own: Tensor, vector: Tensor) -> Any:
        """Leave the sum over ranks of this rank's slice of `vector` in `own`; returns what to wait for."""
        return flat.axis.reduce_scatter_into(own, vector, async_op=not flat.axis.ours)

    def _arrive(self) -> None:
        vector, own, work = self._under_way.pop(0)
        if work is not None:
            work.wait()
        vector.owned.add(own)

    # endregion

    def start(self) -> None:
        self._in_step = True
        self._used.clear()
        self._anchors.clear()
        self._under_way.clear()
        for vector in self.vectors:
            vector.owned.clear()
            self._give_up(vector)

    def finish(self, sums: Tensor) -> Tensor:
        for vector in self.vectors[:1]:
            if vector.agree is not None:
                vector.agree(vector, "ends its passes, before it gathers")
        while self._under_way:
            self._arrive()
        for vector in self.vectors:
            vector.agree = None
            self._give_up(vector)
        self._anchors.clear()
        sums, used = self._agree_on_used(sums, self._used)
        self._show_gradients(used)
        self._in_step = False
        return sums

    @torch.no_grad()
    def updated(self) -> None:
        """Round the masters to what is sent, where that is another tensor."""
        for vector in self.vectors:
            source, master = vector.source, vector.owned.master
            if source is not None and vector.flat.trainable and source is not master:
                source.copy_(master)

    def weights_held(self) -> list[Tensor]:
        return [vector.source for vector in self.vectors if vector.source is not None]

    def close(self) -> None:
        """Give the model its whole parameters back; every rank calls it. Not after a step that failed."""
        if self._in_step:
            return
        for vector in self.vectors:
            self._give_up(vector)
            vector.dtype = vector.flat.dtype
            for (name, owners), whole in zip(vector.owners.items(), vector.views(), strict=True):
                self._emptied[name].data = whole.clone()
                for module, leaf in owners:
                    module._parameters[leaf] = self._emptied[name]
            self._give_up(vector)

    def _wrap(self, module: nn.Module, index: int) -> None:
        """Run `_run` around the module's forward."""
        kept = vars(module).get("forward")
        object.__setattr__(module, "forward", partial(self._run, index, module.forward))

        def undo() -> None:
            del module.forward
            if kept is not None:
                object.__setattr__(module, "forward", kept)

        self.build.at_close.append(undo)
