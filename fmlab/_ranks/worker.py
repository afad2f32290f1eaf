"""What runs in each rank: the main thread answers calls; a second thread answers "where are you?".

The second thread also ends the process when the parent is gone. Messages to a rank:
    ("call", id, function payload, time limit) ("cell", id, cell payload, time limit)
    ("where", id) ("lines", id, group, number)
Messages from a rank:
    ("ready", pid) ("failed", text) ("done", id, outcome fields)
    ("text", stream, text) ("rich", bundle) ("assigned", names)
    ("where", id, position fields) ("lines", id, frames)
"""

import ast
import contextlib
import ctypes
import faulthandler
import linecache
import os
import queue
import random
import shutil
import signal
import sys
import threading
import time
import types
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from fmlab._ranks import output, pickling, stack
from fmlab._ranks.log import BUFFER, Recorder

_MAIN = types.ModuleType("__main__")
NAMESPACE: dict[str, Any] = _MAIN.__dict__  # of the cells; it is `__main__` so that pickle finds its classes
_PR_SET_PDEATHSIG = 1
UNKNOWN: dict[str, Any] = {"frames": [], "where": "", "log": None}  # a position


class Worker:
    """One rank."""

    def __init__(self, conn: Connection, spec: dict[str, Any]) -> None:
        self.conn, self.spec = conn, spec
        self.rank: int = spec["rank"]
        self.calls: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self.lock = threading.Lock()
        self.main = threading.get_ident()
        self.running = False  # only then does an interrupt stop the main thread
        self.masked = False  # a message is being sent: interrupt after it
        self.pending_interrupt = False
        self.recorder: Recorder | None = None

    def send(self, message: tuple[Any, ...]) -> None:
        """Send a message whole, even when an interrupt arrives meanwhile."""
        mine = threading.get_ident() == self.main
        if mine:
            self.masked = True
        try:
            with self.lock:
                self.conn.send(message)
        finally:
            if mine:
                self.masked = False
        if mine and self.pending_interrupt:
            self.on_interrupt()

    def on_interrupt(self, *_: Any) -> None:
        """SIGINT: stop the running call; an idle rank ignores it."""
        self.pending_interrupt = self.running and self.masked
        if self.running and not self.masked:
            raise KeyboardInterrupt

    def answer_questions(self) -> None:
        """The second thread's loop."""
        server = os.getppid()
        try:
            while True:
                while not self.conn.poll(2.0):
                    if os.getppid() != server:
                        raise EOFError
                message = self.conn.recv()
                if message[0] in ("call", "cell"):
                    self.calls.put(message)
                elif message[0] == "where":
                    self.send(("where", message[1], self.answer(self.position) or dict(UNKNOWN)))
                elif message[0] == "lines":
                    self.send(("lines", message[1], self.answer(self.lines, *message[2:]) or []))
        except (EOFError, OSError):
            if os.getppid() != server or not self.spec["parent_alive"]():
                shutil.rmtree(self.spec["folder"], ignore_errors=True)
            os.killpg(os.getpid(), signal.SIGKILL)  # this process and what it started

    def answer(self, question: Callable[..., Any], *args: Any) -> Any:
        """The answer, or None: whatever goes wrong in finding it, this thread must live, since calls come
        through it."""
        try:
            return question(*args)
        except Exception:
            return None

    def lines(self, group: str, number: int) -> list[stack.Frame]:
        """The source lines that entered a collective."""
        assert self.recorder is not None
        return stack.of_lines(self.recorder.lines(group, number))

    def position(self) -> dict[str, Any]:
        """What the main thread is doing."""
        frames, call = stack.of_thread(self.main)
        log = self.recorder.read() if self.recorder else None
        return {"frames": frames, "where": call, "log": log}

    def join_group(self) -> None:
        """Join the other ranks in the default process group."""
        import torch.distributed as dist

        spec = self.spec
        limit = timedelta(seconds=spec["start_timeout"])
        store: dist.Store
        if isinstance(spec["store"], str):
            store = dist.FileStore(spec["store"], spec["world_size"])
        else:  # on a cluster: at the head
            host, port = spec["store"]
            store = dist.TCPStore(host, port, is_master=False, timeout=limit, wait_for_workers=False)
        store = dist.PrefixStore(f"start-{spec['start']}", store)
        store.set_timeout(limit)
        dist.init_process_group(
            "gloo", store=store, rank=self.rank, world_size=spec["world_size"], timeout=limit
        )
        dist.barrier()  # connects every pair now, so that a missing rank is found at the start
        set_group_timeout(spec["timeout"])
        self.recorder = Recorder()

    def loop(self) -> None:
        """Answer calls until the parent ends the process."""
        while True:
            kind, number, payload, timeout = self.calls.get()
            fields: dict[str, Any] = {}
            self.pending_interrupt = False
            assert self.recorder is not None
            self.recorder.mark()
            try:
                self.running = True
                set_group_timeout(timeout)
                fields = self.do_cell(payload) if kind == "cell" else do_call(payload)
            except BaseException as error:
                self.running = False
                fields = failure(error)
            finally:
                self.running = False
            sys.stdout.flush()
            sys.stderr.flush()
            self.send_raw_output()
            self.send(("done", number, {**fields, "log": self.recorder.read()}))

    def do_cell(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Run a cell in the namespace; the value of a final expression is shown."""
        NAMESPACE.update(load_names(payload["names"]))
        before = dict(NAMESPACE)
        try:
            value = self.run_source(payload["source"], payload["file"], payload["show"])
        finally:
            assigned = [name for name, value in NAMESPACE.items() if before.get(name, self) is not value]
            self.send(("assigned", assigned))
        return {"kind": "ok", "value": pickling.dumps(value) if payload["keep"] else None}

    def run_source(self, source: str, file: str, show: bool) -> Any:
        """Execute a cell; returns the value of its final expression."""
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        tree = ast.parse(source, file)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, file, "exec"), NAMESPACE)
        value = None
        if last is not None:
            assert isinstance(last, ast.Expr)
            value = eval(compile(ast.Expression(last.value), file, "eval"), NAMESPACE)
            if value is not None and show and not source.rstrip().endswith(";"):
                self.show(value)
        if show:
            for figure in output.open_figures():
                if figure is not value:
                    self.show(figure)
        return value

    def show(self, *values: Any) -> None:
        """Send a rich form of each value to the parent; `display` on the ranks."""
        sys.stdout.flush()
        for value in values:
            self.send(("rich", output.bundle(value)))

    def send_raw_output(self) -> None:
        """Text that bypassed sys.stdout: from C++ code and child processes, kept in a file until now."""
        with open(self.spec["log"], "r+b") as file:
            data = file.read()
            if data:
                file.truncate(0)
        if data:
            self.send(("text", "stderr", data.decode(errors="replace")))


def do_call(payload: bytes) -> dict[str, Any]:
    """Call a function that was sent with its arguments."""
    function, args, kwargs = pickling.loads(payload)
    return {"kind": "ok", "value": pickling.dumps(function(*args, **kwargs))}


def load_names(payload: bytes | None) -> dict[str, Any]:
    """Names a notebook sends along with a cell; its functions see this rank's namespace."""
    return pickling.loads(payload) if payload is not None else {}


def failure(error: BaseException) -> dict[str, Any]:
    """The fields of an outcome for an exception."""
    frames, where = stack.of_traceback(error.__traceback__)
    if isinstance(error, KeyboardInterrupt):
        return {"kind": "interrupted", "error": "KeyboardInterrupt", "frames": frames, "where": where}
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        frames.append(stack.Frame(error.filename, error.lineno, "<module>", (error.text or "").strip()))
    try:
        text = str(error)
    except Exception as broken:  # a rank must not die of it
        text = f"(its message cannot be shown: {type(broken).__name__})"
    return {
        "kind": "raised",
        "error": type(error).__name__ + (f": {text}" if text else ""),
        "frames": frames,
        "where": where,
    }


_limit: float | None = None


def set_group_timeout(seconds: float | None) -> None:
    """Give gloo a limit beyond the call's own: the parent ends the call first and says where ranks were."""
    global _limit
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    if seconds == _limit or not dist.is_initialized():
        return
    limit = timedelta(seconds=seconds + 60) if seconds is not None else timedelta(days=30)
    for pg in list(distributed_c10d._world.pg_map):
        distributed_c10d._set_pg_timeout(limit, pg)
    _limit = seconds


def main(fd: int, spec: dict[str, Any]) -> None:
    """Become a rank: the parent's folder, paths and environment, the group, then the loop."""
    os.set_inheritable(fd, False)
    os.setsid()  # an interrupt from a terminal reaches the parent, which decides
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    log = os.open(spec["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.environ.clear()
    os.environ.update({"TORCH_FR_BUFFER_SIZE": str(BUFFER), **spec["env"]})
    sys.path[:] = spec["path"]
    sys.modules["__main__"] = _MAIN
    with contextlib.suppress(OSError):
        os.chdir(spec["cwd"])
    spec["parent_alive"] = lambda: _alive(spec["parent"])
    worker = Worker(Connection(fd), spec)
    faulthandler.enable(file=2)
    # The answer of a rank whose second thread cannot run either: written by the signal's handler, in C.
    faulthandler.register(stack.STACKS_SIGNAL, file=2, all_threads=True)
    sys.stdout = output.Stream("stdout", 1, worker.send)
    sys.stderr = output.Stream("stderr", 2, worker.send)
    signal.signal(signal.SIGINT, worker.on_interrupt)
    threading.Thread(target=worker.answer_questions, daemon=True).start()
    try:
        prepare(worker, spec)
    except BaseException as error:
        worker.send(("failed", f"{type(error).__name__}: {error}"))
        time.sleep(1)
        return
    os.truncate(spec["log"], 0)
    worker.send(("ready", os.getpid()))
    worker.loop()


def prepare(worker: Worker, spec: dict[str, Any]) -> None:
    """Threads, seeds, names, the process group."""
    import numpy
    import torch
    import torch.distributed as dist

    torch.set_num_threads(spec["threads"])
    seed = spec["seed"] + spec["rank"]
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    worker.join_group()
    NAMESPACE.update(
        rank=spec["rank"], world_size=spec["world_size"], torch=torch, dist=dist, display=worker.show
    )


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
