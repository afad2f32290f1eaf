"""Where a process is: the user's own lines of a stack, and the communication call a stack ends in."""

import functools
import linecache
import os
import site
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

_PACKAGE = os.path.dirname(__file__)
# What only carries or watches the user's calls: its lines tell nothing of where they come from.
_MACHINERY = (
    os.path.join(_PACKAGE, "_ranks"),
    os.path.join(_PACKAGE, "meter", "flight"),
    os.path.join(_PACKAGE, "train", "watchdog"),
    __file__,
)
_MOST = 8  # lines of a stack that are shown


@dataclass
class Frame:
    """One line of a rank's stack."""

    file: str
    line: int
    function: str
    text: str = ""

    def __str__(self) -> str:
        text = self.text or source_line(self.file, self.line)
        if self.file.startswith("<%%ranks"):
            place = f"%%ranks cell, line {self.line}"
        elif _is_notebooks(self.file):
            place = f"notebook cell, line {self.line}"
        elif self.file.startswith("<"):
            place = f"{self.file.strip('<>')}, line {self.line}"
        else:
            near = os.path.relpath(self.file)
            place = f"{self.file if near.startswith('..') else near}:{self.line}"
        return f"{place}, in {self.function}" + (f": {text}" if text else "")


def source_line(file: str, line: int) -> str:
    """A line of source; "" where the cache of sources cannot say it: a library may leave an entry without
    lines there, and another thread may be making one."""
    try:
        return linecache.getline(file, line).strip()
    except Exception:
        return ""


def _is_notebooks(file: str) -> bool:
    """Whether a file name stands for a cell of the notebook that runs here.

    Cells are not told apart: their numbers depend on the order in which they were run.
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell is not None and shell.compile.format_code_name(file) is not None


@functools.cache
def installed_roots() -> tuple[str, ...]:
    """Folders of the standard library and of this environment's packages."""
    paths = sysconfig.get_paths()
    roots = [paths["stdlib"], paths["platstdlib"], paths["purelib"], paths["platlib"]]
    roots += [*site.getsitepackages(), site.getusersitepackages()]
    return tuple({str(Path(root).resolve()) for root in roots})


def is_users(file: str) -> bool:
    """Whether a source file is the user's (fmlab's rooms count as such), not a library's or the pool's."""
    if file.startswith(_PACKAGE):
        return not file.startswith(_MACHINERY)
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
