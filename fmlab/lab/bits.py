"""Pictures of number formats: a number as boxes of bits, and where the numbers of a format lie.

bits_figure(10.3, ["fp32", "bf16", "fp16", "fp8-e4m3"])     one row of boxes for each format
spacing_figure(["bf16", "fp16", "fp8-e4m3"])                gap over size, for sizes of all kinds
bits_panel()                                                which bits does this format keep?
"""

from collections.abc import Sequence
from typing import Any

from fmlab.lab.figures import PALETTE, figure
from fmlab.lab.panels import Panel, choices
from fmlab.train.precision import FORMATS, Bits, bits_of, number_format

COLOURS = {"sign": PALETTE[6], "exponent": PALETTE[1], "mantissa": PALETTE[0]}
NUMBERS = (1.0, 0.1, 3.14159, 448.0, 500.0, 70000.0, 1e-3, 1e-5, 3e-8, 1e-20, 1e38)
BINADES = range(-30, 20)  # powers of two of the figure


def bits_figure(number: float, formats: Sequence[str], title: str = "") -> tuple[Any, Any]:
    """A number in several formats: sign, exponent and mantissa as boxes; a figure and its axes."""
    rows = [bits_of(number, name) for name in formats]
    fig, ax = figure(
        x="bit, counted from the sign [bits]",
        y="format",
        title=title or f"{number:g} as bits",
        height=1.25 + 0.42 * len(rows),
        width=8.4,
    )
    for at, one in enumerate(rows):
        _boxes(ax, one, len(rows) - 1 - at)
    widest = max(one.format.bits for one in rows)
    ax.set(xlim=(-0.5, widest + 8), ylim=(-0.6, len(rows) - 0.4))
    ax.set_yticks(range(len(rows)), [one.format.name for one in reversed(rows)])
    ax.grid(False)
    handles = [_patch(colour, name) for name, colour in COLOURS.items()]
    fig.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    return fig, ax


def _boxes(ax: Any, one: Bits, y: float) -> None:
    at = 0
    for part in ("sign", "exponent", "mantissa"):
        for bit in getattr(one, part):
            filled = bit == "1"
            ax.barh(y, 1, 0.62, at, color=COLOURS[part] if filled else "white", edgecolor=COLOURS[part])
            ax.text(
                at + 0.5, y, bit, ha="center", va="center", fontsize=8, color="white" if filled else "black"
            )
            at += 1
    ax.text(at + 0.4, y, f"{one.value:.7g}", va="center", fontsize=9)


def _patch(colour: str, label: str) -> Any:
    from fmlab.extras import require

    return require("lab", "matplotlib.patches").Patch(color=colour, label=label)


def spacing_figure(formats: Sequence[str], title: str = "Gap over size") -> tuple[Any, Any]:
    """The gap between neighbours, in terms of the number, from 2^-30 to 2^19; a figure and its axes.

    A line ends where the format does. Whole numbers of `int8` have the gap 1 whatever their size.
    """
    fig, ax = figure(x="size of the number [1]", y="gap / number [1]", title=title, height=3.4)
    for name in formats:
        fmt = number_format(name)
        powers = [p for p in BINADES if fmt.smallest <= 2.0**p <= fmt.max]
        gaps = [
            2.0 ** max(p, fmt.min_exponent) * fmt.epsilon / 2.0**p if fmt.is_float else 2.0**-p
            for p in powers
        ]
        ax.plot([2.0**p for p in powers], gaps, label=name)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return fig, ax


def _draw(number: float, name: str) -> tuple[Any, str]:
    one = bits_of(number, name)
    fig, _ = bits_figure(number, ["fp32", name] if name != "fp32" else ["fp32"])
    off = f", off by {one.error:+.2%}" if one.error else ", exactly"
    return fig, f"{one}{off}; largest {one.format.max:g}, smallest {one.format.smallest:.3g}"


def bits_panel() -> Panel:
    """A panel with sliders for number and format. Worth finding: 500 in E4M3 is no number, 1e-5 in fp16 has
    lost most of its mantissa, 1e-20 exists in bf16 and not in fp16."""
    return Panel(
        "Which bits does this format keep?",
        _draw,
        kind="modelled",
        number=choices(0.1, NUMBERS, "number"),
        name=choices("bf16", list(FORMATS), "format"),
    )
