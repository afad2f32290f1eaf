"""What cannot be captured, said with the line of the user's code that it comes from."""

import functools
import linecache
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch

HERE = Path(__file__).parent
TORCH = Path(torch.__file__).parent
STDLIB = Path(sysconfig.get_path("stdlib"))


@dataclass(frozen=True)
class Line:
    """A line of source: file, number from 1, and its text."""

    file: str
    number: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.number}: {self.text}"


class CaptureError(ValueError):
    """A function that cannot be held in a graph.

    kind: "control flow", "shape", "mutation", "alias", "state", "operator" or "gradient".
    line: where in the user's code, or None where that is not known.
    """

    def __init__(self, kind: str, what: str, advice: str, line: Line | None = None):
        self.kind, self.what, self.advice, self.line = kind, what, advice, line
        place = "" if line is None else f"\n  at {line}"
        super().__init__(f'{what}{place}\n  {advice}, or take fallback="eager", which runs it uncompiled')


def user_line(frames: Iterable[tuple[str, int]]) -> Line | None:
    """The innermost of these (file, line number), outermost first, that is neither torch's nor ours."""
    found = None
    for file, number in frames:
        if is_users(file):
            found = Line(file, number, linecache.getline(file, number).strip())
    return found


@functools.cache
def is_users(file: str) -> bool:
    """Whether a file is neither torch's, nor ours, nor Python's."""
    if file.startswith(("<frozen", "<string>", "<eval_with_key>")):
        return False
    path = Path(file)
    machinery = path.is_relative_to(TORCH) or path.is_relative_to(HERE)
    stdlib = path.is_relative_to(STDLIB) and "site-packages" not in path.parts
    return not (machinery or stdlib)


def line_of(error: BaseException) -> Line | None:
    """The user's line from which an error came."""
    return user_line(_frames(error.__traceback__))


def line_here() -> Line | None:
    """The user's line that is being executed."""
    return user_line((frame.filename, frame.lineno or 0) for frame in traceback.extract_stack())


def calling_line() -> tuple[str, int] | None:
    """(file, number) of the user's line that is being executed: line_here without reading the text."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def trace_until(run: Callable[[], Any], happened: Callable[[], bool]) -> Line | None:
    """Run a function line by line, and the user's line after which `happened()` first holds; None if none."""
    last: list[tuple[str, int]] = []
    found: list[tuple[str, int]] = []

    def on_line(frame: FrameType, event: str, argument: Any) -> Any:
        if not found and is_users(frame.f_code.co_filename):
            if last and happened():
                found.append(last[-1])
            if event == "line":
                last[:] = [(frame.f_code.co_filename, frame.f_lineno)]
        return on_line

    before = sys.gettrace()
    sys.settrace(on_line)
    try:
        run()
    finally:
        sys.settrace(before)
    return user_line(found or last)


def _frames(trace: TracebackType | None) -> Iterable[tuple[str, int]]:
    while trace is not None:
        yield trace.tb_frame.f_code.co_filename, trace.tb_lineno
        trace = trace.tb_next


#: How torch says that something outside of the function is written to.
_WRITES_SAID_BY_TORCH = (
    "a leaf Variable that requires grad is being used in an in-place operation",
    "a view of a leaf Variable that requires grad is being used in an in-place operation",
    "does not support input mutations",
)


def explained(error: Exception) -> CaptureError:
    """What an error of tensors without data means, in the user's terms."""
    name = type(error).__name__
    operator = str(getattr(error, "func", ""))
    line = line_of(error)
    if name == "DataDependentOutputException":
        return CaptureError(
            "control flow",
            f"a value of a tensor is read while the graph is captured ({operator}): the graph would hold "
            "for that value alone",
            "choose with torch.where, or read the value outside of the function",
            line,
        )
    if name == "DynamicOutputShapeException":
        return CaptureError(
            "shape",
            f"the shape of a result depends on the values of a tensor ({operator})",
            "keep the shape and mask with torch.where",
            line,
        )
    text = str(error).strip().split("\n")[0] or operator
    if any(part in text for part in _WRITES_SAID_BY_TORCH):
        return CaptureError(
            "mutation",
            f"an input, parameter or buffer is changed in place ({text})",
            "return the new value and store it outside of the function",
            line,
        )
    return CaptureError(
        "operator",
        f"this cannot be run on tensors without data: {name}: {text}",
        "use an operator that torch knows by its shapes (a FakeTensor kernel)",
        line,
    )
