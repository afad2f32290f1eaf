"""The parent's end of server.py: starts it, asks it for ranks, hears how they ended."""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from fmlab._ranks.server import recv_frame, send_frame


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

    def wait_ready(self, limit: float) -> None:
        """Wait until it has imported what ranks need. TimeoutError or RuntimeError when it does not."""
        with self.lock:
            self._until(lambda: self.ready, time.monotonic() + limit)

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
