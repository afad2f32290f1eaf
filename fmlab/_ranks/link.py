"""One host as the head sees it: who it is, whether it may join, and the connection to its agent."""

import contextlib
import pickle
import platform
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fmlab._ranks.channel import Channel
from fmlab._ranks.transport import Message

STACKS = 5.0  # seconds a host has to send the stacks of a rank


def versions() -> dict[str, str]:
    """What must be the same at both ends, since code and tensors are sent between them."""
    found = {"python": ".".join(platform.python_version_tuple()[:2])}
    for name in ("fmlab", "torch", "cloudpickle"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name).partition("+")[0]  # +cpu and +cu128 are the same code
    return found


def differences(theirs: dict[str, str], ours: dict[str, str]) -> list[str]:
    """Versions that differ, as "torch 2.9.0 there, 2.13.0 at the head"."""
    names = sorted({*theirs, *ours})
    return [
        f"{name} {theirs.get(name, 'absent')} there, {ours.get(name, 'absent')} at the head"
        for name in names
        if theirs.get(name) != ours.get(name)
    ]


@dataclass(eq=False)
class Link:
    """A host that joined. `lost` is called, once, with the reason when its connection has ended."""

    channel: Channel
    host: str
    slots: int
    agent: str  # this agent's own number, the same when it joins anew
    address: str  # of the host, as its own end of the connection
    port: int  # free there
    number: int  # in the order of joining
    ranks: list[int] = field(default_factory=list)
    reason: str = ""  # why it is gone
    _answers: "queue.Queue[tuple[int, str]]" = field(default_factory=queue.Queue)
    _asked: int = 0

    def begin(self, put: Callable[[int, int, Message, int], None], lost: "Callable[[Link], None]") -> None:
        """Read what the host sends, in a thread of its own."""
        work = (put, lost)
        threading.Thread(target=self._read, args=work, daemon=True, name=f"fmlab-{self.host}").start()

    def _read(self, put: Callable[[int, int, Message, int], None], lost: "Callable[[Link], None]") -> None:
        try:
            while True:
                fields, payload = self.channel.receive()
                if fields["kind"] == "from":
                    message = pickle.loads(payload)  # noqa: S301  (of a peer that knows the token)
                    put(fields["start"], fields["rank"], message, len(payload))
                elif fields["kind"] == "stacks":
                    self._answers.put((fields["number"], payload.decode(errors="replace")))
        except EOFError:
            self.reason = self.reason or "its agent closed the connection"
        except Exception as error:  # also of a message that cannot be read: nothing after it makes sense
            words = getattr(error, "strerror", None) or error
            self.reason = self.reason or f"the connection to its agent broke ({words})"
        self.channel.close()
        lost(self)

    def send(self, kind: str, payload: bytes = b"", **fields: Any) -> None:
        """Send to the agent; if it is gone, its reader says so."""
        with contextlib.suppress(OSError):
            self.channel.send(kind, payload, **fields)

    def end(self, reason: str) -> None:
        """Give the host up."""
        self.reason = self.reason or reason
        self.channel.close()

    def stacks(self, rank: int) -> str:
        """The stacks of a rank that answers no message, or ""."""
        self._asked += 1
        self.send("stacks", rank=rank, number=self._asked)
        with contextlib.suppress(queue.Empty):
            while True:
                number, text = self._answers.get(timeout=STACKS)
                if number == self._asked:
                    return text
        return ""


def assign(links: Sequence[Link], n: int) -> list[Link]:
    """Give ranks 0 to n-1 to hosts, neighbours to the same host; returns the hosts that got some.

    Hosts come in the order of their names, with numbers in them taken as numbers; several agents of a host
    stand together.
    """
    first = 0
    used = []
    for link in sorted(links, key=lambda link: (_natural(link.host), link.number)):
        link.ranks = list(range(first, min(first + link.slots, n)))
        first += len(link.ranks)
        if link.ranks:
            used.append(link)
    return used


def _natural(name: str) -> list[tuple[int, str]]:
    """`node10` after `node9`."""
    parts: list[str] = []
    for char in name:
        if parts and parts[-1][-1].isdigit() == char.isdigit():
            parts[-1] += char
        else:
            parts.append(char)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]
