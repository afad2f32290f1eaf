"""What others measured: nccl-tests runs on real machines, quoted with their sources."""

import csv
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files

TABLE = "nccl_tests.csv"


def bus_factor(collective: str, n: int) -> float:
    """Bus bandwidth = payload / seconds x this factor, as nccl-tests defines it.

    It is the least that a rank must send, as a share of the payload, if all send the same: the rate that a
    link must have carried. Payload / seconds alone is called algorithm bandwidth ("algbw").
    """
    factors = {"all_reduce": 2 * (n - 1) / n, "all_gather": (n - 1) / n, "reduce_scatter": (n - 1) / n}
    factors |= {"all_to_all": (n - 1) / n, "broadcast": 1.0, "reduce": 1.0}
    if collective not in factors:
        raise ValueError(f"no bus bandwidth for {collective!r}; legal: {', '.join(factors)}")
    return factors[collective]


@dataclass(frozen=True)
class Measurement:
    """One row of the table. `payload` in bytes, `seconds` of one call, bandwidths in bytes a second.

    derived: the source gives only the bus bandwidth, so seconds follow from it. rounding: the relative error
    that the source's printed digits leave, at most.
    """

    node: str
    ranks: int
    collective: str
    payload: int
    seconds: float
    bus_bandwidth: float
    derived: bool
    rounding: float
    notes: str
    source: str


@lru_cache(maxsize=1)
def measurements() -> tuple[Measurement, ...]:
    """All rows of the table, in its order."""
    text = files("fmlab.collectives").joinpath("tables", TABLE).read_text()
    return tuple(_row(row) for row in csv.DictReader(text.splitlines()))


def _row(row: dict[str, str]) -> Measurement:
    ranks, payload = int(row["gpus"]), int(row["payload_bytes"])
    bus = float(row["busbw_gb_s"]) * 1e9
    derived = not row["time_us"] or "derived from busbw" in row["notes"]
    seconds = bus_factor(row["collective"], ranks) * payload / bus if derived else float(row["time_us"]) / 1e6
    printed = row["busbw_gb_s"] if derived else row["time_us"]
    return Measurement(
        row["node"], ranks, row["collective"], payload, seconds, bus, derived, _rounding(printed),
        row["notes"], row["source"],
    )  # fmt: skip


def _rounding(printed: str) -> float:
    """Half a unit of the last digit, relative to the number."""
    decimals = len(printed.partition(".")[2])
    return 0.5 * 10**-decimals / float(printed)
