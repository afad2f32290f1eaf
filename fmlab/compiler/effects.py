"""Effects outside of tensors: numbers that Python draws, and tensors of the capture that stay behind."""

import gc
import random
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from fmlab.compiler.errors import CaptureError, calling_line, trace_until, user_line


class Draws:
    """The states of random generators that a graph does not hold: Python's, numpy's, and torch's seed."""

    def __init__(self) -> None:
        numpy = sys.modules.get("numpy")
        self.numpy: Any = None if numpy is None else numpy.random
        self.before = self._states()

    def _states(self) -> dict[str, Any]:
        with _disable_current_modes():  # it may be asked in the middle of a run without data
            states = {"Python's random": random.getstate(), "torch's": torch.get_rng_state()}
        return states if self.numpy is None else states | {"numpy's random": self.numpy.get_state()}

    def put_back(self) -> None:
        """Set the generators to what they were."""
        random.setstate(self.before["Python's random"])
        torch.set_rng_state(self.before["torch's"])
        if self.numpy is not None:
            self.numpy.set_state(self.before["numpy's random"])

    def changed(self) -> str | None:
        """Which generator was moved, or None."""
        now = self._states()
        return next((name for name, state in self.before.items() if not _alike(now[name], state)), None)


def _alike(a: Any, b: Any) -> bool:
    """Whether two states are the same: tensors, tuples of Python's numbers, or of numpy's arrays."""
    if isinstance(a, Tensor):
        with _disable_current_modes():
            return torch.equal(a, b)
    return repr(a) == repr(b)


@contextmanager
def draws_kept(run: Callable[[], Any]) -> Iterator[None]:
    """Refuse numbers that Python draws, at capture alone, and a seed that is set; put the states back.

    run: runs the function twice more: to find the line, and because another thread may have drawn.
    """
    first = Draws()
    yield
    if (which := first.changed()) is None:
        return
    for _ in range(2):
        first.put_back()
        again = Draws()
        line = trace_until(run, lambda now=again: now.changed() is not None)  # type: ignore[misc]
        if again.changed() is None:
            return
    first.put_back()
    raise CaptureError(
        "state",
        f"the function moves {which} generator: the graph would hold one draw, or not set the seed again",
        "draw with torch's functions and set seeds outside, or give the number as an argument",
        line,
    )


class Made:
    """The tensors without data that a run made, and where; those that outlive it are kept by somebody."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[weakref.ref[Any], tuple[str, int] | None]] = {}

    def note(self, result: Any) -> None:
        """What an operator gave."""
        place = calling_line()
        for x in pytree.tree_leaves(result):
            if isinstance(x, FakeTensor):
                known = self.known.get(id(x))
                if known is None or known[0]() is not x:
                    self.known[id(x)] = (weakref.ref(x), place)

    def refuse_kept(self, allowed: set[int]) -> None:
        """Raise CaptureError if one is alive, other than those with these ids, with the line that made it."""
        if self._kept(allowed) is None:
            return
        gc.collect()  # circles of Python's objects keep for a while what nobody wants
        if (found := self._kept(allowed)) is None:
            return
        x, place = found
        raise CaptureError(
            "state",
            f"a tensor {list(x.shape)} is kept outside of the function, in a list, a cache or by a hook: a "
            "graph has no effects, and what is kept there now has no data",
            "return it, or make what is kept before the capture; clear that place before it is read again",
            None if place is None else user_line([place]),
        )

    def _kept(self, allowed: set[int]) -> tuple[Tensor, tuple[str, int] | None] | None:
        for reference, place in self.known.values():
            x = reference()
            if x is not None and id(x) not in allowed:
                return x, place
        return None
