"""Write the tables of docs/chips.md from the package itself: every chip, host, price and source.

Run it inside .venv after a change of fmlab/chips/data; with --check it only says whether they agree.
"""

import sys
from pathlib import Path

import made

from fmlab.chips import Chip, Figure, Host, chip, chips, host, hosts
from fmlab.chips.catalogue import read_table

ROOT = Path(__file__).resolve().parent.parent
PATH = ROOT / "docs" / "chips.md"
KEYS = {text: key for key, text in read_table("sources").items()}


def rates() -> str:
    head = "| Chip | bf16 | measured best | fp16 | fp32 | fp8 | memory | bandwidth | ridge, bf16 | on chip |"
    rows = [head + " links, one way |", "|---|" + "---:|" * 10]
    for name in chips():
        one = chip(name)
        ridge = f"{one.roofline('bf16').ridge:.0f}" if "bf16" in one.dtypes else ""
        cells = [_value(one, key) for key in ("peak.bf16", "achievable.bf16", "peak.fp16", "peak.fp32")]
        cells += [_value(one, key) for key in ("peak.fp8", "memory", "memory_bandwidth")]
        cells += [ridge, _value(one, "on_chip"), _value(one, "link_bandwidth")]
        rows.append(f"| `{name}`: {one.title} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _value(one: Chip, key: str) -> str:
    figure = one.figures().get(key)
    if figure is None:
        return ""
    return f"{figure.value:g}" if figure.unit == "TFLOP/s" else _with_unit(figure)


def _with_unit(figure: Figure) -> str:
    """As published; GiB/s with its decimal value, and a plain B/s as Gbit/s like other networks."""
    if figure.unit == "B/s":
        return f"{figure.base * 8 / 1e9:g} Gbit/s"
    shown = f"{figure.value:g} {figure.unit}"
    return f"{shown} ({figure.base / 1e12:.3f} TB/s)" if figure.unit == "GiB/s" else shown


def disagreements() -> str:
    rows = ["| Chip | Figure | Used | Others say |", "|---|---|---|---|"]
    for name in chips():
        for key, figure in chip(name).figures().items():
            if figure.also:
                others = "; ".join(f"{_with_unit(other)} {_about(other)}" for other in figure.also)
                rows.append(f"| `{name}` | {key} | {_with_unit(figure)} {_about(figure)} | {others} |")
    return "\n".join(rows)


def _about(figure: Figure) -> str:
    return f"({figure.convention}; {_keys(figure.source)})"


def _keys(source: str) -> str:
    return ", ".join(KEYS[part] for part in source.split("; "))


def host_table() -> str:
    rows = ["| Host | Chips | Wired as | Network, one way | Prices |", "|---|---|---|---|---|"]
    for name in hosts():
        one = host(name)
        network = one.figures().get("network_bandwidth")
        shown = "" if network is None else f"{_with_unit(network)} ({_keys(network.source)})"
        rows.append(
            f"| `{name}` | {one.chips} x `{one.chip.name}` | {_wiring(one)} | {shown} | {_prices(one)} |"
        )
    return "\n".join(rows)


def _wiring(one: Host) -> str:
    if one.chips == 1:
        alone = "alone"
    else:
        shape = " x ".join(map(str, one.fabric.get("shape", ())))
        alone = {"torus": f"torus {shape}", "graph": "cube mesh"}.get(one.fabric["kind"], one.fabric["kind"])
    group = one.group
    if "pod" in group:
        most = f", {group['largest']:,} chips a job" if "largest" in group else ""
        return f"{alone}, part of a torus of up to {' x '.join(map(str, group['pod']))}{most}"
    if "chips" in group:
        return f"{alone}, part of a torus of up to {group['chips']:,} chips"
    if "shape" in group:
        return f"{alone}; {group['hosts']} hosts: torus {' x '.join(map(str, group['shape']))}"
    return f"{alone} of {group['hosts']} hosts" if "hosts" in group else alone


def _prices(one: Host) -> str:
    shown = []
    for price in one.prices:
        each = "" if price.per == "host" else " a chip"
        shown.append(f"{price.usd_per_hour} USD/h{each}, {price.kind}, {price.date} ({KEYS[price.source]})")
    return "; ".join(shown)


def sources() -> str:
    rows = ["| Key | Where it was read |", "|---|---|"]
    return "\n".join([*rows, *(f"| {key} | {text} |" for key, text in read_table("sources").items())])


def generated(text: str) -> str:
    """`text` with its tables made anew."""
    parts = {"rates": rates(), "disagreements": disagreements(), "hosts": host_table(), "sources": sources()}
    return made.filled(text, parts, "chip_tables.py")


if __name__ == "__main__":
    sys.exit(made.main(PATH, generated(PATH.read_text()), "chip_tables.py", sys.argv[1:]))
