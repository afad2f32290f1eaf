"""Sends and receives of this process, which torch's flight recorder leaves out on gloo.

Every send and receive that Python code asks for goes through two methods of `ProcessGroup`; as long as
someone listens, they note the message down first. A message has ended when someone has waited for it.
"""

import sys
import time
import weakref
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from fmlab.stacks import of_lines

_METHODS = {"send": "send", "recv": "recv", "recv_anysource": "recv"}
_DEPTH = 24  # frames that are looked at for the user's lines


@dataclass(eq=False)
class Message:
    """A send or a receive; `number` counts those with the same peer in the same group, from 1.

    peer: its rank in the world, None for a receive from anyone. stack: (file, line, function), innermost
    first. ended: waited for; failed: the wait raised an error.
    """

    op: str
    group: str
    ranks: tuple[int, ...]
    peer: int | None
    number: int
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    issued: float
    stack: tuple[tuple[str, int, str], ...]
    ended: bool = False
    failed: bool = False


class Messages:
    """The last messages of this process, and how many there were of each kind."""

    def __init__(self, most: int) -> None:
        self.last: deque[Message] = deque(maxlen=most)
        self.count: Counter[tuple[str, str, int | None]] = Counter()
        self._waiting: dict[int, tuple[Any, Message]] = {}  # id(work) -> its weak reference, the message

    def note(self, op: str, group: Any, args: tuple[Any, ...]) -> Message:
        """A message is about to be sent or received."""
        ranks = tuple(dist.get_process_group_ranks(group))
        peer = ranks[args[1]] if len(args) > 2 else None
        key = (op, group.group_name, peer)
        self.count[key] += 1
        tensor = args[0][0]
        message = Message(
            op, group.group_name, ranks, peer, self.count[key],
            str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape),
            tensor.numel() * tensor.element_size(), time.time(), _stack(),
        )  # fmt: skip
        self.last.append(message)
        return message

    def follow(self, work: Any, message: Message) -> None:
        """`work` ends the message; one that is dropped without a wait counts as ended."""
        key = id(work)

        def gone(_: Any) -> None:
            message.ended = True
            self._waiting.pop(key, None)

        self._waiting[key] = (weakref.ref(work, gone), message)

    def waited(self, work: Any, failed: bool) -> None:
        found = self._waiting.pop(id(work), None)
        if found is not None and found[0]() is work:
            found[1].ended, found[1].failed = not failed, failed

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Note messages down inside the block, of all threads."""
        if not _listening:
            _install()
        _listening.append(self)
        try:
            yield
        finally:
            _listening.remove(self)
            if not _listening:
                _remove()


_listening: list[Messages] = []
_originals: dict[tuple[Any, str], Any] = {}


def _install() -> None:
    for name, op in _METHODS.items():
        _replace(dist.ProcessGroup, name, _noting(getattr(dist.ProcessGroup, name), op))
    _replace(dist.Work, "wait", _waiting(dist.Work.wait))


def _replace(owner: Any, name: str, new: Any) -> None:
    # As the class holds it: `getattr` makes a method of C++ a function that would not take `self`, put back.
    _originals[owner, name] = vars(owner)[name]
    setattr(owner, name, new)


def _remove() -> None:
    for (owner, name), original in _originals.items():
        setattr(owner, name, original)
    _originals.clear()


def _noting(original: Any, op: str) -> Any:
    def message(group: Any, *args: Any, **kwargs: Any) -> Any:
        noted = [(one, one.note(op, group, args)) for one in _listening]
        work = original(group, *args, **kwargs)
        for one, what in noted:
            one.follow(work, what)
        return work

    return message


def _waiting(original: Any) -> Any:
    def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
        failed = True
        try:
            result = original(work, *args, **kwargs)
            failed = False
            return result
        finally:
            for one in _listening:
                one.waited(work, failed)

    return wait


def _stack() -> tuple[tuple[str, int, str], ...]:
    frame: Any = sys._getframe(3)
    found: list[tuple[str, int, str]] = []
    while frame is not None and len(found) < _DEPTH:
        found.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname))
        frame = frame.f_back
    return tuple(found)


def lines_of(stack: tuple[tuple[str, int, str], ...]) -> tuple[str, ...]:
    """The user's lines of a stack, innermost first, as they are shown."""
    return tuple(str(frame) for frame in reversed(of_lines(list(stack))))
