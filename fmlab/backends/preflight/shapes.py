"""How many programs the shapes of the batches need: each (shape, dtype) of the inputs is compiled once.

XLA and Neuron compile for exact shapes. A last partial batch, or rows as long as their longest sentence,
means a compilation in the middle of training, of seconds to an hour each.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from fmlab.backends.preflight.finding import Finding

Signature = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Signatures:
    """The input shapes of a run, in the order in which they first come.

    counts:  signature -> batches that have it        first: signature -> number of its first batch
    batches: how many batches were looked at
    """

    counts: dict[Signature, int]
    first: dict[Signature, int]
    batches: int

    @property
    def compilations(self) -> int:
        """Programs that a static-shape compiler makes for these batches, for each kind of step."""
        return len(self.counts)

    def findings(self, name: str = "training batches", few: int = 8) -> list[Finding]:
        """What to say about them. few: how many shapes are taken for buckets that somebody chose."""
        if self.compilations <= 1:
            return []
        shown = [describe(signature) for signature in list(self.counts)[:3]]
        more = "" if self.compilations <= 3 else f", … {self.compilations - 3} more"
        where = f"{name}, first at batch {min(list(self.first.values())[1:])}"
        if self.only_last_is_partial:
            last = next(reversed(self.counts))
            return [
                Finding(
                    "warning",
                    "shapes",
                    f"the last batch is smaller ({describe(last)}): 2 compilations, the second at batch "
                    f"{self.first[last]} of {self.batches}",
                    where,
                    "drop it (drop_last=True), or pad it to full size with labels of -100",
                )
            ]
        return [
            Finding(
                "warning" if self.compilations <= few else "error",
                "shapes",
                f"{self.compilations} different shapes in {self.batches} batches, so {self.compilations} "
                f"compilations: {'; '.join(shown)}{more}",
                where,
                "pad rows to one length, or to a few (bucketing), with labels of -100 and a mask; drop or "
                "pad the last partial batch",
            )
        ]

    @property
    def only_last_is_partial(self) -> bool:
        """Whether all batches are alike except the last one."""
        return (
            self.compilations == 2
            and list(self.counts.values())[1] == 1
            and list(self.first.values())[1] == self.batches - 1
        )


def signature(batch: Any) -> Signature:
    """The (name, dtype and shape) of all tensors of a batch, in a fixed order."""
    if isinstance(batch, Mapping):
        leaves = [(str(name), value) for name, value in sorted(batch.items())]
    else:
        leaves = [(str(i), value) for i, value in enumerate(tree_flatten(batch)[0])]
    return tuple((name, _shape(value)) for name, value in leaves)


def _shape(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}[{','.join(map(str, value.shape))}]"
    return repr(value)  # a number is a constant of the program


def describe(signature: Signature) -> str:
    """ "input_ids int64[7,512]", and how many more tensors there are."""
    name, shape = signature[0]
    more = f" and {len(signature) - 1} more" if len(signature) > 1 else ""
    return f"{name} {shape}{more}"


def signatures(batches: Iterable[Any], limit: int | None = None) -> Signatures:
    """Count the shapes of `batches` (a loader); of the first `limit` of them only, if given.

    Nothing is run; the loader is iterated once. Raises ValueError when there is no batch.
    """
    counts: Counter[Signature] = Counter()
    first: dict[Signature, int] = {}
    total = 0
    for total, batch in enumerate(_first(batches, limit), 1):
        key = signature(batch)
        first.setdefault(key, total - 1)
        counts[key] += 1
    if not total:
        raise ValueError("the loader gave no batch: there is nothing to count")
    return Signatures(dict(counts), first, total)


def _first(batches: Iterable[Any], limit: int | None) -> Iterator[Any]:
    for number, batch in enumerate(batches):
        if limit is not None and number >= limit:
            return
        yield batch


def large_integers(batch: Any, name: str = "the batch") -> list[Finding]:
    """64-bit integers that do not fit in 32 bits, which is what the chips count in."""
    found = []
    leaves = batch.items() if isinstance(batch, Mapping) else enumerate(tree_flatten(batch)[0])
    for key, value in leaves:
        if isinstance(value, Tensor) and value.dtype == torch.int64 and value.numel() and not value.is_meta:
            largest = int(value.abs().max())
            if largest > 2**31 - 1:
                found.append(
                    Finding(
                        "error",
                        "dtype",
                        f"{key!r} holds {largest:,}, more than 32 bits hold, and compilers for these chips "
                        "may take int64 for int32",
                        name,
                        "map such ids to a small range on the host before they enter the step",
                    )
                )
    return found
