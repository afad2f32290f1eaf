"""A panel on context parallelism: who waits for whom in a causal ring?"""

from typing import Any

from fmlab.lab.figures import PALETTE, figure
from fmlab.lab.panels import Panel, choices
from fmlab.parallel.context.positions import padded_length, work_by_step


def _draw(balance: str, ranks: int, length: int) -> tuple[Any, str]:
    length = padded_length(length, ranks, "mirrored")
    by_step = work_by_step(length, ranks, balance)
    longest = [max(steps) for steps in zip(*by_step, strict=True)]
    fig, ax = figure(x="work until the ring is done [million pairs]", y="rank [number]", height=2.4)
    start = 0
    for step, most in enumerate(longest):
        for rank, steps in enumerate(by_step):
            bar = {"left": start / 1e6, "edgecolor": "white", "height": 0.8}
            ax.barh(rank, steps[step] / 1e6, color=PALETTE[step % len(PALETTE)], **bar)
        start += most
        ax.axvline(start / 1e6, color="black", linestyle=":", linewidth=1)
    ax.invert_yaxis()
    busy = sum(map(sum, by_step)) / (ranks * start)
    return fig, (
        f"{balance}, {ranks} ranks, {length:,} tokens: {start / 1e6:,.1f} million pairs on the critical "
        f"path, ranks busy {busy:.0%} of it"
    )


def balance_panel() -> Panel:
    """A panel with sliders for balance, ranks and length; its figures are modelled.

    Every colour is a step of the ring, a dotted line its end: all ranks wait there for the slowest. Worth
    finding: without balance the ring takes about twice as long, whatever the number of ranks.
    """
    return Panel(
        "Who waits for whom in a causal ring?",
        _draw,
        kind="modelled",
        balance=choices("none", ("none", "striped", "mirrored"), "balance"),
        ranks=choices(4, (2, 4, 8, 16), "ranks"),
        length=choices(8192, (2048, 8192, 32768, 131072), "sequence [tokens]"),
    )
