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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fmlab.extras import require
from fmlab.interactive import is_live
from fmlab.lab.figures import check_axes, page_width, png
from fmlab.lab.table import badge, check_kind

SLIDER_EM = 36  # width of label, slider and a value of up to VALUE_LETTERS
VALUE_LETTERS, LETTER_EM = 10, 0.6

Depending = Callable[..., Sequence[Any]]  # of the other controls' values: what there is to choose from


@dataclass(frozen=True)
class Control:
    """A slider over `options`, with its label and its default value."""

    value: Any
    options: tuple[Any, ...] | Depending
    label: str

    @property
    def depends(self) -> bool:
        """Whether the options follow from other controls."""
        return callable(self.options)

    def legal(self, others: Mapping[str, Any]) -> tuple[Any, ...]:
        """The options while the other controls (those that do not depend themselves) stand so."""
        return tuple(self.options(**others)) if callable(self.options) else self.options

    def widget(self, value: Any, options: Sequence[Any], letters: int = VALUE_LETTERS) -> Any:
        """The slider, with room for a value of so many letters."""
        widgets = require("lab", "ipywidgets")
        more = max(0, letters - VALUE_LETTERS)
        return widgets.SelectionSlider(
            options=_labelled(options),
            value=value,
            description=self.label,
            tooltip=f"{self.label}: arrow keys move it",
            style={"description_width": "14em"},
            layout=widgets.Layout(width=f"{SLIDER_EM + LETTER_EM * more:.0f}em", max_width="100%"),
            continuous_update=False,
        )


def _labelled(options: Sequence[Any]) -> list[tuple[str, Any]]:
    return [(_text(option), option) for option in options]


def _text(option: Any) -> str:
    return f"{option:,}" if isinstance(option, int) and not isinstance(option, bool) else str(option)


def slider(value: int, low: int, high: int, label: str, step: int = 1) -> Control:
    """A control over whole numbers from `low` to `high` (both included), moved by mouse or arrow keys."""
    return choices(value, range(low, high + 1, step), label)


def choices(value: Any, options: Sequence[Any] | Depending, label: str) -> Control:
    """A control over any values, in the order of `options`. ValueError if `value` is none of them.

    options: or a function of the values of the other controls, by their names, that returns them:
             choices(1, lambda algorithm, **_: range(1, steps[algorithm] + 1), "step")
    """
    if not label:
        raise ValueError("a control needs a label")
    if callable(options):
        return Control(value, options, label)  # its panel checks the default
    if value not in options:
        raise ValueError(f"{label}: the default {value!r} is none of the options {list(options)}")
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
        self.options: dict[str, tuple[Any, ...]] = {}
        self.picture, self.summary, self.width = b"", "", 0
        self.set(**self.values)

    def set(self, **values: Any) -> None:
        """Move the controls to `values` and draw; ValueError lists the legal values of a control.

        A control that is not named gives way: where its options depend on another and its value is gone, it
        moves to the last of the new ones.
        """
        for name in values:
            if name not in self.controls:
                raise ValueError(f"no control {name!r}; controls are: {', '.join(self.controls)}")
        wanted, options = self.values | values, {}
        free = {name: wanted[name] for name, control in self.controls.items() if not control.depends}
        for name in [*free, *(name for name in self.controls if name not in free)]:
            options[name] = self.controls[name].legal(free)
            if wanted[name] not in options[name]:
                if name in values:
                    raise ValueError(f"{name} = {wanted[name]!r}; legal are: {options[name]}")
                wanted[name] = options[name][-1]
        self.values, self.options = wanted, options
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
        letters = max(len(_text(option)) for options in self.options.values() for option in options)
        sliders = {
            name: control.widget(self.values[name], self.options[name], letters)
            for name, control in self.controls.items()
        }

        def refresh(change: Any = None) -> None:
            moved = change.owner if change else None
            named = {
                name: slider.value
                for name, slider in sliders.items()
                if slider is moved or not self.controls[name].depends
            }
            self.set(**named)
            for name, slider in sliders.items():
                if self.controls[name].depends:
                    self._follow(name, slider, refresh)
            encoded = base64.b64encode(self.picture).decode()
            alt = html.escape(f"{self.question} {self.summary}", quote=True)
            size = f'width="{self.width}" style="max-width:100%"'
            picture.value = f'<img alt="{alt}" src="data:image/png;base64,{encoded}" {size}>'
            line.value = (
                f'<div role="status" aria-live="polite" style="line-height:1.6">{badge(self.kind)} '
                f"{html.escape(self.summary)}</div>"
            )

        for slider in sliders.values():
            slider.observe(refresh, "value")
        refresh()
        title = widgets.HTML(f"<b>{html.escape(self.question)}</b>")
        return widgets.VBox([title, *sliders.values(), picture, line])

    def _follow(self, name: str, slider: Any, refresh: Callable[..., None]) -> None:
        """Give a slider whose options depend on others the present ones, without drawing again."""
        slider.unobserve(refresh, "value")
        if tuple(value for _, value in slider.options) != self.options[name]:
            slider.options = _labelled(self.options[name])  # this also moves it to the first
        slider.value = self.values[name]
        slider.observe(refresh, "value")
