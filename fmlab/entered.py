"""Collectives as ranks entered them, and whether those of several ranks fit each other.

torch's flight recorder counts collectives within each process group, so that those of several ranks are
compared under equal numbers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

_DTYPES = {
    "Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64",
    "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool",
}  # fmt: skip
# Operations whose input must have the same shape on every rank of the group.
_SAME_SHAPE = {"all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "gather"}


class Collective(NamedTuple):
    """One collective as one rank entered it; `number` counts within the group, from 1."""

    group: str
    number: int
    op: str
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        tensor = f" {self.dtype}{list(self.shape)}" if self.dtype else ""
        return f"{self.op} #{self.number}{tensor}"


def collective_of(entry: Mapping[str, Any]) -> Collective:
    """A collective from its entry in torch's flight recorder."""
    op = entry["profiling_name"].partition(":")[2].lstrip("_")
    sizes, dtypes = entry["input_sizes"], entry["input_dtypes"]
    dtype = _DTYPES.get(dtypes[0], dtypes[0].lower()) if dtypes else ""
    shape = tuple(sizes[0]) if sizes else ()
    return Collective(entry["process_group"][0], entry["collective_seq_id"], op, dtype, shape)


def members_of_groups() -> dict[str, tuple[int, ...]]:
    """Global ranks of every process group of this process, by the group's name."""
    from torch.distributed import distributed_c10d

    world = distributed_c10d._world
    return {
        name: tuple(sorted(world.pg_group_ranks.get(pg, {}))) for pg, name in list(world.pg_names.items())
    }


@dataclass
class Disagreement:
    """Ranks of one group that entered different collectives under the same number, or a different count."""

    group: str
    number: int
    entered: dict[int, Collective | None]  # None: the rank did not enter it

    @property
    def culprits(self) -> list[int]:
        """The minority; on a tie those that did not enter, else the higher ranks."""
        groups: dict[Any, list[int]] = {}
        for rank, one in sorted(self.entered.items()):
            groups.setdefault(one and one[2:], []).append(rank)
        ordered = sorted(groups.items(), key=lambda kv: (len(kv[1]), kv[0] is not None, -kv[1][0]))
        return ordered[0][1]


def differ(entered: Sequence[Collective | None]) -> bool:
    """Whether what ranks entered under one number does not fit; None: a rank did not enter it."""
    if any(one is None for one in entered):
        return any(one is not None for one in entered)
    ones = [one for one in entered if one is not None]
    if len({one.op for one in ones}) > 1:
        return True
    op = ones[0].op
    if op == "barrier":
        return False
    if op != "scatter" and len({one.dtype for one in ones}) > 1:  # scatter has an input on its source only
        return True
    return op in _SAME_SHAPE and len({one.shape for one in ones}) > 1


def name_ranks(ranks: Sequence[int], total: int | None = None) -> str:
    """`[0, 1, 2]` → "ranks 0-2"; "all 4 ranks" when it is everyone."""
    ranks = sorted(ranks)
    if total is not None and len(ranks) == total and total > 1:
        return f"all {total} ranks"
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    names = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs]
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(names)
