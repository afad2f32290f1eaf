"""One rank as the process that started it sees it: forked by the server of this host, on this host."""

import contextlib
import os
import signal
import time
from multiprocessing.connection import Connection, Pipe
from typing import Any

import psutil

from fmlab._ranks.forking import Server
from fmlab._ranks.stack import STACKS_SIGNAL

_WRITES = 1.0  # seconds a rank has to write its stacks


class RankProcess:
    """A rank, our end of its socket pair, and the file of its raw output.

    spec: what worker.py is told, complete for this rank.
    """

    def __init__(self, server: Server, spec: dict[str, Any], deadline: float) -> None:
        self.rank: int = spec["rank"]
        self.log: str = spec["log"]
        self._server = server
        self.connection: Connection
        self.connection, theirs = Pipe()
        self.gone = False
        try:
            self.pid = server.fork(spec, theirs.fileno(), deadline)
        except BaseException:
            self.connection.close()
            raise
        finally:
            theirs.close()

    @property
    def alive(self) -> bool:
        return not self.gone and psutil.pid_exists(self.pid)

    def death(self) -> tuple[str, str]:
        """After the end of its connection: why it ended, and its last words."""
        self.gone = True
        self.connection.close()
        why = explain(self._server.exit_code(self.pid))
        words = ""
        with contextlib.suppress(OSError), open(self.log, "rb") as file:
            file.seek(max(0, os.path.getsize(file.name) - 2000))
            words = file.read().decode(errors="replace").strip()
        return why, words

    def interrupt(self) -> None:
        self._kill(signal.SIGINT)

    def stacks(self) -> str:
        """The stacks of all threads, as faulthandler writes them, or ""."""
        with contextlib.suppress(OSError):
            before = os.path.getsize(self.log)
            self._kill(STACKS_SIGNAL)
            written, until = before, time.monotonic() + _WRITES
            while time.monotonic() < until:
                time.sleep(_WRITES / 10)
                size = os.path.getsize(self.log)
                if size == written > before:
                    break
                written = size
            with open(self.log, "rb") as file:
                file.seek(before)
                return file.read().decode(errors="replace")
        return ""

    def end(self) -> None:
        """End the rank and what it started: its whole session."""
        if not self.gone:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            self._kill(signal.SIGKILL)  # it may not have its session yet

    def reap(self) -> None:
        """After `end`: wait until it is gone."""
        if not self.gone:
            self.gone = True
            self.connection.close()
            self._server.exit_code(self.pid)

    def _kill(self, number: int) -> None:
        if not self.gone:  # still ours: a pid is not reused before the server reaped it
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def explain(code: int | None) -> str:
    """An exit code in words; a negative one is a signal's."""
    if code is None:
        return "its process ended"
    if code >= 0:
        return f"its process ended with exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    hint = " (what the system sends when memory runs out)" if name == "SIGKILL" else ""
    return f"its process was ended by {name}{hint}"
