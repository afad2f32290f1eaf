"""What a kernel did on the machine: its results, and modelled times, traffic and memory."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fmlab.kernels.tiles.core import BANK_BYTES, BANKS, PARTITIONS, Core
from fmlab.kernels.tiles.errors import Line
from fmlab.kernels.tiles.machine import ENGINES, Instruction

#: Order and names of the rows of a timeline.
ROWS = {
    "load": "DMA, loads",
    "store": "DMA, stores",
    "tensor": "tensor",
    "vector": "vector",
    "scalar": "scalar",
    "gpsimd": "gpsimd",
}


@dataclass(frozen=True)
class Run:
    """A kernel's run. Values are computed for real; everything else is modelled.

    output:        what the kernel returned, as torch tensors (one, or a tuple)
    seconds:       from the first to the last instruction
    utilisation:   share of that time that each engine was busy; "dma": the mean over the DMA engines
    hbm_read, hbm_written, hbm_bytes: counted, bytes that crossed between HBM and SBUF
    flops:         of matmuls, 2 for a multiply-add; transpositions are not counted
    peak_sbuf:     bytes of all 128 partitions up to the highest address ever used
    peak_psum:     PSUM banks, likewise
    at_peak:       what lived in SBUF then, as text
    """

    kernel: str
    core: Core
    output: Any
    instructions: tuple[Instruction, ...]
    seconds: float
    utilisation: dict[str, float]
    hbm_read: int
    hbm_written: int
    flops: int
    peak_sbuf: int
    peak_psum: int
    at_peak: tuple[str, ...]
    itemsize: int  # bytes of a matmul's operands: which peak rate applies

    @property
    def hbm_bytes(self) -> int:
        return self.hbm_read + self.hbm_written

    @property
    def roofline_seconds(self) -> float:
        """The least time for these FLOPs and bytes: the longer of both at their full rates."""
        return max(self.flops / self.core.peak(self.itemsize), self.hbm_bytes / self.core.bandwidth)

    @property
    def intensity(self) -> float:
        """FLOPs for each byte of HBM traffic."""
        return self.flops / self.hbm_bytes if self.hbm_bytes else 0.0

    @property
    def busiest(self) -> str:
        """The engine with the highest utilisation: what bounds the kernel, if it is near 1."""
        return max(self.utilisation, key=lambda name: self.utilisation[name])

    def count(self, engine: str) -> int:
        """How many instructions an engine had (load and store are engines here)."""
        return sum(one.engine == engine for one in self.instructions)

    def summary(self) -> str:
        """A few lines that say it all."""
        sbuf, whole = self.peak_sbuf / 2**20, self.core.sbuf_partition * PARTITIONS / 2**20
        used = ", ".join(f"{name} {100 * share:.0f} %" for name, share in self.utilisation.items() if share)
        lines = [
            f"{self.kernel} on {self.core.title} (modelled)",
            f"  time          {1e6 * self.seconds:.4g} us; at least {1e6 * self.roofline_seconds:.4g} us for "
            "its FLOPs and bytes",
            f"  busy          {used}",
            f"  HBM traffic   {self.hbm_read:,} B read, {self.hbm_written:,} B written",
            f"  FLOPs         {self.flops:,}, {self.intensity:.4g} a byte",
            f"  SBUF, PSUM    at most {sbuf:.3g} of {whole:.3g} MiB, {self.peak_psum} of {BANKS} banks",
        ]
        return "\n".join(lines)

    __repr__ = __str__ = summary

    def hot_lines(self, count: int = 8) -> str:
        """The kernel's lines that keep an engine busy longest, as a table; the DMA engines count as one."""
        if not (isinstance(count, int) and count > 0):
            raise ValueError(f"count is a number of lines above 0, not {count!r}")
        busy: dict[tuple[Line, str], list[float]] = {}
        for one in self.instructions:
            seconds = one.parts * one.part_seconds / self.core.dma_engines or one.end - one.start
            busy.setdefault((one.line, one.engine), []).append(seconds)
        hottest = sorted(busy.items(), key=lambda item: -sum(item[1]))[:count]
        rows = [
            f"{1e6 * sum(times):8.1f} {engine:>7} {len(times):>6}  {line.function}:{line.number}  {line.text}"
            for (line, engine), times in hottest
        ]
        return "\n".join([f"{'us busy':>8} {'engine':>7} {'times':>6}  line", *rows])

    def timeline(self, width: int = 72, window: tuple[float, float] | None = None) -> str:
        """The engines over time as text, a row each: █ busy for most of a column, ▒ for part of it, · idle.

        window: seconds of the kernel to show.
        """
        if not (isinstance(width, int) and width >= 10):
            raise ValueError(f"a timeline is 10 characters wide or more, not {width!r}")
        low, high = window or (0.0, self.seconds)
        if not low < high:
            raise ValueError(f"a window ends after it begins, not {window!r}")
        column = (high - low) / width
        lines = []
        for engine in (name for name in ENGINES if self.count(name)):
            share = self._share(engine, low, column, width)
            cells = "".join("█" if one > 0.6 else "▒" if one > 0.02 else "·" for one in share)
            lines.append(f"{ROWS[engine]:>12} |{cells}|")
        lines.append(f"{'':>12} {1e6 * low:<.4g} us {f'{1e6 * high:.4g} us':>{width - 6}}")
        return "\n".join(lines)

    def _share(self, engine: str, low: float, column: float, width: int) -> list[float]:
        """How much of each column the engine is busy; transfers that overlap count once."""
        share, until = [0.0] * width, 0.0
        for one in (one for one in self.instructions if one.engine == engine):
            begin, end = max(one.start, until), one.end
            until = max(until, end)
            first, last = int((begin - low) // column), int((end - low) // column)
            for i in range(max(first, 0), min(last, width - 1) + 1):
                inside = min(end, low + (i + 1) * column) - max(begin, low + i * column)
                share[i] += max(inside, 0.0) / column
        return share

    def trace_events(self) -> list[dict[str, Any]]:
        """The timeline in Chrome's trace event format: an engine is a thread."""
        rows = list(ROWS)
        names = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": rows.index(engine), "args": {"name": title}}
            for engine, title in ROWS.items()
        ]
        process = {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": f"{self.kernel} (modelled)"}}
        spans = [
            {
                "ph": "X", "name": one.name, "cat": one.engine, "pid": 0, "tid": rows.index(one.engine),
                "ts": 1e6 * one.start, "dur": 1e6 * (one.end - one.start),
                "args": {"what": one.about, "line": one.line.number, "bytes": one.nbytes, "FLOPs": one.flops},
            }
            for one in self.instructions
        ]  # fmt: skip
        return [process, *names, *spans]

    def save_trace(self, path: str | Path) -> Path:
        """Write the timeline for ui.perfetto.dev or chrome://tracing."""
        path = Path(path)
        path.write_text(json.dumps({"displayTimeUnit": "ns", "traceEvents": self.trace_events()}))
        return path


def psum_banks(nbytes: int) -> int:
    return -(-nbytes // BANK_BYTES)
