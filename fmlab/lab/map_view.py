"""Figures of training steps on simulated chips (fmlab.lab.map), layer by layer of the stack; all modelled.

    timeline_view(steps, text)      who is busy when
    layers_view(steps, text)        whose time it is, a bar for each step
    map_view(steps, text)           the one-page map: time and memory by layer, with the chapters

steps: name -> OnChip. text: the caption.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from fmlab.lab.figures import PALETTE, Captioned, caption, figure
from fmlab.lab.map import STACK, OnChip, layer_of, shares


def timeline_view(steps: Mapping[str, OnChip], text: str) -> Captioned:
    """What each chip did from the first line of its step to the end, coloured by layer."""
    fig, ax = figure(x="time, as a part of the chip's own step [%]", y="chip", height=1.3 + 0.5 * len(steps))
    for place, layer in enumerate(STACK):
        for row, step in enumerate(steps.values()):
            mine = [event for event in step.trace if layer_of(event.name, event.phase) == layer.name]
            spans = [(100 * e.start / step.seconds, 100 * e.seconds / step.seconds) for e in mine]
            edge = 0.1 if step.trace.busy() < step.seconds / 2 else 0.0  # or short events would be invisible
            look = {"color": PALETTE[place], "lw": edge, "label": "_" if row or not mine else layer.name}
            ax.broken_barh(spans, (row - 0.35, 0.7), **look)
    ax.set(xlim=(0, 100), ylim=(len(steps) - 0.5, -0.5))
    ax.set_yticks(range(len(steps)), list(steps))
    ax.grid(visible=False)
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    numbers = {f"{name}, step [µs]": 1e6 * step.seconds for name, step in steps.items()}
    return caption(fig, kind="modelled", text=text, numbers=numbers)


def layers_view(steps: Mapping[str, OnChip], text: str) -> Captioned:
    """A bar for each step, cut by layer."""
    fig, ax = figure(x="share of the step's time [%]", y="step", height=1.2 + 0.42 * len(steps))
    parts = {name: shares(step.time) for name, step in steps.items()}
    left = [0.0] * len(steps)
    for place, layer in enumerate(STACK):
        wide = [part[layer.name] for part in parts.values()]
        look = {"color": PALETTE[place], "edgecolor": "white"}
        ax.barh(list(steps), wide, left=left, label=layer.name, **look)
        left = [a + b for a, b in zip(left, wide, strict=True)]
    ax.set_xlim(0, 100)
    ax.invert_yaxis()
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return caption(fig, kind="modelled", text=text, numbers=_numbers(parts, "time"))


def map_view(steps: Mapping[str, OnChip], text: str) -> Captioned:
    """The map: layers from top to bottom, time on the left and memory on the right, a bar for each step."""
    if not steps:
        raise ValueError("a map needs at least one step: {'gpt2': on_chip('h100', 'gpt2', 8, 1024)}")
    time = {name: shares(step.time) for name, step in steps.items()}
    memory = {name: shares(step.memory) for name, step in steps.items()}
    x = ("share of the step's time [%]", "share of its memory [%]")
    fig, (left, right) = figure(x=x, y=("layer", "what it keeps"), height=4.4, width=8.4)
    _bars(left, [f"{one.name}\n{one.time}\n→ {', '.join(one.chapters)}" for one in STACK], time)
    bars = _bars(right, [one.memory for one in STACK], memory)
    fig.legend(bars, list(steps), loc="outside upper center", ncols=len(steps), frameon=False)
    numbers = _numbers(time, "time") | _numbers(memory, "memory")
    return caption(fig, kind="modelled", text=text, numbers=numbers)


def _bars(ax: Any, names: Sequence[str], parts: Mapping[str, Mapping[str, float]]) -> list[Any]:
    high, bars = 0.76 / len(parts), []
    for number, part in enumerate(parts.values()):
        found = list(part.values())
        places = [at + (number - (len(parts) - 1) / 2) * high for at in range(len(found))]
        look = {"color": PALETTE[number], "edgecolor": "white"}
        bars.append(ax.barh(places, found, high, **look))
        for at, share in zip(places, found, strict=True):
            if share:
                ax.text(share + 1.5, at, _percent(share), va="center", fontsize=8.5)
    ax.set(xlim=(0, 118), ylim=(len(names) - 0.45, -0.55))
    ax.set_xticks(range(0, 101, 25))
    ax.set_yticks(range(len(names)), names)
    ax.grid(axis="y", visible=False)
    return bars


def _percent(share: float) -> str:
    return f"{share:.0f} %" if share >= 0.95 else f"{share:.1f} %" if share >= 0.05 else "<0.1 %"


def _numbers(parts: Mapping[str, Mapping[str, float]], what: str) -> dict[str, str]:
    """For the text form of a figure: shares of the layers that have any."""
    return {
        f"{name}, {what}": ", ".join(f"{layer} {_percent(share)}" for layer, share in part.items() if share)
        for name, part in parts.items()
    }
