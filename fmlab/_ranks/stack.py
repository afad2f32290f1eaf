"""Where a rank is: the user's own lines of a stack, and the communication call a stack ends in."""

import os
import re
import signal
import sys
from types import FrameType, TracebackType
from typing import Any

from fmlab._ranks.errors import Frame, source_line
from fmlab._ranks.pickling import installed_roots

_HERE = os.path.dirname(__file__)
_PACKAGE = os.path.dirname(_HERE)
_MOST = 8  # lines of a stack that are shown
STACKS_SIGNAL = signal.SIGUSR2  # asks a rank for the stacks of its threads, in the file of its raw output
_LINE = re.compile(r'  File "(.*)", line (\d+) in (.*)')


def is_users(file: str) -> bool:
    """Whether a source file is the user's (fmlab's rooms count as such), not a library's or the pool's."""
    if file.startswith(_PACKAGE):
        return not file.startswith(_HERE)
    if file.startswith(("<frozen", "<string>")):
        return False
    return file.startswith("<") or not os.path.realpath(file).startswith(installed_roots())


def of_traceback(tb: TracebackType | None) -> tuple[list[Frame], str]:
    """User lines of a traceback, outermost first, and the communication call it was raised in or ""."""
    stack: list[tuple[FrameType, int]] = []
    while tb is not None:
        stack.append((tb.tb_frame, tb.tb_lineno))
        tb = tb.tb_next
    return _user_frames(stack), _communication(stack)


def of_thread(ident: int) -> tuple[list[Frame], str]:
    """The same for what another thread is doing now."""
    stack: list[tuple[FrameType, int]] = []
    frame = sys._current_frames().get(ident)
    while frame is not None:
        stack.append((frame, frame.f_lineno))
        frame = frame.f_back
    stack.reverse()
    return _user_frames(stack), _communication(stack)


def of_lines(lines: list[tuple[str, int, str]]) -> list[Frame]:
    """User lines of a recorded stack given innermost first."""
    return _ends([_frame(*line) for line in reversed(lines) if is_users(line[0])])


def of_stacks(text: str) -> list[Frame]:
    """User lines of the main thread, from the stacks of all threads as faulthandler writes them.

    The main thread is the oldest, which faulthandler writes last; lines are innermost first.
    """
    last = re.split(r"^(?:Current thread|Thread) ", text, flags=re.MULTILINE)[-1]
    return of_lines([(file, int(line), function) for file, line, function in _LINE.findall(last)])


def _user_frames(stack: list[tuple[FrameType, int]]) -> list[Frame]:
    found = [
        _frame(frame.f_code.co_filename, line, frame.f_code.co_qualname)
        for frame, line in stack
        if is_users(frame.f_code.co_filename)
    ]
    return _ends(found)


def _ends(frames: list[Frame]) -> list[Frame]:
    """The first line of a stack, which is the cell's own, and the last ones."""
    return frames if len(frames) <= _MOST else [frames[0], *frames[1 - _MOST :]]


def _frame(file: str, line: int, function: str) -> Frame:
    return Frame(file, line, function, source_line(file, line))


def _communication(stack: list[tuple[FrameType, int]]) -> str:
    """The outermost `torch.distributed` function of the innermost run of library frames, with its tensor."""
    found: FrameType | None = None
    for frame, _ in reversed(stack):
        if is_users(frame.f_code.co_filename):
            break
        module = frame.f_globals.get("__name__", "")
        if module.startswith("torch.distributed") and frame.f_code.co_name != "wrapper":
            found = frame
    if found is None:
        return ""
    text = found.f_code.co_name
    names = found.f_locals
    for name in ("tensor", "input", "input_tensor"):
        tensor: Any = names.get(name)
        if hasattr(tensor, "shape") and hasattr(tensor, "dtype"):
            text += f" {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
            break
    for name, word in (("dst", "to"), ("src", "from")):
        if isinstance(names.get(name), int):
            text += f" {word} rank {names[name]}"
    return text
