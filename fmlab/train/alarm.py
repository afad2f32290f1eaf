"""An alarm that reaches all ranks through the store of their process group, and their answers.

The store may be gone, or hang, since it lives with the first rank: each question is asked in a thread of its
own that is given up after a while, and from then on the store counts as lost.
"""

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")
_PATIENCE = 5.0  # seconds the store has to answer
_PAUSE = 0.05


class Alarm:
    """One alarm for the ranks of a store: raised once, answered by each, told by one."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        # A connection of its own: the main thread may hold the group's for long, waiting for a key.
        self._store = dist.PrefixStore("fmlab/flight", store.clone())
        self.rank, self.size = rank, size
        self.lost = False

    def raise_(self, why: str) -> None:
        """Raise it; the first reason stands."""
        self._ask(lambda: self._store.compare_set("why", "", why))

    def raised(self) -> str | None:
        """Why it was raised, if it was."""
        if self._ask(lambda: self._store.check(["why"])):
            why = self._ask(lambda: self._store.get("why"))
            return None if why is None else why.decode()
        return None

    def answer(self, text: str) -> None:
        """Give this rank's answer; a later one replaces it."""
        self._ask(lambda: self._store.set(f"answer/{self.rank}", text))

    def answers(self, seconds: float) -> dict[int, bytes]:
        """The answers of all ranks, by rank, or of those that come within so many seconds."""
        deadline = time.monotonic() + seconds
        found: dict[int, bytes] = {}
        while len(found) < self.size and not self.lost:
            for rank in [rank for rank in range(self.size) if rank not in found]:
                key = f"answer/{rank}"
                if self._ask(lambda key=key: self._store.check([key])):  # type: ignore[misc]
                    text = self._ask(lambda key=key: self._store.get(key))  # type: ignore[misc]
                    if text is not None:
                        found[rank] = text
            if time.monotonic() > deadline:
                break
            time.sleep(_PAUSE)
        return found

    def is_speaker(self) -> bool:
        """Whether this rank is the first to ask, who tells what came out."""
        return self._ask(lambda: self._store.add("speaker", 1)) == 1

    def said(self) -> None:
        """It has been told."""
        self._ask(lambda: self._store.set("said", "1"))

    def wait_until_said(self, seconds: float) -> None:
        """Wait until it has been told: a rank that ends sooner may have the launcher end the teller."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self.lost and not self._ask(self._has_been_said):
            time.sleep(_PAUSE)

    def leave(self, others: int, seconds: float) -> None:
        """This rank is about to end. The first one, with whom the store may go, waits until so many others
        are, too: one that still asks would take the store's end for news of its own."""
        self._ask(lambda: self._store.add("left", 1))
        deadline = time.monotonic() + seconds
        while self.rank == 0 and time.monotonic() < deadline and not self.lost:
            if (self._ask(lambda: self._store.add("left", 0)) or 0) > others:
                break
            time.sleep(_PAUSE)

    def _has_been_said(self) -> bool:
        return bool(self._store.check(["said"]))

    def _ask(self, question: Callable[[], T]) -> T | None:
        """The store's answer; None, and `lost`, when it does not give one."""
        if self.lost:
            return None
        found: list[T] = []

        def ask() -> None:
            try:
                found.append(question())
            except Exception:  # a connection that is gone, in the words of many versions
                return

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(_PATIENCE)
        if not found:
            self.lost = True
            return None
        return found[0]
