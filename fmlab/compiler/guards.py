"""What a graph takes for granted beside its tensors: Python values that the function read at capture.

A graph holds `self.scale`, dropout's p, or a number of a closure as they were then. Each of them is noted,
and compared at every call: a graph for another value would be silently wrong.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fmlab.compiler.errors import CaptureError, Line, trace_until

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_TREE = ("_parameters", "_buffers", "training", "_non_persistent_buffers_set", "_is_full_backward_hook")
_GONE = object()


def same(a: object, b: object) -> bool:
    """Whether a graph made for `a` holds for `b`: 1, 1.0 and True differ, so do 0.0 and -0.0."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, float) and isinstance(b, float):
        equal = a == b and math.copysign(1.0, a) == math.copysign(1.0, b)
        return equal or (math.isnan(a) and math.isnan(b))
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(map(same, a, b))
    try:
        return bool(a == b)
    except (RuntimeError, TypeError, ValueError):
        return False  # such as of arrays: equal or not is no single answer


class Guards:
    """The values that were there when this was made. `changed()` names the first that is another one now.

    Numbers, texts, dtypes and functions in attributes of modules and of `others`, and in what a plain
    function names; which modules, tensors and hooks there are. Not seen: what those functions name in their
    turn, and what an object holds two steps away.
    """

    def __init__(self, module: nn.Module, fn: Callable[..., Any], others: Sequence[object] = ()):
        self._values: list[tuple[Callable[[], Any], Any, str]] = []
        self._lists: list[tuple[list[Any], list[Any], str]] = []
        self._counts: list[tuple[dict[Any, Any], int, str]] = []
        for name, owner in module.named_modules():
            self._module(owner, f"{name or type(owner).__name__}")
        for other in others:
            if not isinstance(other, (*_PLAIN, tuple, list, dict, type)) and not callable(other):
                self._attributes(getattr(other, "__dict__", {}), type(other).__name__)
        self._function(inspect.unwrap(fn))

    def _module(self, owner: nn.Module, name: str) -> None:
        self._attributes(vars(owner), name)
        for child, value in owner._modules.items():
            self._values.append((partial(owner._modules.get, child, _GONE), value, f"{name}.{child}"))
        self._counts.append((owner._modules, len(owner._modules), f"the modules of {name}"))
        for kind in _HOOKS:
            hooks = vars(owner)[kind]
            self._counts.append((hooks, len(hooks), f"the hooks of {name}"))

    def _attributes(self, held: dict[str, Any], name: str) -> None:
        for key, value in held.items():
            if key not in _TREE and key not in _HOOKS:
                self._note(partial(held.get, key, _GONE), value, f"{name}.{key}")

    def _note(self, read: Callable[[], Any], value: Any, name: str) -> None:
        if isinstance(value, tuple | list) and not all(isinstance(one, _PLAIN) for one in value):
            return
        if isinstance(value, list):
            self._lists.append((value, list(value), name))
        if isinstance(value, (*_PLAIN, Tensor, tuple, list)) or callable(value):
            self._values.append((read, value, name))

    def _function(self, fn: Any) -> None:
        owner = getattr(fn, "__self__", None)
        if owner is not None and not isinstance(owner, nn.Module):
            self._attributes(getattr(owner, "__dict__", {}), type(owner).__name__)
        fn = getattr(fn, "__func__", fn)
        if not inspect.isfunction(fn):
            return
        for name in fn.__code__.co_names:
            if name in fn.__globals__:
                self._note(partial(fn.__globals__.get, name, _GONE), fn.__globals__[name], name)
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            self._note(partial(_content, cell), _content(cell), name)

    def changed(self) -> str | None:
        """What is another value now, and what it was; None if nothing is."""
        for read, then, name in self._values:
            now = read()
            if now is not then and not _equal(now, then):
                other = isinstance(now, Tensor) and isinstance(then, Tensor)
                return (
                    f"{name} is {'another tensor than' if other else _short(now) + ' and was'} {_short(then)}"
                )
        for value, copy, name in self._lists:
            if not same(value, copy):
                return f"{name} is {value} and was {copy}"
        for members, count, name in self._counts:
            if len(members) != count:
                return f"{name} are {len(members)} and were {count}"
        return None

    def check(self) -> None:
        """Raise ValueError if a value is another one than at capture."""
        if (what := self.changed()) is not None:
            raise ValueError(f"{what} at capture, where it became part of the graph; compile again for it")

    def kept(self, run: Callable[[], Any]) -> None:
        """Raise CaptureError if a value changed since: the function changes it in every call.

        run: runs the function once more, to find the line.
        """
        if (what := self.changed()) is None:
            return
        line: Line | None = trace_until(run, _News(self).arrived)
        raise CaptureError(
            "state",
            f"the function changes Python values that outlive it ({what}): a graph has no effects",
            "keep count outside of the function, or give the value as an argument",
            line,
        )


class _News:
    """Whether something changed since this was made, told by what `changed()` says."""

    def __init__(self, guards: Guards):
        self.guards, self.before = guards, guards.changed()

    def arrived(self) -> bool:
        return self.guards.changed() != self.before


def _equal(now: object, then: object) -> bool:
    """Tensors, functions and modules must be the very same; plain values equal."""
    return isinstance(then, (*_PLAIN, tuple, list)) and same(now, then)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return _GONE


def _short(value: object) -> str:
    if value is _GONE:
        return "gone"
    if isinstance(value, Tensor):
        return f"the one {list(value.shape)}"
    return repr(value) if isinstance(value, (*_PLAIN, tuple, list)) else type(value).__name__
