"""What moves while a cell runs: a loss curve and a progress bar. Without a person both are still."""

import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from fmlab.extras import require
from fmlab.interactive import is_live
from fmlab.lab.figures import Captioned, caption, figure
from fmlab.train.callbacks import Callback, StepMetrics
from fmlab.train.evaluate import Evaluation

if TYPE_CHECKING:
    from fmlab.train.loop import TrainResult

T = TypeVar("T")
REDRAW = 0.5  # seconds between two drawings, at least
SHARE = 0.05  # of the time may go into drawing


class LiveCurve(Callback):
    """A curve that grows while training runs, and stays as a captioned figure afterwards.

        with LiveCurve("The loss falls.", y="loss [nats/token]") as curve:
            for step in range(steps):
                curve.add(step, train=loss)

    It is a callback of `fmlab.train` too: `train(config, callbacks=[LiveCurve("The loss falls.")])`.

    In a live page it is redrawn in place now and then; otherwise one picture appears at the end.
    Its text form holds the first and the last point of each series to `digits` significant digits.
    """

    def __init__(
        self, text: str, y: str = "loss [nats/token]", x: str = "step [optimizer steps]", digits: int = 2
    ) -> None:
        self.text, self.x, self.y, self.digits = text, x, y, digits
        self.series: dict[str, tuple[list[float], list[float]]] = {}
        self._handle: Any = None
        self._next = 0.0  # moment of the next drawing
        self._closed = False

    def add(self, step: float, **values: float) -> None:
        """Add one point to each named series."""
        for name, value in values.items():
            xs, ys = self.series.setdefault(name, ([], []))
            xs.append(step)
            ys.append(float(value))
        if time.monotonic() > self._next and is_live():
            began = time.monotonic()
            self._draw()
            ended = time.monotonic()
            self._next = ended + max(REDRAW, (ended - began) / SHARE)

    def figure(self) -> Captioned:
        """The curve as it stands."""
        fig, ax = figure(x=self.x, y=self.y)
        for name, (xs, ys) in self.series.items():
            ax.plot(xs, ys, label=name, marker="o" if len(xs) <= 20 else None)
        return caption(fig, kind="measured", text=self.text, digits=self.digits)

    def _draw(self) -> None:
        display = require("lab", "IPython.display").display
        data, metadata = self.figure().bundle()
        if self._handle is None:
            self._handle = display(data, metadata=metadata, raw=True, display_id=True)
        else:
            self._handle.update(data, metadata=metadata, raw=True)

    def close(self) -> None:
        """Draw the whole curve, with its caption; once, however often it is called."""
        if self.series and not self._closed:
            self._closed = True
            self._draw()
            display = require("lab", "IPython.display")
            display.display(display.HTML(self.figure().caption_html()))

    def on_step(self, metrics: StepMetrics) -> None:
        self.add(metrics.step, train=metrics.loss)

    def on_evaluation(self, step: int, evaluation: Evaluation) -> None:
        self.add(step, validation=evaluation.loss)

    def on_end(self, result: "TrainResult | None") -> None:
        self.close()

    def __enter__(self) -> "LiveCurve":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def progress(items: Iterable[T], text: str = "") -> Iterator[T]:
    """Iterate over `items` with a progress bar where a person watches (tqdm), silently otherwise."""
    if not is_live():
        return iter(items)
    bar = require("lab", "tqdm.auto").tqdm(items, desc=text, leave=False)
    return iter(bar)


def ticker(steps: int, text: str = "") -> Callable[..., None]:
    """A function that moves a progress bar by one at each call, silently where nobody watches.

    fine_tune(…, each=ticker(steps, "tuning")) shows how far a long cell is. Raises ValueError without a step.
    """
    if steps < 1:
        raise ValueError(f"a progress bar needs at least 1 step, got {steps}")
    if not is_live():
        return lambda *_: None
    bar = require("lab", "tqdm.auto").tqdm(total=steps, desc=text, leave=False)

    def tick(*_: Any) -> None:
        bar.update()
        if bar.n >= steps:
            bar.close()

    return tick
