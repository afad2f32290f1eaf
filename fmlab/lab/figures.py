"""Figures for lessons: legible and colour-blind-safe, axes with units, labelled measured, modelled or quoted.

    fig, ax = figure(x="batch size [sequences]", y="time [ms]", title="One step")
    ax.plot(sizes, times, label="forward")
    caption(fig, kind="measured", text="A step grows with the batch.")

In a notebook the last line shows the picture, its caption and label. Its text form carries the numbers behind
the picture, so that tests compare those (pictures themselves are never compared).
"""

import html
import io
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

from fmlab.extras import require
from fmlab.lab.table import badge, check_kind, number

# Okabe and Ito's palette, darkest first; line styles and markers differ too, for print and for every eye.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
LINES = ("-", "--", "-.", ":", "-", "--", "-.")
UNIT = re.compile(r"\S.*\[[^\]]+\]$")
INCH = 100  # pixels of the page to an inch of the figure
READABLE = (1e-4, 1e7)  # a log axis inside is labelled 0.001, 1, 10,000; outside 10^8
DPI = 150  # pixels of the picture: sharper than the page, for print and fine screens


def style() -> AbstractContextManager[Any]:
    """The rules of all our figures, as a context: `with style(): …` (figure() uses it by itself)."""
    matplotlib = require("lab", "matplotlib")
    cycler = require("lab", "cycler").cycler
    return matplotlib.rc_context(
        {
            "axes.prop_cycle": cycler(color=PALETTE) + cycler(linestyle=LINES),
            "figure.constrained_layout.use": True,
            "figure.facecolor": "white",
            "font.size": 10.5,
            "axes.titlesize": 11.5,
            "axes.titleweight": "bold",
            "axes.labelsize": 10.5,
            "legend.fontsize": 10,
            "xtick.labelsize": 10,
            "ytick.labelsize": 10,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.axisbelow": True,
            "grid.color": "#dddddd",
            "lines.linewidth": 2,
            "legend.frameon": False,
        }
    )


def figure(
    x: str | Sequence[str],
    y: str | Sequence[str],
    title: str | Sequence[str] = "",
    width: float = 7.2,
    height: float = 3.2,
) -> tuple[Any, Any]:
    """Return a figure and its axes, labelled; several labels make plots side by side (a list of axes).

    A label ends with its unit in brackets, as in "time [ms]"; `caption` raises ValueError otherwise. An axis
    with names on its ticks needs no unit.
    """
    labels = [list(value) if not isinstance(value, str) else [value] for value in (x, y, title)]
    many = max(len(values) for values in labels)
    xs, ys, titles = (values * many if len(values) == 1 else values for values in labels)
    if not len(xs) == len(ys) == len(titles) == many:
        raise ValueError(
            f"{len(xs)} x labels, {len(ys)} y labels, {len(titles)} titles: give one, or one for each plot"
        )
    with style():
        fig = require("lab", "matplotlib.figure").Figure(figsize=(width, height), dpi=DPI)
        axes = list(fig.subplots(1, many, squeeze=False)[0])
        for ax, x_label, y_label, name in zip(axes, xs, ys, titles, strict=True):
            ax.set(xlabel=x_label, ylabel=y_label, title=name)
    return fig, axes[0] if many == 1 else axes


def check_axes(fig: Any) -> None:
    """Raise ValueError unless each axis of `fig` has a title with a unit (names on ticks need no unit)."""
    for ax in fig.axes:
        if not ax.axison:
            continue
        for axis in (ax.xaxis, ax.yaxis):
            label = axis.get_label_text()
            if not label:
                raise ValueError(
                    f"the {axis.axis_name} axis has no label; write it with its unit, as in 'time [ms]'"
                )
            if not UNIT.match(label) and not _has_names(axis):
                raise ValueError(
                    f"axis label {label!r} has no unit; end it with one in brackets, as in 'time [ms]'"
                )


def _has_names(axis: Any) -> bool:
    texts = [tick.get_text() for tick in axis.get_ticklabels()]
    return any(re.search(r"[^\d\s.,:+−-]", text) for text in texts if "$" not in text)  # noqa: RUF001


def numbers_of(fig: Any, digits: int = 3) -> list[str]:
    """One line of text for each series of `fig`: the numbers behind the picture, rounded."""
    lines = []
    for ax in fig.axes:
        if ax.axison:
            lines.append(f"{ax.get_ylabel()} against {ax.get_xlabel()}")
        for line in ax.get_lines():
            lines.append(_series(line.get_label(), line.get_xdata(), line.get_ydata(), digits))
        for bars in ax.containers:
            if hasattr(bars, "datavalues"):
                values = ", ".join(number(float(value), digits) for value in bars.datavalues)
                lines.append(f"  {_name(bars.get_label(), 'bars')}: {values}")
        for image in ax.get_images():
            data = image.get_array()
            spread = f"from {number(float(data.min()), digits)} to {number(float(data.max()), digits)}"
            lines.append(f"  image {'x'.join(map(str, data.shape))}, {spread}")
    return lines


def _series(label: Any, xs: Any, ys: Any, digits: int) -> str:
    if len(ys) == 0:
        return f"  {_name(label, 'line')}: no points"
    points = [(number(_plain(x), digits), number(_plain(y), digits)) for x, y in zip(xs, ys, strict=True)]
    if len(points) <= 8:
        return f"  {_name(label, 'line')}: " + ", ".join(f"({x}, {y})" for x, y in points)
    first, last = (", ".join(points[at]) for at in (0, -1))
    return f"  {_name(label, 'line')}: {len(points)} points, first ({first}), last ({last})"


def _plain(value: Any) -> Any:
    value = value.item() if hasattr(value, "item") else value
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 1e15 else value


def _name(label: Any, otherwise: str) -> str:
    return otherwise if str(label).startswith("_") else str(label)


def png(fig: Any, alt: str = "") -> bytes:
    """The picture, with the same bytes for the same figure and library."""
    buffer = io.BytesIO()
    scalar = require("lab", "matplotlib.ticker").ScalarFormatter
    for axis in (axis for ax in fig.axes for axis in (ax.xaxis, ax.yaxis)):
        if type(axis.get_major_formatter()) is scalar:
            axis.set_major_formatter(lambda value, _: f"{value:,.10g}")
        elif axis.get_scale() == "log":
            _plain_log_ticks(axis)
    metadata = {"Software": None, **({"Description": alt} if alt else {})}
    with style():
        fig.savefig(buffer, format="png", dpi=DPI, metadata=metadata)
    return buffer.getvalue() if any(ax.get_images() for ax in fig.axes) else _in_few_colours(buffer, alt)


def _in_few_colours(picture: io.BytesIO, alt: str) -> bytes:
    """The same in 256 colours: a third of the bytes, and lines and text look alike (images would not)."""
    image, info = require("lab", "PIL.Image"), require("lab", "PIL.PngImagePlugin").PngInfo()
    if alt:
        info.add_text("Description", alt)
    buffer = io.BytesIO()
    few = image.open(picture).convert("RGB").quantize(256, dither=image.Dither.NONE)
    few.save(buffer, format="png", dpi=(DPI, DPI), pnginfo=info, optimize=True)
    return buffer.getvalue()


def _plain_log_ticks(axis: Any) -> None:
    """Write 64, not 2^6 or 6.4 x 10^1, on a log axis whose numbers are short; ticks set by hand stay."""
    low, high = sorted(axis.get_view_interval())
    if not READABLE[0] <= low <= high <= READABLE[1]:
        return
    for get, put in (
        (axis.get_major_formatter, axis.set_major_formatter),
        (axis.get_minor_formatter, axis.set_minor_formatter),
    ):
        if isinstance(get(), require("lab", "matplotlib.ticker").LogFormatter):
            put(_plain_formatter()(get()))
    axis.set_tick_params(which="minor", pad=_minor_pad(axis.axis_name))


def _minor_pad(name: str) -> float:
    """Points between a minor tick and its label that put it level with major ones, whose ticks are longer."""
    rc = require("lab", "matplotlib").rcParams
    return float(rc[f"{name}tick.major.size"] + rc[f"{name}tick.major.pad"] - rc[f"{name}tick.minor.size"])


@cache
def _plain_formatter() -> Any:
    """The class of formatters that label the ticks that another one chooses, with plain numbers."""

    class Plain(require("lab", "matplotlib.ticker").Formatter):  # type: ignore[misc]
        def __init__(self, chooses: Any) -> None:
            self.chooses = chooses

        def set_axis(self, axis: Any) -> None:
            super().set_axis(axis)
            self.chooses.set_axis(axis)

        def set_locs(self, locs: Any) -> None:
            super().set_locs(locs)
            self.chooses.set_locs(locs)

        def __call__(self, value: float, position: int | None = None) -> str:
            return f"{value:,.10g}" if self.chooses(value, position) else ""

    return Plain


def page_width(fig: Any) -> int:
    """Pixels of the page that the picture of `fig` takes."""
    return round(fig.get_figwidth() * INCH)


class Captioned:
    """A finished figure: picture, caption, label, alternative text, and the numbers as text."""

    def __init__(
        self, fig: Any, kind: str, text: str, alt: str, source: str, numbers: list[str], noisy: bool
    ) -> None:
        self.fig, self.kind, self.text, self.source = fig, kind, text, source
        self.numbers, self.noisy = numbers, noisy
        self.alt = alt or f"{text} {'; '.join(line.strip() for line in numbers)}"

    @property
    def label(self) -> str:
        return f"{self.kind}, from {self.source}" if self.source else self.kind

    def __repr__(self) -> str:
        numbers = ["≈ these numbers differ from run to run"] if self.noisy else self.numbers
        return "\n".join([f"Figure ({self.label}): {self.text}", *numbers])

    def bundle(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Data and metadata of the picture as Jupyter wants them."""
        import base64

        picture = base64.b64encode(png(self.fig, self.alt)).decode()
        about = {"alt": self.alt, "width": page_width(self.fig)}
        return {"image/png": picture, "text/plain": repr(self)}, {"image/png": about}

    def caption_html(self) -> str:
        source = f" Source: {html.escape(self.source)}." if self.source else ""
        text = f"{badge(self.kind)} {html.escape(self.text)}{source}"
        return f'<div style="font-size:13px;max-width:54em">{text}</div>'

    def _ipython_display_(self) -> None:
        display = require("lab", "IPython.display")
        data, metadata = self.bundle()
        display.display(data, metadata=metadata, raw=True)
        display.display(display.HTML(self.caption_html()))


def caption(
    fig: Any,
    kind: str,
    text: str,
    source: str = "",
    alt: str = "",
    numbers: Mapping[str, Any] | None = None,
    digits: int = 3,
    noisy: bool = False,
) -> Captioned:
    """Finish `fig`: check its axes, label it, and return it ready to display.

    `kind` is measured, modelled, quoted (then `source` is needed) or given. `alt` describes the picture to
    those who cannot see it (default: caption and numbers). `numbers` replaces the automatic text of the
    series; `digits` rounds them; `noisy` (timings) leaves them out of the text, so that tests do not
    compare them.

    ValueError for an axis without title or unit, an unknown kind, a missing source or an empty caption.
    """
    check_kind(kind, source, "caption")
    check_axes(fig)
    if not text.strip():
        raise ValueError("a caption says in a sentence what to see in the figure; text is empty")
    for ax in fig.axes:
        if len(ax.get_legend_handles_labels()[1]) > 1 and ax.get_legend() is None:
            ax.legend()
    if numbers is None:
        lines = numbers_of(fig, digits)
    else:
        lines = [f"  {name}: {_many(value, digits)}" for name, value in numbers.items()]
    return Captioned(fig, kind, text, alt, source, lines, noisy)


def _many(value: Any, digits: int) -> str:
    if isinstance(value, str) or not isinstance(value, Sequence):
        return number(value, digits)
    return ", ".join(number(one, digits) for one in value)
