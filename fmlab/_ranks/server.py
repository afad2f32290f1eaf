"""A process that imports torch once and forks a rank whenever it is asked to.

It has one thread, uses no OpenMP and no accelerator, so forking it is safe whatever the parent has done.
It ends when its parent is gone, whichever way that happened, and takes its ranks with it; it also ends
after a while without ranks. A request is an 8-byte length with the rank's socket attached, then a pickled
`spec`; answers are pickled tuples framed the same way.
"""

import contextlib
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import sys
import time
from typing import Any

# torch._dynamo is imported by the first optimizer step; here it is paid once and its memory is shared.
PRELOAD = ("torch", "torch.distributed", "torch._dynamo", "cloudpickle", "fmlab._ranks.worker")
LINGER_SECONDS = 300.0  # without ranks, before the server ends by itself


def send_frame(sock: socket.socket, message: Any, fds: tuple[int, ...] = ()) -> None:
    """Send one pickled message; `fds` are duplicated into the receiving process."""
    data = pickle.dumps(message)
    socket.send_fds(sock, [len(data).to_bytes(8, "big")], list(fds))
    sock.sendall(data)


def recv_frame(sock: socket.socket) -> tuple[Any, list[int]]:
    """Receive one message and its file descriptors. EOFError when the other end is gone."""
    header, fds, _, _ = socket.recv_fds(sock, 8, 4)
    header += _exactly(sock, 8 - len(header)) if header else b""
    if not header:
        raise EOFError("the other end closed the socket")
    return pickle.loads(_exactly(sock, int.from_bytes(header, "big"))), fds


def _exactly(sock: socket.socket, count: int) -> bytes:
    parts = []
    while count:
        part = sock.recv(count)
        if not part:
            raise EOFError("the other end closed the socket")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def main(fd: int) -> None:
    """Serve fork requests on the socket `fd` until the parent closes it or dies."""
    parent = os.getppid()
    sock = socket.socket(fileno=fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in PRELOAD:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # the objects of the imports are never collected, so their pages stay shared after fork
    wake_read, wake_write = os.pipe()
    for end in (wake_read, wake_write):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: set[int] = set()
    try:
        send_frame(sock, ("server", os.getpid()))
        _serve(sock, wake_read, parent, children)
    except (EOFError, OSError):
        pass  # the parent is gone
    finally:
        for pid in children:
            for kill in (os.killpg, os.kill):  # its session with what it started, or just itself
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    kill(pid, signal.SIGKILL)


def _serve(sock: socket.socket, wake: int, parent: int, children: set[int]) -> None:
    idle_since = time.monotonic()
    watched: list[Any] = [sock, wake]
    while True:
        readable, _, _ = select.select(watched, [], [], 1.0)
        if wake in readable:
            with contextlib.suppress(BlockingIOError):
                os.read(wake, 4096)
        for pid, code in _reap(children):
            send_frame(sock, ("exit", pid, code))
        if sock in readable:
            spec, (rank_fd,) = recv_frame(sock)
            pid = os.fork()
            if pid == 0:
                _become_rank(sock, wake, rank_fd, spec)
            os.close(rank_fd)
            children.add(pid)
            send_frame(sock, ("forked", spec["token"], pid))
        # A process forked by the parent may hold the socket open after the parent's death.
        if os.getppid() != parent:
            return
        if children:
            idle_since = time.monotonic()
        elif time.monotonic() - idle_since > LINGER_SECONDS:
            return


def _reap(children: set[int]) -> list[tuple[int, int]]:
    """The children that ended: (pid, exit code), the code negative when a signal ended it."""
    ended = []
    for pid in list(children):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            children.discard(pid)
            ended.append((pid, os.waitstatus_to_exitcode(status)))
    return ended


def _become_rank(sock: socket.socket, wake: int, rank_fd: int, spec: dict[str, Any]) -> None:
    """In the child: drop what belongs to the server and run the rank; never returns."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        sock.close()
        os.close(wake)
        from fmlab._ranks import worker

        worker.main(rank_fd, spec)
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(code)
