"""The engines of a tile machine over time, and its SBUF, as figures.

    tile_timeline(done)                     a row for each engine (done = fmlab.kernels.tiles.run(…))
    tile_timeline(done, window=(0, 2e-5))   its first 20 us

`done.timeline()` is the same as text, `done.save_trace("kernel.json")` the same for ui.perfetto.dev.
"""

from typing import TYPE_CHECKING, Any

from fmlab.lab.figures import PALETTE, Captioned, caption, figure

if TYPE_CHECKING:
    from fmlab.kernels.tiles import Run

#: Engine -> colour and pattern of its bars; transfers are hatched, as messages are elsewhere.
LOOKS = {
    "load": (PALETTE[2], "////"),
    "store": (PALETTE[4], "\\\\\\\\"),
    "tensor": (PALETTE[0], ""),
    "vector": (PALETTE[5], ""),
    "scalar": (PALETTE[3], "...."),
    "gpsimd": (PALETTE[1], ""),
}
TRANSPOSE = "#bbbbbb"  # the tensor engine at work without FLOPs


def tile_timeline(
    done: "Run", window: tuple[float, float] | None = None, text: str = "", title: str = ""
) -> Captioned:
    """What each engine of a kernel's run does when (modelled); transpositions on the tensor engine are grey.

    window: seconds of the kernel to show. ValueError for a kernel without instructions, or an empty window.
    """
    if not done.instructions:
        raise ValueError(f"{done.kernel} has no instructions to show")
    low, high = window or (0.0, done.seconds)
    if not low < high:
        raise ValueError(f"a window ends after it begins, not {window!r}")
    from fmlab.kernels.tiles.report import ROWS

    engines = [engine for engine in ROWS if done.count(engine)]
    fig, ax = figure(x="time [us]", y="engine", title=title, height=0.9 + 0.36 * len(engines))
    ax.set(xlim=(1e6 * low, 1e6 * high), ylim=(len(engines) - 0.45, -0.55))
    for y, engine in enumerate(engines):
        _draw(ax, done, engine, y, low, high)
    ax.set_yticks(range(len(engines)), [ROWS[engine] for engine in engines])
    ax.grid(axis="y", visible=False)
    if not text:
        shares = ", ".join(f"{name} {100 * share:.0f} %" for name, share in done.utilisation.items() if share)
        text = f"{done.kernel} on {done.core.title}: {1e6 * done.seconds:.4g} us. Busy: {shares}."
    numbers = {"time [us]": 1e6 * done.seconds, "HBM traffic [MiB]": done.hbm_bytes / 2**20}
    return caption(fig, kind="modelled", text=text, numbers=numbers)


def _draw(ax: Any, done: "Run", engine: str, y: int, low: float, high: float) -> None:
    colour, hatch = LOOKS[engine]
    shown = [one for one in done.instructions if one.engine == engine and one.end > low and one.start < high]
    wide = 0.008 * (high - low)
    for turns in (False, True):
        for narrow in (False, True):
            spans = [
                (1e6 * one.start, 1e6 * (one.end - one.start))
                for one in shown
                if (one.name == "transpose") == turns and (one.end - one.start < wide) == narrow
            ]
            face = TRANSPOSE if turns else colour
            look = {"edgecolor": face} if narrow else {"edgecolor": "white", "hatch": hatch}
            ax.broken_barh(spans, (y - 0.38, 0.76), facecolor=face, lw=0.4, **look)
