"""Where in the user's program an operator was called: file, line, and the module it belongs to."""

import linecache
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

_TORCH = str(Path(torch.__file__).parent)
_OPTIMIZERS = str(Path(torch.__file__).parent / "optim")
_HERE = str(Path(__file__).parent)


def caller() -> str:
    """ "file.py:line" of the innermost frame that is neither torch's nor ours; "torch" if there is none."""
    frame = _users_frame()
    return "torch" if frame is None else f"{_short(frame.f_code.co_filename)}:{frame.f_lineno}"


def calling_line() -> str:
    """The text of the line that `caller` names; "" where there is no source."""
    frame = _users_frame()
    if frame is None:
        return ""
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno, frame.f_globals).strip()


def _users_frame() -> Any:
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not (name.startswith((_TORCH, _HERE, "<frozen")) or "contextlib.py" in name):
            return frame
        frame = frame.f_back
    return None


def in_optimizer() -> bool:
    """Whether the call comes from an optimizer of torch."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(_OPTIMIZERS):
            return True
        frame = frame.f_back
    return False


def _short(name: str) -> str:
    """The path below the working directory, or the last two parts of it; "cell" for that of a notebook."""
    path = Path(name)
    if path.parent.name.startswith("ipykernel") or name.startswith("<ipython"):
        return "cell"
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return "/".join(path.parts[-2:])


class Modules:
    """The names of the modules whose forward runs now, innermost last."""

    def __init__(self, model: nn.Module) -> None:
        self.names = {id(module): name for name, module in model.named_modules() if name}
        self.stack: list[str] = []

    @property
    def current(self) -> str:
        return self.stack[-1] if self.stack else ""

    @contextmanager
    def watched(self) -> Iterator["Modules"]:
        """Follow the modules of this model while the block runs."""

        def enter(module: nn.Module, args: Any) -> None:
            if id(module) in self.names:
                self.stack.append(self.names[id(module)])

        def leave(module: nn.Module, args: Any, result: Any) -> None:
            if id(module) in self.names and self.stack:
                self.stack.pop()

        hooks = [
            register_module_forward_pre_hook(enter),
            register_module_forward_hook(leave, always_call=True),
        ]
        try:
            yield self
        finally:
            for hook in hooks:
                hook.remove()
