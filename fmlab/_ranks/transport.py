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
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, Protocol

import psutil

from fmlab._ranks.server import recv_frame, send_frame

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

    def stop(self) -> None:
        """End all ranks at once; may be called again."""


class HeldInterrupt:
    """Within the context SIGINT is only noted (`pending`), so that it cannot cut a message in two.

    At the end a KeyboardInterrupt is raised if one is pending and nobody has dealt with it. Outside the main
    thread, or where the program has its own handler, nothing is changed.
    """

    def __init__(self) -> None:
        self.pending = False
        self._ours = False

    def __enter__(self) -> "HeldInterrupt":
        mine = threading.current_thread() is threading.main_thread()
        if mine and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note)
            self._ours = True
        return self

    def _note(self, *_: Any) -> None:
        self.pending = True

    def __exit__(self, kind: Any, *_: Any) -> None:
        if self._ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self.pending and kind is None:
            raise KeyboardInterrupt


@dataclass(frozen=True)
class Settings:
    """What each rank is told at the start. Times in seconds; None is no limit."""

    world_size: int
    threads: int
    seed: int
    timeout: float | None
    start_timeout: float
    env: Mapping[str, str] = field(default_factory=dict)


class Server:
    """The process that forks ranks (server.py), shared by the pools of this process."""

    _current: "Server | None" = None

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.owner = os.getpid()
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the server)
        root = str(Path(__file__).parents[2])
        code = f"import sys; sys.path[:] = {sys.path!r} + [{root!r}]; "
        code += f"from fmlab._ranks.server import main; main({theirs.fileno()})"
        env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        if sys.platform == "darwin":  # forking after Objective-C code was loaded; the server itself runs none
            env["OBJC_DISABLE_INITIALIZE_FORK_SAFETY"] = "YES"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self.errors,
            stderr=self.errors,
            start_new_session=True,
            env=env,
        )
        theirs.close()
        self.sock = ours
        self.lock = threading.Lock()
        self.tokens = 0
        self.forked: dict[int, int] = {}
        self.exits: dict[int, int] = {}
        self.ready = False

    @classmethod
    def shared(cls) -> "Server":
        """The running server of this process, started when there is none."""
        server = cls._current
        if server is None or server.owner != os.getpid() or server.process.poll() is not None:
            server = cls._current = cls()
        return server

    def fork(self, spec: dict[str, Any], fd: int, deadline: float) -> int:
        """Fork a rank; returns its pid."""
        with self.lock:
            self.tokens += 1
            token = self.tokens
            self._until(lambda: self.ready, deadline)
            send_frame(self.sock, {**spec, "token": token}, (fd,))
            self._until(lambda: token in self.forked, deadline)
            return self.forked.pop(token)

    def exit_code(self, pid: int, wait: float = 1.0) -> int | None:
        """The exit code of a rank that ended (negative: a signal), None when unknown."""
        with self.lock, contextlib.suppress(TimeoutError, RuntimeError):
            self._until(lambda: pid in self.exits, time.monotonic() + wait)
        return self.exits.pop(pid, None)

    def _until(self, true: Any, deadline: float) -> None:
        while not true():
            self.sock.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                message, _ = recv_frame(self.sock)
            except TimeoutError:
                raise TimeoutError("the process that starts ranks did not answer in time") from None
            except (EOFError, OSError):
                self.errors.seek(0)
                words = self.errors.read().decode(errors="replace").strip()[-2000:]
                raise RuntimeError(f"the process that starts ranks ended; its last words: {words}") from None
            finally:
                self.sock.settimeout(None)
            if message[0] == "server":
                self.ready = True
            elif message[0] == "forked":
                self.forked[message[1]] = message[2]
            else:
                self.exits[message[1]] = message[2]

    def close(self) -> None:
        """End the server and with it every rank it forked."""
        if self.owner == os.getpid():
            self.sock.close()
            self.process.wait()
            self.errors.close()


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

    def _kill(self, rank: int, number: int) -> None:
        if self._connections[rank] is not None:  # still ours: a pid is not reused before the server reaped it
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[rank], number)

    def stop(self) -> None:
        if self._owner != os.getpid():
            return  # a fork of the process that owns the ranks
        with HeldInterrupt():
            self._end_all()

    def _end_all(self) -> None:
        for rank in range(len(self._connections)):
            self._kill(rank, signal.SIGKILL)
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
