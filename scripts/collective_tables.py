"""Write the tables of docs/collectives.md from the package itself: algorithms, fits and their errors.

Run it inside .venv after a change of fmlab/collectives; with --check it only says whether they agree.
"""

import sys
from pathlib import Path

import made

from fmlab.collectives import ALGORITHMS, closed_form, machine, machine_names, measurements

ROOT = Path(__file__).resolve().parent.parent
PATH = ROOT / "docs" / "collectives.md"
RANKS = 8


def algorithms() -> str:
    names = sorted({name for known in ALGORITHMS.values() for name in known})
    rows = [f"| | {' | '.join(ALGORITHMS)} |", "|---|" + "---:|" * len(ALGORITHMS)]
    for name in names:
        cells = [_form(collective, name) if name in known else "" for collective, known in ALGORITHMS.items()]
        rows.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(rows)


def _form(collective: str, name: str) -> str:
    dims = (2, 4) if name in ("torus", "hierarchical") else ()
    form = closed_form(collective, name, RANKS, dims=dims)
    return f"{form.steps}, {form.volume:.3g}" if form.volume else str(form.steps)


def fits() -> str:
    rows = ["| Machine | What | Lines | median, worst | held out: median, worst | rows left out |"]
    rows.append("|---|---|---|---:|---:|---:|")
    for name in machine_names():
        one = machine(name)
        lines = [f"{p.latency * 1e6:.0f} µs + P / {p.bandwidth / 1e9:.0f} GB/s" for p in one.protocols]
        seen, unseen = one.errors(), machine(name, every_second=True).errors("held out")
        out = sum(row.used.startswith("left out") for row in one.rows)
        rows.append(
            f"| `{name}` | {one.title} | {'; '.join(lines)} | {_percents(seen)} | "
            f"{_percents(unseen)} | {out} |"
        )
    return "\n".join(rows)


def _percents(errors: tuple[float, float]) -> str:
    return ", ".join(f"{100 * error:.0f} %" if error >= 0.005 else "under 1 %" for error in errors)


def _signed(error: float) -> str:
    percent = round(100 * error)
    return f"{percent:+d}" if percent else "0"


def rows() -> str:
    sweeps = {name: {row.row.payload: row for row in machine(name).rows} for name in machine_names()}
    payloads = sorted({payload for sweep in sweeps.values() for payload in sweep})
    lines = [f"| Payload | {' | '.join(f'`{name}`' for name in sweeps)} |", "|---:|" + "---:|" * len(sweeps)]
    for payload in payloads:
        cells = []
        for sweep in sweeps.values():
            row = sweep[payload]
            cells.append(_signed(row.error) + (" (left out)" if "left out" in row.used else ""))
        size = f"{payload >> 20:,} MiB" if payload >= 1 << 20 else f"{payload >> 10} KiB"
        lines.append(f"| {size} | {' | '.join(cells)} |")
    return "\n".join(lines)


def carried() -> str:
    lines = [
        "| Node | Ranks | Payload | measured bus bandwidth | model, of the time |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in measurements():
        if "NVLS (default)" in row.notes:
            one = machine("h200" if "H200" in row.node else "p6-b200")
            error = one.seconds("all_reduce", row.payload, row.ranks) / row.seconds - 1
            rate, size = f"{row.bus_bandwidth / 1e9:.0f} GB/s", f"{row.payload >> 30} GiB"
            lines.append(f"| {row.node} | {row.ranks} | {size} | {rate} | {_signed(error)} % |")
    return "\n".join(lines)


def generated(text: str) -> str:
    """`text` with its tables made anew."""
    parts = {make.__name__: make() for make in (algorithms, fits, rows, carried)}
    return made.filled(text, parts, "collective_tables.py")


if __name__ == "__main__":
    sys.exit(made.main(PATH, generated(PATH.read_text()), "collective_tables.py", sys.argv[1:]))
