"""Where each parameter lives. Norm, clipping, checkpoints and parity ask the ledger, never the strategy.

A logical parameter is what the undivided model has. A rank holds a piece of it, which came about by none,
one or several cuts, each along an axis of the mesh: first among tensor-parallel (or expert) ranks, then
among the ranks that share optimizer states. Undone in reverse order, they give the whole parameter again; so
whatever has the shape of the piece (a gradient, a moment) becomes whole in the same way.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from fmlab.parallel.mesh import Axis, Mesh


class Division(Protocol):
    """A way to cut a tensor into pieces, one for each rank; rules of a plan are such."""

    def shard(self, tensor: Tensor, rank: int, world_size: int) -> Tensor:
        """What `rank` holds of `tensor`; possibly empty. Works on the meta device too."""

    def unshard(self, shards: list[Tensor], shape: torch.Size) -> Tensor:
        """The tensor of `shape` from every rank's piece."""


@dataclass(frozen=True)
class Cut:
    """One division of a parameter among the ranks of `axis`.

    shape:  of what is divided. counted: whether this rank's piece is the one that counts, where several ranks
            hold the same piece (key/value heads that are fewer than ranks). dtype is never changed by a cut.
    """

    axis: Axis
    rule: Division
    shape: tuple[int, ...]
    counted: bool = True

    def join(self, piece: Tensor) -> Tensor:
        """The whole tensor, on every rank of the axis. Pieces may differ in shape; every rank calls it."""
        whole = torch.empty(self.shape, dtype=piece.dtype, device="meta")
        n = self.axis.size
        shapes = [self.rule.shard(whole, rank, n).shape for rank in range(n)]
        room = piece.new_zeros(max(shape.numel() for shape in shapes))
        room[: piece.numel()] = piece.reshape(-1)
        pieces = self.axis.all_gather(room).view(n, len(room))
        parts = [flat[: shape.numel()].view(shape) for flat, shape in zip(pieces, shapes, strict=True)]
        return self.rule.unshard(parts, torch.Size(self.shape))

    def piece(self, whole: Tensor) -> Tensor:
        """This rank's piece of a tensor of `shape`."""
        return self.rule.shard(whole, self.axis.rank, self.axis.size)


@dataclass(frozen=True)
class Entry:
    """One logical parameter: `name` is its first name in the model, `aliases` all others (tied weights).

    shape, dtype: of the whole parameter
    cuts:         how this rank's piece came about, first cut first
    partial:      axes along which each rank's gradient is one summand: to be added up before anyone uses it
    stages:       places along the pipeline axis that hold it; the first one counts
    """

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    cuts: tuple[Cut, ...] = ()
    partial: tuple[Axis, ...] = ()
    stages: tuple[int, ...] = (0,)


class Ledger:
    """The parameters of a model, each once, in the order in which the model registers them.

    Without a mesh (one device) each is whole and all is local.
    """

    def __init__(self, model: nn.Module, mesh: Mesh | None = None) -> None:
        names: dict[int, list[str]] = {}
        parameters: dict[int, nn.Parameter] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
            parameters[id(parameter)] = parameter
        self.mesh = mesh
        self._parameters = {names[key][0]: parameters[key] for key in names}
        self.entries = {
            first: Entry(first, tuple(aliases), tuple(parameters[key].shape), parameters[key].dtype)
            for key, (first, *aliases) in names.items()
        }

    # ---- what strategies note down ---------------------------------------------------------------------

    def cut(self, name: str, axis: Axis, rule: Division, piece: nn.Parameter, counted: bool = True) -> None:
        """From now on this rank holds `piece` of `name`: what `rule` gives it of what it held before."""
        entry = self.entries[name]
        shape = tuple(self._parameters[name].shape)
        self.entries[name] = replace(entry, cuts=(*entry.cuts, Cut(axis, rule, shape, counted)))
        self._parameters[name] = piece

    def add_partial(self, name: str, axis: Axis) -> None:
        """This rank's gradient of `name` is one summand along `axis`, from now on."""
        entry = self.entries[name]
        if axis.size > 1:
            self.entries[name] = replace(entry, partial=(*entry.partial, axis))

    def place(self, stages: Mapping[str, Sequence[int]], here: int) -> None:
        """Note which pipeline stages hold which parameter (by first name), and forget what is not `here`."""
        for name, places in stages.items():
            self.entries[name] = replace(self.entries[name], stages=tuple(places))
            if here not in places:
                del self._parameters[name]

    def stand_in(self, name: str, parameter: nn.Parameter) -> None:
        """Hold `parameter` for `name`: the same piece in another tensor (a part of a flat buffer, a master
        copy)."""
        self._parameters[name] = parameter

    # ---- what is here ----------------------------------------------------------------------------------

    @property
    def tie_groups(self) -> list[tuple[str, ...]]:
        """The names that share one tensor, for each tensor with more than one name."""
        return [(entry.name, *entry.aliases) for entry in self.entries.values() if entry.aliases]

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Each logical parameter of which this rank holds a piece, once, frozen ones included."""
        yield from self._parameters.items()

    def trainable(self) -> dict[str, nn.Parameter]:
        """The parameters (pieces) here that require a gradient now."""
        return {name: p for name, p in self._parameters.items() if p.requires_grad}

    def gradients(self) -> dict[str, Tensor]:
        """The gradients (of pieces) that are there, by parameter."""
        return {name: p.grad for name, p in self._parameters.items() if p.grad is not None}

    def counts(self, name: str) -> bool:
        """Whether this rank's piece of `name` is the one that counts, so that each element counts once."""
        if self.mesh is None:
            return True
        entry, where = self.entries[name], self.mesh.coordinates
        copies = self.mesh.grid.copies(*(part for cut in entry.cuts for part in cut.axis.name.split(" x ")))
        first = all(where[axis] == 0 for axis in copies if axis != "pipeline")
        return first and where["pipeline"] == entry.stages[0] and all(cut.counted for cut in entry.cuts)

    # ---- arithmetic on gradients -----------------------------------------------------------------------

    # region partial
    def sum_partial_(self, gradients: Mapping[str, Tensor]) -> None:
        """Add up the gradients of which each rank of an axis has one summand; one message for each axis."""
        by_axis: dict[int, list[Tensor]] = {}
        axes: dict[int, Axis] = {}
        for name, gradient in gradients.items():
            for axis in self.entries[name].partial:
                axes[id(axis)] = axis
                by_axis.setdefault(id(axis), []).append(gradient)
        for key, summands in by_axis.items():
            for same in _by_dtype(summands):
                flat = torch.cat([summand.reshape(-1) for summand in same])
                axes[key].all_reduce_(flat)
                for summand, part in zip(same, flat.split([s.numel() for s in same]), strict=True):
                    summand.copy_(part.view_as(summand))

    # endregion

    # region norm
    def norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Euclidean norm over all gradients as one vector, [] in fp32 (fp64 for fp64 gradients).

        A tied parameter has one gradient and counts once. Of a copy on several ranks one counts, of divided
        parameters every piece; the squares are added up over all ranks. Empty pieces add nothing.
        """
        alone = not self.divided
        counted = [gradient for name, gradient in gradients.items() if alone or self.counts(name)]
        wide = any(entry.dtype == torch.float64 for entry in self.entries.values())
        dtype = torch.float64 if wide else torch.float32
        device = next(iter(gradients.values())).device if gradients else None
        norm = torch.zeros((), dtype=dtype, device=device)
        if counted:
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(counted, 2.0, dtype=dtype)))
        if alone or self.mesh is None:
            return norm
        world = self.mesh.axis(*self.mesh.grid.order)
        return world.all_reduce_(norm.square()).sqrt()

    # endregion

    # region norms
    def norms(self, *tables: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """The norm of each parameter as a whole, [] in fp32 (fp64 for fp64), for each table of tensors like
        this rank's pieces: weights, or an optimizer's steps.

        The squares are added up over all ranks in one message; every rank calls it with as many tables, also
        where it has no piece of a parameter.
        """
        wide = any(entry.dtype == torch.float64 for entry in self.entries.values())
        dtype = torch.float64 if wide else torch.float32
        if not self.divided:
            return [
                {name: torch.linalg.vector_norm(t, dtype=dtype) for name, t in each.items()}
                for each in tables
            ]
        assert self.mesh is not None
        device = next((t.device for table in tables for t in table.values()), torch.device("cpu"))
        squares = torch.zeros(len(tables), len(self.entries), dtype=dtype, device=device)
        place = {name: column for column, name in enumerate(self.entries)}
        for row, table in zip(squares, tables, strict=True):
            for name, tensor in table.items():
                if self.counts(name):
                    row[place[name]] = torch.linalg.vector_norm(tensor, dtype=dtype).square()
        world = self.mesh.axis(*self.mesh.grid.order)
        summed = world.all_reduce_(squares).sqrt()
        return [{name: row[place[name]] for name in table} for row, table in zip(summed, tables, strict=True)]

    # endregion

    @property
    def divided(self) -> bool:
        """Whether some rank holds less than the whole of everything."""
        return self.mesh is not None and self.mesh.grid.world_size > 1 and self._divided

    @property
    def _divided(self) -> bool:
        assert self.mesh is not None
        return any(entry.cuts for entry in self.entries.values()) or self.mesh.grid.sizes["pipeline"] > 1

    def clip_(self, gradients: Mapping[str, Tensor], norm: Tensor, max_norm: float) -> None:
        """Scale the gradients in place by min(1, max_norm / norm), without a read by the host."""
        if gradients:
            torch._foreach_mul_(list(gradients.values()), (max_norm / norm).clamp(max=1.0))

    # ---- whole tensors ---------------------------------------------------------------------------------

    # region whole
    def whole(self, name: str, piece: Tensor) -> Tensor:
        """`piece`, a tensor of the shape of this rank's piece of `name`, joined with those of the other
        ranks.

        Every rank that holds a piece calls it. Not a copy where nothing is divided.
        """
        for cut in reversed(self.entries[name].cuts):
            piece = cut.join(piece)
        return piece

    def piece(self, name: str, whole: Tensor) -> Tensor:
        """This rank's piece of a tensor of the shape of the whole parameter."""
        for cut in self.entries[name].cuts:
            whole = cut.piece(whole)
        return whole

    # endregion

    def all_whole(self, pieces: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Every rank's pieces, joined, for all parameters of which some rank has one; every rank calls it.

        A name may carry a suffix behind "/" (optimizer state); scalars are the same everywhere.
        """
        if self.mesh is None:
            return dict(pieces)
        joined = {key: self._join(key, piece) for key, piece in pieces.items()}
        stages = self.mesh.axis("pipeline")
        if stages.size == 1:
            return joined
        shapes = {key: (tuple(t.shape), t.dtype) for key, t in joined.items()}
        everywhere: dict[str, tuple[int, tuple[int, ...], torch.dtype]] = {}
        for place, theirs in enumerate(stages.gather_objects(shapes)):
            for key, (shape, dtype) in theirs.items():
                everywhere.setdefault(key, (place, shape, dtype))
        device = next((t.device for t in pieces.values()), torch.device("cpu"))
        found = {}
        for name in self.entries:
            for key in (key for key in everywhere if key.partition("/")[0] == name):
                place, shape, dtype = everywhere[key]
                mine = joined[key] if place == stages.rank else torch.empty(shape, dtype=dtype, device=device)
                found[key] = stages.broadcast_(mine.contiguous(), place)
        return found

    def _join(self, key: str, piece: Tensor) -> Tensor:
        name = key.partition("/")[0]
        same = piece.shape == self._parameters[name].shape
        return self.whole(name, piece) if same or piece.dim() else piece


def _by_dtype(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    kinds: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault(tensor.dtype, []).append(tensor)
    yield from kinds.values()
