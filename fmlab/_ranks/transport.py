"""How messages reach the ranks, and how ranks are started and ended: the seam behind `Ranks`.

`Ranks` and `calls.py` know only `Transport`: on this host it is `LocalTransport`, on many that of cluster.py.
Both carry the messages of worker.py as they are, plain tuples of picklable values.
"""

import contextlib
import os
import selectors
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fmlab._ranks.errors import name_ranks
from fmlab._ranks.forking import Server
from fmlab._ranks.interrupt import HeldInterrupt
from fmlab._ranks.process import RankProcess

Message = tuple[Any, ...]


class Transport(Protocol):
    """n ranks that can be started, told, heard, interrupted and ended together."""

    @property
    def pids(self) -> list[int]:
        """Process ids by rank, each on its own host; empty before the start and after the end."""

    @property
    def hosts(self) -> Sequence[str]:
        """The host of each rank, to be named in errors; empty where all are on this one."""

    @property
    def alive(self) -> bool:
        """Whether every rank that was started is still there."""

    def start(self, settings: "Settings") -> None:
        """Start all ranks, joined in a process group. TimeoutError or RuntimeError names what is missing."""

    def send(self, rank: int, message: Message) -> None:
        """Send to one rank; a rank that is gone is reported by `receive`."""

    def send_all(self, message: Message) -> None:
        """Send the same to every rank."""

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
    """What each rank is told at the start. Times in seconds; None is no limit.

    start_timeout: until all ranks have joined the process group. host_timeout: of these, how long to wait for
        hosts that are not there yet.
    """

    world_size: int
    threads: int
    seed: int
    timeout: float | None
    start_timeout: float
    host_timeout: float
    env: Mapping[str, str] = field(default_factory=dict)


class LocalTransport:
    """Ranks on this host: a socket pair to each, and the server that forks them."""

    hosts: Sequence[str] = ()

    def __init__(self) -> None:
        self._ranks: list[RankProcess] = []
        self._starts = 0
        self._owner = os.getpid()
        self._folder = tempfile.mkdtemp(prefix="fmlab-ranks-")
        self._selector = selectors.DefaultSelector()
        self._server: Server | None = None

    @property
    def pids(self) -> list[int]:
        return [rank.pid for rank in self._ranks]

    @property
    def alive(self) -> bool:
        return bool(self._ranks) and all(rank.alive for rank in self._ranks)

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
                wait_ready(self, settings, deadline, interrupt)
        except BaseException:
            self.stop()
            raise

    def _spec(self, settings: Settings) -> dict[str, Any]:
        with socket.socket() as probe:  # for code that reads MASTER_PORT; the group itself uses a file
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        own = {
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
            "env": environment(settings.threads, "lo0" if sys.platform == "darwin" else "lo", own),
            "path": list(sys.path),
            "cwd": os.getcwd(),
            "parent": os.getpid(),
        }

    def _fork(self, rank: int, spec: dict[str, Any], deadline: float) -> None:
        assert self._server is not None
        mine = {
            **spec,
            "rank": rank,
            "log": os.path.join(self._folder, f"output-{self._starts}-{rank}"),
            "env": {**spec["env"], "RANK": str(rank), "LOCAL_RANK": str(rank)},
        }
        self._ranks.append(RankProcess(self._server, mine, deadline))
        self._selector.register(self._ranks[-1].connection, selectors.EVENT_READ, rank)

    def send(self, rank: int, message: Message) -> None:
        if not self._ranks[rank].gone:
            with contextlib.suppress(OSError):
                self._ranks[rank].connection.send(message)

    def send_all(self, message: Message) -> None:
        for rank in range(len(self._ranks)):
            self.send(rank, message)

    def receive(self, timeout: float) -> list[tuple[int, Message]]:
        got: list[tuple[int, Message]] = []
        for key, _ in self._selector.select(max(timeout, 0)):
            rank = key.data
            connection = self._ranks[rank].connection
            try:
                got.append((rank, connection.recv()))
            except (EOFError, OSError):
                self._selector.unregister(connection)
                got.append((rank, ("died", *self._ranks[rank].death())))
        return got

    def interrupt(self, rank: int) -> None:
        self._ranks[rank].interrupt()

    def stacks(self, rank: int) -> str:
        return self._ranks[rank].stacks()

    def stop(self) -> None:
        if self._owner != os.getpid():
            return  # a fork of the process that owns the ranks
        with HeldInterrupt():
            for rank in self._ranks:
                rank.end()
            for rank in self._ranks:
                if not rank.gone:
                    self._selector.unregister(rank.connection)
                rank.reap()
            self._ranks = []
            shutil.rmtree(self._folder, ignore_errors=True)


def environment(threads: int, interface: str, own: Mapping[str, str]) -> dict[str, str]:
    """The variables of a rank: those of this process, but for its settings of threads, and its own."""
    return {
        "GLOO_SOCKET_IFNAME": interface,
        "MPLBACKEND": "agg",
        "OMP_NUM_THREADS": str(threads),
        **{k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "MPLBACKEND")},
        **own,
    }


def wait_ready(transport: Transport, settings: Settings, deadline: float, interrupt: HeldInterrupt) -> None:
    """Wait until every rank has joined the process group; TimeoutError or RuntimeError names who has not."""
    n, hosts = settings.world_size, transport.hosts
    missing = set(range(n))
    while missing and not interrupt.pending:
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"{name_ranks(sorted(missing), hosts=hosts)} of {n} did not join the process group within "
                f"{settings.start_timeout:g} s"
            )
        for rank, message in transport.receive(0.2):
            if message[0] == "ready":
                missing.discard(rank)
            elif message[0] in ("failed", "died"):
                detail = "; ".join(str(part) for part in message[1:] if part)
                who = name_ranks([rank], hosts=hosts)
                raise RuntimeError(f"{who} of {n} could not start: {detail}")
