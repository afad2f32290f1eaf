"""Machines as their measured runs show them: latency, bandwidth, and both depending on the payload.

A communication library changes its protocol with the payload: one that answers fast moves few bytes a second,
one that moves many starts slowly. So the time of a payload of P bytes is the least of some straight lines,

    seconds(P) = min over protocols of (latency + P / bandwidth),

fitted to the quoted table by least squares of the relative error. `Fit.rows` shows the error of every row,
`fit(..., every_second=True)` that of rows that the fit never saw.

For other numbers of ranks or other collectives a line must be taken apart, by what its algorithm does:
"ring"        latency = steps x hop, payload / bandwidth = bytes of a rank / rate of a link
"in-network"  the switch adds up (NVLS, SHARP): the time does not depend on the number of ranks
"hierarchy"   only as measured
"""

import difflib
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from fmlab.collectives.measured import Measurement, bus_factor, measurements

MAX_ROUNDING = 0.1  # rows whose printed digits leave more than 10 % open are not fitted
MAX_FALL = 1.2  # nor rows that took longer than 1.2 times a larger payload
PROTOCOLS = 3  # NCCL has three: LL, LL128, Simple

_RING_STEPS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}


@dataclass(frozen=True)
class Protocol:
    """latency [s] + payload [B] / bandwidth [B/s], of a whole collective of the machine's own size."""

    latency: float
    bandwidth: float

    def seconds(self, payload: float) -> float:
        return self.latency + payload / self.bandwidth


@dataclass(frozen=True)
class Checked:
    """A measured row beside the model. `error` is modelled / measured - 1."""

    row: Measurement
    modelled: float
    used: str  # "fitted", "held out", or why it was left out of the fit

    @property
    def error(self) -> float:
        return self.modelled / self.row.seconds - 1


@dataclass(frozen=True)
class Machine:
    """A machine fitted to its measured all-reduce.

    family: how the time depends on ranks and collective (see above). per_rank: NCCL switches to in-network
    reduction from so many ranks on. rows: every row of its sweep with its error.
    """

    name: str
    title: str
    ranks: int
    family: str
    smallest: int
    protocols: tuple[Protocol, ...]
    rows: tuple[Checked, ...]

    def seconds(self, collective: str, payload: float, ranks: int | None = None) -> float:
        """Modelled seconds of one collective with `payload` bytes on `ranks` of its chips (default: all).

        ValueError for what its measurements say nothing about.
        """
        n = self.ranks if ranks is None else ranks
        legal = tuple(_RING_STEPS) if self.family == "ring" else ("all_reduce",)
        if collective not in legal:
            raise ValueError(
                f"{self.name}: measured by {self.family} all-reduce, which says nothing about {collective}; "
                f"legal: {', '.join(legal)}. Price it on a topology instead"
            )
        if not self.smallest <= n <= self.ranks:
            raise ValueError(f"{self.name}: fitted for {self.smallest} to {self.ranks} ranks, not {n}")
        if payload < 0:
            raise ValueError(f"a payload has at least 0 bytes, not {payload}")
        hops, volume = 1.0, 1.0
        if self.family == "ring":
            hops = _RING_STEPS[collective] * (n - 1) / (2 * (self.ranks - 1))
            volume = bus_factor(collective, n) / bus_factor("all_reduce", self.ranks)
        return min(p.latency * hops + payload * volume / p.bandwidth for p in self.protocols)

    def errors(self, used: str = "fitted") -> tuple[float, float]:
        """(median, worst) relative error, without sign, of the rows used so."""
        found = [abs(row.error) for row in self.rows if row.used == used]
        if not found:
            raise ValueError(f"no rows {used!r}; there are {sorted({row.used for row in self.rows})}")
        return statistics.median(found), max(found)


#: name -> (node of the table, ranks, family, least number of ranks, title)
_SWEEPS = {
    "a100": ("1x DGX-class A100 NVLink3", 8, "ring", 2, "8 A100, NVLink3, ring"),
    "h200": ("1x H200 NVLink4 (NVLS)", 8, "in-network", 5, "8 H200, NVLink4, ring to 1 MiB, then NVLS"),
    "p6-b200": ("1x p6-b200", 8, "in-network", 6, "8 B200, NVLink5, NVLS"),
    "4x p6-b200": ("4x p6-b200", 32, "hierarchy", 32, "4 hosts of 8 B200, EFA v4 of 8 x 50 GB/s"),
}


def machine_names() -> list[str]:
    """The machines with enough measured rows for a fit."""
    return list(_SWEEPS)


@lru_cache(maxsize=8)
def machine(name: str, every_second: bool = False) -> Machine:
    """The machine called `name`, fitted to its sweep; ValueError lists the known ones.

    every_second: fit every second row only, so that the others test the model.
    """
    if name not in _SWEEPS:
        near = difflib.get_close_matches(name, _SWEEPS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"no measured machine {name!r}; known: {', '.join(_SWEEPS)}{hint}")
    node, ranks, family, smallest, title = _SWEEPS[name]
    rows = [m for m in measurements() if m.node.startswith(node) and m.ranks == ranks]
    sweep = sorted((m for m in rows if m.payload and _is_sweep(m, rows)), key=lambda m: m.payload)
    left_out = {m.payload: why for m in sweep if (why := _unfit(m, sweep))}
    good = [m for m in sweep if m.payload not in left_out]
    train = good[::2] if every_second else good
    protocols = fit([m.payload for m in train], [m.seconds for m in train])
    plain = Machine(name, title, ranks, family, smallest, protocols, ())
    used = {m.payload: "fitted" for m in train}
    checked = tuple(
        Checked(
            m,
            plain.seconds("all_reduce", m.payload),
            left_out.get(m.payload) or used.get(m.payload, "held out"),
        )
        for m in sweep
    )
    return Machine(name, title, ranks, family, smallest, protocols, checked)


def _is_sweep(row: Measurement, rows: Sequence[Measurement]) -> bool:
    """Whether a row belongs to a sweep over payloads, not to a comparison at one payload."""
    return sum(other.node == row.node for other in rows) > 10


def _unfit(row: Measurement, sweep: Sequence[Measurement]) -> str:
    """Why a row cannot tell anything about the model, or ""."""
    if row.rounding > MAX_ROUNDING:
        return "left out: its source prints too few digits"
    later = min((m.seconds for m in sweep if m.payload > row.payload), default=row.seconds)
    return "left out: a larger payload took less" if row.seconds > MAX_FALL * later else ""


# region fit
def fit(payloads: Sequence[float], seconds: Sequence[float], most: int = PROTOCOLS) -> tuple[Protocol, ...]:
    """The lines whose minimum comes closest to the measured seconds, by the squares of the log ratio.

    Each way to cut the sorted payloads into at most `most` neighbourhoods of at least two rows is tried; a
    neighbourhood gives a line by least squares of the relative error.
    """
    x, t = np.asarray(payloads, float), np.asarray(seconds, float)
    best: tuple[float, tuple[Protocol, ...]] | None = None
    for count in range(1, most + 1):
        for cuts in itertools.combinations(range(2, len(x) - 1), count - 1):
            edges = [0, *cuts, len(x)]
            if min(np.diff(edges)) < 2:
                continue
            lines = [_line(x[a:b], t[a:b]) for a, b in itertools.pairwise(edges)]
            if any(line is None for line in lines):
                continue
            protocols = tuple(line for line in lines if line is not None)
            modelled = np.min([p.latency + x / p.bandwidth for p in protocols], axis=0)
            error = float(np.sum(np.log(modelled / t) ** 2))
            if best is None or error < best[0]:
                best = error, protocols
    if best is None:
        raise ValueError(f"{len(x)} rows with growing times are needed for a fit: at least 2")
    return best[1]


# endregion


def _line(x: "np.ndarray", t: "np.ndarray") -> Protocol | None:
    """Latency and bandwidth of some rows, or None if they do not rise from a latency of at least 0."""
    weighted = np.stack([np.ones_like(x), x], axis=1) / t[:, None]
    (latency, slope), *_ = np.linalg.lstsq(weighted, np.ones_like(x), rcond=None)
    return Protocol(float(latency), float(1 / slope)) if latency >= 0 and slope > 0 else None
