"""How messages reach the ranks, and how ranks are started and ended: the seam behind `Ranks`.

`Ranks` and `calls.py` know only `Transport`. A transport for many hosts implements the same few methods,
with the messages of worker.py as they are (plain tuples of picklable values); nothing else changes.
"""

import contextlib
import os
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe
from typing import Any, Protocol

import psutil

from fmlab._ranks.forking import Server
from fmlab._ranks.interrupt import HeldInterrupt
from fmlab._ranks.stack import STACKS_SIGNAL

_WRITES = 1.0  # seconds a rank has to write its stacks

Message = tuple[Any, ...]


class Transport(Protocol):
    """n ranks that can be started, told, heard, interrupted and ended together."""

    pids: list[int]

    @property
    def alive(self) -> bool:
        """Whether every rank that was started is still there."""

    def start(self, settings: "Settings") -> None:
        """Start all ranks, joined in a process group. TimeoutError or RuntimeError names what is missing."""

    def send(self, rank: int, message: Message) -> None:
        """Send to one rank; a rank that is gone is reported by `receive`."""

    def receive(self, timeout: float) -> list[tuple[int, Message]]:
        """Messages that arrived, waiting at most `timeout` seconds for the first.

        A rank that ended gives, once, ("died", why, last words).
        """

    def interrupt(self, rank: int) -> None:
        """Raise KeyboardInterrupt in the rank's running call."""

    def stacks(self, rank: int) -> str:
        """The stacks of all threads of a rank that answers no message, as faulthandler writes them, or ""."""

    def stop(self) -> None:
        """End all ranks at once; may be called again."""


@dataclass(frozen=True)
class Settings:
    """What each rank is told at the start. Times in seconds; None is no limit."""

    world_size: int
    threads: int
    seed: int
    timeout: float | None
    start_timeout: float
    env: Mapping[str, str] = field(default_factory=dict)


class LocalTransport:
    """Ranks on this host: a socket pair to each, and the server that forks them."""

    def __init__(self) -> None:
        self.pids: list[int] = []
        self._connections: list[Connection | None] = []
        self._starts = 0
        self._owner = os.getpid()
        self._folder = tempfile.mkdtemp(prefix="fmlab-ranks-")
        self._selector = selectors.DefaultSelector()
        self._server: Server | None = None

    @property
    def alive(self) -> bool:
        return bool(self.pids) and all(
            connection is not None and psutil.pid_exists(pid)
            for pid, connection in zip(self.pids, self._connections, strict=True)
        )

    def start(self, settings: Settings) -> None:
        self.stop()
        os.makedirs(self._folder, exist_ok=True)
        self._starts += 1
        deadline = time.monotonic() + settings.start_timeout
        self._server = Server.shared()
        spec = self._spec(settings)
        try:
            with HeldInterrupt() as interrupt:
                for rank in range(settings.world_size):
                    self._fork(rank, spec, deadline)
                self._wait_ready(settings.world_size, deadline, settings.start_timeout, interrupt)
        except BaseException:
            self.stop()
            raise

    def _spec(self, settings: Settings) -> dict[str, Any]:
        with socket.socket() as probe:  # for code that reads MASTER_PORT; the group itself uses a file
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        env = {
            "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
            "MPLBACKEND": "agg",
            "OMP_NUM_THREADS": str(settings.threads),
            **{k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "MPLBACKEND")},
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(settings.world_size),
            "LOCAL_WORLD_SIZE": str(settings.world_size),
            **settings.env,
        }
        return {
            "start": self._starts,
            "store": os.path.join(self._folder, f"store-{self._starts}"),
            "folder": self._folder,
            "world_size": settings.world_size,
            "threads": settings.threads,
            "seed": settings.seed,
            "timeout": settings.timeout,
            "start_timeout": settings.start_timeout,
            "env": env,
            "path": list(sys.path),
            "cwd": os.getcwd(),
            "parent": os.getpid(),
        }

    def _fork(self, rank: int, spec: dict[str, Any], deadline: float) -> None:
        assert self._server is not None
        ours, theirs = Pipe()
        mine = {
            **spec,
            "rank": rank,
            "log": self._log(rank),
            "env": {**spec["env"], "RANK": str(rank), "LOCAL_RANK": str(rank)},
        }
        try:
            self.pids.append(self._server.fork(mine, theirs.fileno(), deadline))
        finally:
            theirs.close()
        self._connections.append(ours)
        self._selector.register(ours, selectors.EVENT_READ, rank)

    def _log(self, rank: int) -> str:
        return os.path.join(self._folder, f"output-{self._starts}-{rank}")

    def _wait_ready(self, n: int, deadline: float, limit: float, interrupt: HeldInterrupt) -> None:
        missing = set(range(n))
        while missing and not interrupt.pending:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"ranks {sorted(missing)} of {n} did not join the process group within {limit:g} s"
                )
            for rank, message in self.receive(0.2):
                if message[0] == "ready":
                    missing.discard(rank)
                elif message[0] in ("failed", "died"):
                    detail = "; ".join(str(part) for part in message[1:] if part)
                    raise RuntimeError(f"rank {rank} of {n} could not start: {detail}")

    def send(self, rank: int, message: Message) -> None:
        connection = self._connections[rank]
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.send(message)

    def receive(self, timeout: float) -> list[tuple[int, Message]]:
        got: list[tuple[int, Message]] = []
        for key, _ in self._selector.select(max(timeout, 0)):
            rank = key.data
            connection = self._connections[rank]
            assert connection is not None
            try:
                got.append((rank, connection.recv()))
            except (EOFError, OSError):
                self._selector.unregister(connection)
                connection.close()
                self._connections[rank] = None
                got.append((rank, ("died", *self._death(rank))))
        return got

    def _death(self, rank: int) -> tuple[str, str]:
        code = self._server.exit_code(self.pids[rank]) if self._server else None
        why = _explain(code)
        words = ""
        with contextlib.suppress(OSError), open(self._log(rank), "rb") as file:
            file.seek(max(0, os.path.getsize(file.name) - 2000))
            words = file.read().decode(errors="replace").strip()
        return why, words

    def interrupt(self, rank: int) -> None:
        self._kill(rank, signal.SIGINT)

    def stacks(self, rank: int) -> str:
        path = self._log(rank)
        with contextlib.suppress(OSError):
            before = os.path.getsize(path)
            self._kill(rank, STACKS_SIGNAL)
            written, until = before, time.monotonic() + _WRITES
            while time.monotonic() < until:
                time.sleep(_WRITES / 10)
                size = os.path.getsize(path)
                if size == written > before:
                    break
                written = size
            with open(path, "rb") as file:
                file.seek(before)
                return file.read().decode(errors="replace")
        return ""

    def _kill(self, rank: int, number: int) -> None:
        if self._connections[rank] is not None:  # still ours: a pid is not reused before the server reaped it
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[rank], number)

    def _end(self, rank: int) -> None:
        """End a rank and what it started: its whole session."""
        if self._connections[rank] is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pids[rank], signal.SIGKILL)
            self._kill(rank, signal.SIGKILL)  # it may not have its session yet

    def stop(self) -> None:
        if self._owner != os.getpid():
            return  # a fork of the process that owns the ranks
        with HeldInterrupt():
            self._end_all()

    def _end_all(self) -> None:
        for rank in range(len(self._connections)):
            self._end(rank)
        for rank, connection in enumerate(self._connections):
            if connection is not None:
                self._selector.unregister(connection)
                connection.close()
            if self._server is not None and connection is not None:
                self._server.exit_code(self.pids[rank])
        self.pids, self._connections = [], []
        shutil.rmtree(self._folder, ignore_errors=True)


def _explain(code: int | None) -> str:
    if code is None:
        return "its process ended"
    if code >= 0:
        return f"its process ended with exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    hint = " (what the system sends when memory runs out)" if name == "SIGKILL" else ""
    return f"its process was ended by {name}{hint}"
