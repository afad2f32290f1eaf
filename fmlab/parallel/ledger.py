"""Where each parameter lives. Norm, clipping, checkpoints and parity ask the ledger, never the strategy.

Every parameter is replicated so far: each rank holds all of it. A strategy that shards adds a placement here.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

Placement = Literal["replicated"]


@dataclass(frozen=True)
class Entry:
    """One logical parameter: `name` is its first name in the model, `aliases` all others (tied weights)."""

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    placement: Placement = "replicated"


class Ledger:
    """The parameters of a model, each once, in the order in which the model registers them."""

    def __init__(self, model: nn.Module) -> None:
        names: dict[int, list[str]] = {}
        parameters: dict[int, nn.Parameter] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
            parameters[id(parameter)] = parameter
        self._parameters = {names[key][0]: parameters[key] for key in names}
        self.entries = {
            first: Entry(first, tuple(aliases), tuple(parameters[key].shape), parameters[key].dtype)
            for key, (first, *aliases) in names.items()
        }

    @property
    def tie_groups(self) -> list[tuple[str, ...]]:
        """The names that share one tensor, for each tensor with more than one name."""
        return [(entry.name, *entry.aliases) for entry in self.entries.values() if entry.aliases]

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Each logical parameter once, frozen ones included."""
        yield from self._parameters.items()

    def trainable(self) -> dict[str, nn.Parameter]:
        """The parameters that require a gradient now."""
        return {name: p for name, p in self._parameters.items() if p.requires_grad}

    def gradients(self) -> dict[str, Tensor]:
        """The gradients that are there, by parameter."""
        return {name: p.grad for name, p in self._parameters.items() if p.grad is not None}

    def norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Euclidean norm over all gradients as one vector, [] in fp32 (fp64 for fp64 gradients).

        A tied parameter has one gradient and counts once. Replicated gradients are complete on each rank, so
        nothing is communicated.
        """
        if not gradients:
            return torch.zeros(())
        grads = list(gradients.values())
        dtype = torch.promote_types(torch.float32, max((g.dtype for g in grads), key=_precision))
        norms = torch._foreach_norm(grads, 2.0, dtype=dtype)
        return torch.linalg.vector_norm(torch.stack(norms))

    def clip_(self, gradients: Mapping[str, Tensor], norm: Tensor, max_norm: float) -> None:
        """Scale the gradients in place by min(1, max_norm / norm), without a read by the host."""
        if gradients:
            torch._foreach_mul_(list(gradients.values()), (max_norm / norm).clamp(max=1.0))


def _precision(dtype: torch.dtype) -> int:
    return torch.finfo(dtype).bits
