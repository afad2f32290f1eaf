"""The engines of a tile machine over time, as a figure that stands without a browser."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fmlab.lab.figures import Captioned, caption
from fmlab.lab.timeline import Bar, Row, gantt

if TYPE_CHECKING:
    from fmlab.kernels.tiles import Run

_ROWS = {"load": "loads", "store": "stores"}  # engines whose rows are called otherwise
_COPIES = ("load", "store")


def engines_view(runs: "Mapping[str, Run]", text: str = "") -> Captioned:
    """Who works when, in one or more runs of kernels, on one axis of time (modelled).

    runs: name -> what fmlab.kernels.tiles.run returned. Each gets a row for every engine that it uses, named
    after both; transfers that overlap lie on one another. Raises ValueError when there is none.
    """
    if not runs:
        raise ValueError("there is no run to show: give {'a name': run(kernel, ...)}")
    rows: list[Row] = []
    for name, done in runs.items():
        bars: dict[str, list[Bar]] = {}
        for one in done.instructions:
            kind = "copy" if one.engine in _COPIES else "compute"
            bars.setdefault(one.engine, []).append((kind, one.start, one.end - one.start, ""))
        for engine in sorted(bars, key=lambda engine: (engine not in _COPIES, engine)):
            rows.append((f"{name}: {_ROWS.get(engine, engine)}", bars[engine], []))
    longest = max(done.seconds for done in runs.values())
    fig = gantt(rows, 0.0, longest, "µs", 1e6, "engine")
    numbers = {f"{name} [µs]": 1e6 * done.seconds for name, done in runs.items()}
    return caption(fig, kind="modelled", text=text or "Dotted: transfers. Plain: computing.", numbers=numbers)
