"""Run one cell: parity on a pool of ranks of the right size, and what came of it."""

import re
from types import TracebackType

from fmlab.objectives.choice import objective_of
from fmlab.parallel import legal
from fmlab.parallel.engines.refusals import refusals
from fmlab.parallel.matrix.cells import Cell
from fmlab.parallel.matrix.models import MODELS, on_meta
from fmlab.parallel.matrix.results import Outcome
from fmlab.parallel.parity_run import parity
from fmlab.ranks import RankError, Ranks

_CLIP = 0.05  # below the norms of these gradients, so that clipping takes part


class Pools:
    """Pools of ranks by size, each started when it is first needed and used by all cells of that size."""

    def __init__(self, timeout: float = 60.0) -> None:
        self.timeout = timeout
        self._pools: dict[int, Ranks] = {}

    def __enter__(self) -> "Pools":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pool in self._pools.values():
            pool.close()

    def of(self, size: int) -> Ranks | None:
        """A pool of `size` ranks; None for one rank, which is this process."""
        if size == 1:
            return None
        pool = self._pools.get(size)
        if pool is None:
            pool = self._pools[size] = Ranks(size, timeout=self.timeout)
        elif not pool.alive:
            pool.restart()
        return pool


def refusal(cell: Cell) -> str:
    """Why the cell cannot run, as far as is known without a process; "" if nothing is known against it."""
    try:
        layout = cell.layout
    except ValueError as error:
        return str(error)
    model = on_meta(cell.model)
    found = legal.problems(layout, model=model, objective=objective_of(model))
    return "; ".join(found) or "; ".join(refusals(cell.engine, layout, model).values())


def run_cell(cell: Cell, ranks: Ranks | None, steps: int = 2) -> Outcome:
    """Compare the cell with one device: clipped, under SGD. `ranks`: see Pools.of."""
    if reason := refusal(cell):
        return Outcome("refused", reason)
    try:
        report = parity(
            MODELS[cell.model],
            cell.layout,
            cell.engine,
            precision=cell.precision,
            steps=steps,
            ranks=ranks,
            max_grad_norm=_CLIP,
        )
    except ValueError as error:
        return Outcome("refused", _one_line(str(error)))
    except RankError as error:
        kind, _, text = error.error.partition(": ")
        return (
            Outcome("refused", _one_line(text))
            if kind == "ValueError"
            else Outcome("failed", _one_line(error.error))
        )
    if report.ok:
        return Outcome("equal", f"{report.worst.excess:.2f}")
    first = f"; first {report.first.name}" if report.first else ""
    said = f"; {report.misreported[0]}" if report.misreported else ""
    return Outcome("differs", _one_line(f"{report.diagnosis}{first}{said}"))


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()
