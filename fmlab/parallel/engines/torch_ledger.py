"""The ledger of parameters that are DTensors: torch knows how they are divided, so the ledger asks them."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from fmlab.models.plan import Rule
from fmlab.parallel.ledger import Ledger

_DIM = {"column": 0, "row": 1, "vocab": 0, "head": 1}


class TorchLedger(Ledger):
    """Joins, cuts and norms DTensors; a plain tensor among them is whole on its rank.

    A DTensor's shards are consecutive rows. Where a plan's rule wants others (the same heads of a fused
    query-key-value matrix), the DTensor is of the rows in another order: the ranks' pieces, one after the
    other. `arranged` says which, so that whole tensors come out in the model's order.
    """

    #: name -> (rule, number of tensor-parallel ranks)
    arranged: Mapping[str, tuple[Rule, int]]

    def arrange(self, name: str, whole: Tensor) -> Tensor:
        """A whole tensor with its rows (or columns) in the order in which the ranks hold them."""
        if name not in self.arranged or not whole.dim():
            return whole
        rule, ranks = self.arranged[name]
        return torch.cat([rule.shard(whole, rank, ranks) for rank in range(ranks)], _DIM[rule.kind])

    def whole(self, name: str, piece: Tensor) -> Tensor:
        if not isinstance(piece, DTensor):
            return piece
        with _without_advice():
            full = piece.full_tensor()
        if name not in self.arranged or not full.dim():
            return full
        rule, ranks = self.arranged[name]
        return rule.unshard(list(full.chunk(ranks, _DIM[rule.kind])), full.shape)

    def piece(self, name: str, whole: Tensor) -> Tensor:
        parameter = self._parameters[name]
        if not isinstance(parameter, DTensor):
            return whole
        whole = self.arrange(name, whole).to(parameter.device)
        return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)

    def follow(self, model: nn.Module) -> None:
        """Take up the parameters that the model has now, after torch has put others in their place."""
        now = dict(model.named_parameters(remove_duplicate=False))
        for name in list(self._parameters):
            names = (name, *self.entries[name].aliases)  # of which a stage may have some only
            self.stand_in(name, next(now[alias] for alias in names if alias in now))

    def counts(self, name: str) -> bool:
        parameter, where = self._parameters[name], self._where
        divided: list[str] = []
        if isinstance(parameter, DTensor):
            names = parameter.device_mesh.mesh_dim_names or ()
            divided = [
                dim
                for dim, placed in zip(names, parameter.placements, strict=True)
                if not placed.is_replicate()
            ]
        copies = self._grid.copies(*divided)
        first = all(where[axis] == 0 for axis in copies if axis != "pipeline")
        return first and where["pipeline"] == self.entries[name].stages[0]

    def norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        return super().norm({name: _local(gradient) for name, gradient in gradients.items()})

    def clip_(self, gradients: Mapping[str, Tensor], norm: Tensor, max_norm: float) -> None:
        super().clip_({name: _local(gradient) for name, gradient in gradients.items()}, norm, max_norm)

    @property
    def divided(self) -> bool:
        return True

    @property
    def _where(self) -> dict[str, int]:
        assert self.mesh is not None
        return self.mesh.coordinates

    @property
    def _grid(self):  # type: ignore[no-untyped-def]
        assert self.mesh is not None
        return self.mesh.grid


@contextmanager
def _without_advice() -> Iterator[None]:
    """torch logs that two gathers in a row are slow; whole tensors are asked for to look at, not to train."""
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def owners(model: nn.Module, names: tuple[str, ...]) -> Iterator[tuple[nn.Module, str]]:
    """The modules that hold a parameter under its names, each with the name it has there."""
    for name in names:
        path, _, leaf = name.rpartition(".")
        yield model.get_submodule(path), leaf
