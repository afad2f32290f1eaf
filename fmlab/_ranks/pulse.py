"""Signs of life: what tells a host that disappeared from one that merely has nothing to say."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterable

from fmlab._ranks.channel import Channel

EVERY = 1.0  # seconds between two signs of life
AGENT_SILENT = 10.0  # seconds without one after which the head counts a host as gone
# Seconds after which an agent counts the head as gone, which may be a notebook that computes and lets no
# other thread run. A head whose host is gone, or whose link is down, is noticed sooner, by the system.
HEAD_SILENT = 120.0


class Pulse:
    """A thread that gives signs of life on channels, and says which was silent for too long."""

    def __init__(
        self,
        channels: Callable[[], Iterable[Channel]],
        silence: float,
        lost: Callable[[Channel, str], None],
    ) -> None:
        self._channels, self._silence, self._lost = channels, silence, lost
        self._stop = threading.Event()
        threading.Thread(target=self._beat, daemon=True, name="fmlab-pulse").start()

    def stop(self) -> None:
        self._stop.set()

    def _beat(self) -> None:
        before = time.monotonic()
        while not self._stop.wait(EVERY):
            now = time.monotonic()
            held_up = now - before > 3 * EVERY  # this process did not run: what came meanwhile was not read
            before = now
            for channel in self._channels():
                if held_up:
                    channel.heard = now
                if now - channel.heard > self._silence:
                    self._lost(channel, f"nothing was heard from it for {self._silence:g} s")
                    continue
                with contextlib.suppress(OSError):  # its reader finds out
                    channel.ping()
