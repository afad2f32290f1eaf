"""Where our collectives announce themselves, for whoever watches (`checked`)."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from torch import Tensor


class Guard(Protocol):
    """Told of every collective before it begins."""

    def enter(self, collective: str, group: Any, tensor: Tensor | None, **details: Any) -> None: ...


GUARD: ContextVar[Guard | None] = ContextVar("fmlab_collectives_guard", default=None)


@contextmanager
def entering(collective: str, group: Any, tensor: Tensor | None, **details: Any) -> Iterator[None]:
    """Announce a collective; the messages that it is made of are not collectives of their own."""
    guard = GUARD.get()
    if guard is not None:
        guard.enter(collective, group, tensor, **details)
    yield
