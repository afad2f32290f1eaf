"""Panels: a picture with sliders for a person, and elsewhere the same picture and one line of text.

def draw(ranks, micro_batches):
    fig, ax = figure(x="time [slots]", y="stage")
    …
    return fig, f"{ranks} stages, {micro_batches} micro-batches: bubble {bubble:.3f}"

Panel("How large is the bubble?", draw, kind="modelled",
      ranks=slider(4, 1, 8, "stages"), micro_batches=slider(8, 1, 32, "micro-batches"))
"""

import base64
import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fmlab.extras import require
from fmlab.interactive import is_live
from fmlab.lab.figures import check_axes, page_width, png
from fmlab.lab.table import badge, check_kind


@dataclass(frozen=True)
class Control:
    """A slider over `options`, with its label and its default value."""

    value: Any
    options: tuple[Any, ...]
    label: str

    def widget(self) -> Any:
        widgets = require("lab", "ipywidgets")
        return widgets.SelectionSlider(
            options=[(_text(option), option) for option in self.options],
            value=self.value,
            description=self.label,
            tooltip=f"{self.label}: arrow keys move it",
            style={"description_width": "14em"},
            layout=widgets.Layout(width="36em", max_width="100%"),
            continuous_update=False,
        )


def _text(option: Any) -> str:
    return f"{option:,}" if isinstance(option, int) and not isinstance(option, bool) else str(option)


def slider(value: int, low: int, high: int, label: str, step: int = 1) -> Control:
    """A control over whole numbers from `low` to `high` (both included), moved by mouse or arrow keys."""
    return choices(value, range(low, high + 1, step), label)


def choices(value: Any, options: Sequence[Any], label: str) -> Control:
    """A control over any values, in the order of `options`. ValueError if `value` is none of them."""
    if value not in options:
        raise ValueError(f"{label}: the default {value!r} is none of the options {list(options)}")
    if not label:
        raise ValueError("a control needs a label")
    return Control(value, tuple(options), label)


class Panel:
    """A question with sliders.

    `draw(**values)` returns a figure (see `figures.figure`) and one line of text with its numbers. Without a
    person the panel is its default view: a picture, and that line, which tests compare. `kind` and `source`
    label the figures as `caption` does.
    """

    def __init__(
        self,
        question: str,
        draw: Callable[..., tuple[Any, str]],
        kind: str,
        source: str = "",
        **controls: Control,
    ) -> None:
        check_kind(kind, source, "panel")
        if not controls:
            raise ValueError("a panel has at least one control: name=slider(…)")
        self.question, self.draw, self.kind, self.source, self.controls = (
            question,
            draw,
            kind,
            source,
            controls,
        )
        self.values = {name: control.value for name, control in controls.items()}
        self.picture, self.summary, self.width = b"", "", 0
        self.set()

    def set(self, **values: Any) -> None:
        """Move the controls to `values` and draw; ValueError lists the legal values of a control."""
        for name, value in values.items():
            if name not in self.controls:
                raise ValueError(f"no control {name!r}; controls are: {', '.join(self.controls)}")
            if value not in self.controls[name].options:
                raise ValueError(f"{name} = {value!r}; legal are: {self.controls[name].options}")
        self.values.update(values)
        fig, self.summary = self.draw(**self.values)
        check_axes(fig)
        self.picture, self.width = png(fig, self.summary), page_width(fig)

    def __repr__(self) -> str:
        return f"{self.question} ({self.label})\n{self.summary}"

    @property
    def label(self) -> str:
        return f"{self.kind}, from {self.source}" if self.source else self.kind

    def _ipython_display_(self) -> None:
        display = require("lab", "IPython.display")
        data, metadata = self.bundle()
        display.display(data, metadata=metadata, raw=True)
        if not is_live():
            source = f" Source: {html.escape(self.source)}." if self.source else ""
            words = f"<b>{html.escape(self.question)}</b> {html.escape(self.summary)}.{source}"
            text = f"{badge(self.kind)} {words} <i>Run this cell to move its sliders.</i>"
            display.display(display.HTML(f'<div style="font-size:13px;max-width:54em">{text}</div>'))

    def bundle(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Data and metadata as Jupyter wants them: the picture and the line, and for a person the widget."""
        data = {"image/png": base64.b64encode(self.picture).decode(), "text/plain": repr(self)}
        if is_live():
            bundle = self.widget()._repr_mimebundle_()
            data.update(bundle[0] if isinstance(bundle, tuple) else bundle)
            data["text/plain"] = repr(self)
        return data, {"image/png": {"alt": f"{self.question} {self.summary}", "width": self.width}}

    def widget(self) -> Any:
        """The live panel: question, sliders, picture (with alternative text), line of numbers."""
        widgets = require("lab", "ipywidgets")
        picture, line = widgets.HTML(), widgets.HTML()
        sliders = {name: control.widget() for name, control in self.controls.items()}

        def refresh(_: Any = None) -> None:
            self.set(**{name: slider.value for name, slider in sliders.items()})
            encoded = base64.b64encode(self.picture).decode()
            alt = html.escape(f"{self.question} {self.summary}", quote=True)
            size = f'width="{self.width}" style="max-width:100%"'
            picture.value = f'<img alt="{alt}" src="data:image/png;base64,{encoded}" {size}>'
            line.value = (
                f'<div role="status" aria-live="polite">{badge(self.kind)} {html.escape(self.summary)}</div>'
            )

        for control in sliders.values():
            control.observe(refresh, "value")
        for name, control in sliders.items():
            control.value = self.values[name]
        refresh()
        title = widgets.HTML(f"<b>{html.escape(self.question)}</b>")
        return widgets.VBox([title, *sliders.values(), picture, line])
