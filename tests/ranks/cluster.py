"""A head in this process, and agents as processes of their own that join it."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from fmlab import Ranks
from fmlab.ranks import ClusterTransport

REPO = Path(__file__).parents[2]


class Cluster:
    """A head, and agents as processes of their own."""

    def __init__(self, folder: Path, listen: str = "127.0.0.1:0") -> None:
        self.head = ClusterTransport(listen)
        self.folder = folder
        self.agents: dict[str, subprocess.Popen[str]] = {}
        self.ranks: Ranks | None = None

    def join(self, name: str, slots: int, *options: str, wrap: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        """Start an agent; what it says is in the file `said(name)`."""
        assert self.head.token_file is not None
        command = [*wrap, sys.executable, "-m", "fmlab.cli", "ranks", "join", self.head.address]
        command += ["--slots", str(slots), "--name", name, "--token-file", str(self.head.token_file)]
        env = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
        with open(self.folder / f"{name}.txt", "w") as out:
            self.agents[name] = subprocess.Popen(
                [*command, "--wait", "100", *options], stdout=out, stderr=out, text=True, env=env
            )
        return self.agents[name]

    def two_hosts(self, slots: int) -> None:
        for name, address in (("a", "127.0.0.1"), ("b", "127.0.0.2")):
            if name not in self.agents:
                self.join(name, slots, "--address", address)

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.txt").read_text()

    def start(self, n: int, **options: object) -> Ranks:
        for name in self.agents:  # importing torch takes long on a busy machine, which is not what is tested
            assert within(120, lambda name=name: "is ready" in self.said(name)), self.said(name)
        self.ranks = Ranks(n, transport=self.head, **options)  # type: ignore[arg-type]
        return self.ranks

    def get(self) -> Ranks:
        """The ranks, whole."""
        assert self.ranks is not None
        if not self.ranks.alive:
            self.ranks.restart()
        return self.ranks

    def mend(self) -> None:
        """End the ranks, have the hosts a and b again, and no other."""
        if self.ranks is not None:
            self.ranks.close()
        self.head.stop()
        for name in [
            name for name, agent in self.agents.items() if agent.poll() is not None or len(name) > 1
        ]:
            agent = self.agents.pop(name)
            agent.terminate()
            agent.wait(10)
        self.two_hosts(1)

    def close(self) -> None:
        if self.ranks is not None:
            self.ranks.close()
        self.head.stop()
        for agent in self.agents.values():
            agent.terminate()
        for agent in self.agents.values():
            agent.wait(10)


def within(seconds: float, true: Callable[[], bool]) -> bool:
    """Whether something becomes true in time."""
    until = time.monotonic() + seconds
    while not true():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def ended(pid: int) -> bool:
    """Whether a process has ended; where nobody reaps an orphan, it stays a zombie."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
