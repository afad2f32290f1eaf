"""One rank on a host of a cluster: the threads that carry its messages to the head and back."""

import contextlib
import pickle
import queue
import threading

from fmlab._ranks.channel import Channel
from fmlab._ranks.process import RankProcess

UNREAD = 64  # messages that wait for a rank; one that reads none is found by the time limit of its call
_ENDS = 2.0  # seconds until the end of a killed rank's connection is seen


class Seat:
    """A rank's process, and its messages, which pass as they are: they are unpickled by whom they are for."""

    def __init__(self, process: RankProcess, channel: Channel, start: int) -> None:
        self.process = process
        self._channel, self._start = channel, start
        self._queue: queue.Queue[bytes | None] = queue.Queue(UNREAD)
        self._ending = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        threading.Thread(target=self._write, daemon=True).start()

    def put(self, data: bytes) -> None:
        """A message for the rank; one that cannot be kept is dropped rather than let the agent wait."""
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(data)

    def _write(self) -> None:
        with contextlib.suppress(OSError):
            while (data := self._queue.get()) is not None:
                self.process.connection.send_bytes(data)

    def _read(self) -> None:
        while True:
            try:
                data = self.process.connection.recv_bytes()
            except (EOFError, OSError):
                break
            if not self._tell(data):
                return
        if not self._ending:
            self._tell(pickle.dumps(("died", *self.process.death())))

    def _tell(self, data: bytes) -> bool:
        try:
            self._channel.send("from", data, rank=self.process.rank, start=self._start)
        except OSError:  # the head is gone: the agent ends all its ranks
            return False
        return True

    def end(self) -> None:
        self._ending = True
        self.process.end()

    def reap(self) -> None:
        """After `end`: wait until rank and threads are gone."""
        self._reader.join(_ENDS)
        self.process.reap()
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)
