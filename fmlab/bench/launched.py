"""torchrun as a child process: started, watched and hurt. What elastic runs are measured and tested with."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

TORCHRUN = "torch.distributed.run"
_NOTICED = re.compile(r"closing signal|failed \(exitcode")


class Launched:
    """One torchrun launcher with its ranks; several of them on this machine stand for several hosts.

    options: of torchrun; command: the module that the ranks run, and its arguments
    log: a file that gets what launcher and ranks print; launcher: the module that is one
    """

    def __init__(
        self, options: Sequence[str], command: Sequence[str], log: Path, launcher: str = TORCHRUN
    ) -> None:
        self.log = log
        self.noticed: list[float] = []  # when the launcher said that a rank had failed, seconds since 1970
        words = [sys.executable, "-u", "-m", launcher, *options, "-m", *command]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        self._process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self.log.open("a") as log:
            for line in self._process.stdout:
                if _NOTICED.search(line):
                    self.noticed.append(time.time())
                log.write(line)
                log.flush()

    def ranks(self) -> list[int]:
        """The process ids of the ranks that live now, in the order of their start."""
        try:
            children = psutil.Process(self._process.pid).children()
        except psutil.NoSuchProcess:
            return []
        return sorted(one.pid for one in children if one.status() != psutil.STATUS_ZOMBIE)

    def kill_rank(self, number: int) -> bool:
        """SIGKILL to one rank; False if it is not there."""
        ranks = self.ranks()
        if number >= len(ranks):
            return False
        try:
            os.kill(ranks[number], signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True

    def kill_host(self) -> None:
        """SIGKILL to the launcher alone, as when a machine is gone: its ranks must not outlive it."""
        self._process.kill()
        self._process.wait()

    def wait(self, seconds: float) -> int | None:
        """The exit code; None if it goes on after so many seconds."""
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        self._reader.join(5)
        return code

    def close(self) -> None:
        """End what is left of it."""
        ranks = self.ranks()
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        for pid in ranks:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self._reader.join(5)

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""


def free_port() -> int:
    """A port of the loopback interface that nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def host_options(port: int, ranks: int = 1, hosts: str = "1:2", job: str = "a-job") -> list[str]:
    """torchrun's options of one of several hosts on loopback, with short waits: a test cannot wait for the
    15 + 30 seconds that torchrun gives a silent host and one that may still come."""
    waits = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=120"
    return [
        *("--nnodes", hosts, "--nproc-per-node", str(ranks), "--max-restarts", "9"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", job),
        *("--rdzv-conf", f"{waits},is_host=0", "--local-addr", "127.0.0.1"),
    ]
