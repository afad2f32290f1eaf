"""Refusals that name the line of the kernel they come from."""

import linecache
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

_MACHINE = str(Path(__file__).parent)  # files right here are the machine; everything else is a kernel


class KernelError(ValueError):
    """A kernel asks for what the machine cannot do. The message begins with the line that asked."""

    def _render_traceback_(self) -> list[str]:
        """IPython shows this instead of the frames of the machine."""
        return [f"{type(self).__name__}: {self}"]


@dataclass(frozen=True)
class Line:
    """A line of a kernel: its function, file and number."""

    function: str
    file: str
    number: int

    @property
    def text(self) -> str:
        return linecache.getline(self.file, self.number).strip()

    @property
    def assigned(self) -> str:
        """The name on the left of `name = …` on this line, or ""."""
        name, equals, _ = self.text.partition("=")
        return name.strip() if equals and name.strip().isidentifier() else ""

    def __str__(self) -> str:
        text = self.text
        return f"line {self.number} of {self.function}" + (f", `{text}`" if text else "")


def here() -> Line:
    """The line of the kernel that is running now: the innermost frame outside the machine."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_machine(frame.f_code.co_filename):
        frame = frame.f_back
    return Line(frame.f_code.co_name, frame.f_code.co_filename, frame.f_lineno)


def _is_machine(file: str) -> bool:
    return file.startswith(_MACHINE) and "/" not in file[len(_MACHINE) + 1 :].replace("\\", "/")


def refuse(why: str) -> NoReturn:
    """Raise KernelError with the kernel's line in front."""
    raise KernelError(f"{here()}: {why}")
