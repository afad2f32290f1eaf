"""What the ranks of all hosts sent, until the head asks for it; bounded, whatever they print meanwhile."""

import threading
from collections import Counter, deque

from fmlab._ranks.transport import Message

LIMIT = 64 << 20  # bytes of outputs that wait; results, of which a call has one per rank, always have room
OUTPUTS = ("text", "rich")


class Inbox:
    """Messages by rank, put by the threads that read the hosts' connections, taken by the one that waits."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._messages: deque[tuple[int, Message, int]] = deque()
        self._waiting = 0  # bytes of outputs
        self._dropped: Counter[int] = Counter()
        self._start = 0
        self._changed = threading.Condition()

    def begin(self, start: int) -> None:
        """Forget everything; from now on take only messages of ranks of this start."""
        with self._changed:
            self._start = start
            self._messages.clear()
            self._dropped.clear()
            self._waiting = 0

    def put(self, start: int, rank: int, message: Message, nbytes: int = 0) -> None:
        """Keep a message. A rank's outputs beyond the limit are dropped, and it is said that they were."""
        with self._changed:
            if start != self._start:
                return
            cost = nbytes if message[0] in OUTPUTS else 0
            if cost and self._waiting + cost > self._limit:
                self._dropped[rank] += 1
                return
            self._waiting += cost
            self._messages.append((rank, message, cost))
            self._changed.notify_all()

    def take(self, timeout: float) -> list[tuple[int, Message]]:
        """All messages that wait, after at most `timeout` seconds for the first."""
        with self._changed:
            self._changed.wait_for(lambda: self._messages, max(timeout, 0))
            got = [(rank, message) for rank, message, _ in self._messages]
            for rank, count in self._dropped.items():
                got.insert(0, (rank, ("text", "stderr", f"… {count} outputs were dropped\n")))
            self._messages.clear()
            self._dropped.clear()
            self._waiting = 0
            return got
