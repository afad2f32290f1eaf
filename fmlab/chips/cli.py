"""`fmlab chips`: list chips and hosts, show one with its sources, or lay some side by side."""

import argparse
from collections.abc import Callable, Sequence

from fmlab.chips.catalogue import chip, chips, unknown
from fmlab.chips.chip import Chip, dtype_name
from fmlab.chips.figures import Figure
from fmlab.chips.host import Host, host, hosts


def listing() -> str:
    """All chips and hosts, a line each."""
    lines = ["chips"]
    for name in chips():
        one = chip(name)
        dtypes = ", ".join(one.dtypes)
        lines.append(f"  {name:14} {one.title}; {dtypes}; {one.memory_bytes / 2**30:g} GiB")
    lines.append("hosts")
    lines += [f"  {name:18} {host(name).title}" for name in hosts()]
    return "\n".join([*lines, "", "fmlab chips show NAME   its figures, each with convention and source"])


def card(name: str) -> str:
    """Every figure of a chip or a host, with what other sources say."""
    if name in chips():
        one = chip(name)
        part = f", a core of {one.of}" if one.of else ""
        head = [f"{name}: {one.title} ({one.vendor}, per {one.unit}{part}; {one.compiler})"]
        return "\n".join([*head, *_figures(one.figures()), *_found_in(one)])
    if name in hosts():
        return _host_card(host(name))
    raise ValueError(unknown("chip or host", name, [*chips(), *hosts()]))


def _figures(figures: dict[str, Figure]) -> list[str]:
    lines = []
    for name, figure in figures.items():
        lines.append(f"  {name:24} {figure.value:g} {figure.unit}, {figure.convention}")
        lines.append(f"  {'':24}   {figure.source}")
        lines += [
            f"  {'':24} also {other.value:g} {other.unit}, {other.convention}: {other.source}"
            for other in figure.also
        ]
    return lines


def _found_in(one: Chip) -> list[str]:
    names = hosts(one.of or one.name)
    return [f"  {'hosts':24} {', '.join(names)}"] if names else []


def _host_card(one: Host) -> str:
    lines = [f"{one.name}: {one.title}", f"  {'chips':24} {one.chips} x {one.chip.name}"]
    lines += [f"  {'wiring':24} {one.fabric['kind']}", f"  {'':24}   {one.fabric['source']}"]
    lines += _figures(one.figures())
    for price in one.prices:
        per = f"a {price.per} and hour, {price.kind}, {price.region}, {price.date}"
        lines += [f"  {'price':24} {price.usd_per_hour} USD {per}", f"  {'':24}   {price.source}"]
    return "\n".join(lines)


def comparison(names: Sequence[str], dtype: str) -> str:
    """Chips side by side in one dtype; a dash where no source gives a figure."""
    some = [chip(name) for name in names]
    rows: list[tuple[str, Callable[[Chip], float | None], float]] = [
        (f"peak {dtype} [TFLOP/s]", lambda one: one.peak_flops(dtype), 1e12),
        (f"measured best {dtype} [TFLOP/s]", lambda one: one.achievable_flops(dtype), 1e12),
        ("memory [GiB]", lambda one: one.memory_bytes, 2**30),
        ("memory bandwidth [TB/s]", lambda one: one.memory_bandwidth, 1e12),
        ("ridge [FLOP/B]", lambda one: one.roofline(dtype).ridge, 1),
        ("on the chip [MiB]", lambda one: one.on_chip_bytes, 2**20),
        ("links, one way [GB/s]", lambda one: one.link_bandwidth, 1e9),
        ("price, see hosts [USD/h a chip]", _price, 1),
    ]
    table = [["per chip, dense", *names], ["", *(one.unit for one in some)]]
    for title, value, scale in rows:
        table.append([title, *(_cell(value, one, scale) for one in some)])
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in table
    )


def _cell(value: Callable[[Chip], float | None], one: Chip, scale: float) -> str:
    try:
        found = value(one)
    except ValueError:
        found = None
    return "-" if found is None else f"{found / scale:.4g}"


def _price(one: Chip) -> float:
    """The lowest first price of a host that has this chip."""
    prices = [host(name).usd_per_chip_hour() for name in hosts(one.name) if host(name).prices]
    if not prices:
        raise ValueError(f"no price of {one.name} is known")
    return min(prices)


def main(argv: list[str]) -> int:
    """Run `fmlab chips …`. Raises ValueError for an unknown name or dtype."""
    parser = argparse.ArgumentParser(prog="fmlab chips", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="list | show | compare")
    commands.add_parser("list", help="all chips and hosts")
    show = commands.add_parser("show", help="one chip or host: each figure, its convention, its source")
    show.add_argument("name")
    compare = commands.add_parser("compare", help="chips side by side")
    compare.add_argument("names", nargs="+", metavar="chip")
    compare.add_argument("--dtype", default="bf16", help="bf16 (default), fp16, tf32, fp32, fp8, int8")
    args = parser.parse_args(argv)
    if args.command == "list":
        print(listing())
    elif args.command == "show":
        print(card(args.name))
    else:
        dtype = dtype_name(args.dtype)
        legal = sorted({one for name in chips() for one in chip(name).dtypes})
        if dtype not in legal:
            raise ValueError(f"no chip has a {args.dtype} rate; legal: {', '.join(legal)}")
        print(comparison(args.names, dtype))
    return 0
