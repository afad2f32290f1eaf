"""Ends a run whose ranks wait for each other in vain, and says who, in which call, at which line.

A thread on each rank looks whether collectives and messages still end. Where one does not within the limit,
or fails, or the launcher asks the process to end, the rank raises the alarm in the store through which the
ranks found each other. Every rank answers with what its flight recorder holds: so several hosts need no
shared disk, and a rank that is not in any collective answers, too. One of them says what all that means, and
all end with ALARM, so that a launcher can start the job again.

    out/flight/rank-N.json   what each rank's recorder held
    out/flight/verdict.txt   what it means
"""

import faulthandler
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from fmlab.meter import Dump, FlightRecorder, Verdict, keep_recording, verdict
from fmlab.stacks import of_thread, of_traceback
from fmlab.storage import make_folder, write_atomic
from fmlab.train.alarm import Alarm
from fmlab.train.roll import Roll

ALARM = 75  # exit code: EX_TEMPFAIL of sysexits.h, "try again"
ENDED = 128 + signal.SIGTERM
FOLDER = "flight"
_LOOK = 0.25  # seconds between looks; each asks the store
_ANSWER = 5.0  # seconds a rank has to answer an alarm
_FAST = 1.0  # the same where a rank has seen another's end: the launcher is about to end all
_LOST = 10.0  # seconds without progress after which a store that is gone is an alarm


class CommunicationError(RuntimeError):
    """A collective failed on this rank; the verdict over all ranks has been said."""


class Watchdog:
    """Watches the collectives of this process inside its block; all ranks enter it, on their main threads.

    A block that is left by an error of torch.distributed raises the alarm and CommunicationError.
    """

    def __init__(
        self,
        seconds: float,
        store: Any,
        rank: int,
        size: int,
        folder: str | Path | None = None,
        end: Callable[[Verdict], None] | None = None,
        roll: Roll | None = None,
    ) -> None:
        """seconds: within which a collective must end. store: of the process group. folder: for dumps and
        verdict. end: called after the verdict instead of ending the process with ALARM. roll: of
        several hosts."""
        self.seconds, self.rank, self.size = seconds, rank, size
        self.folder = None if folder is None else Path(folder)
        self.end, self.roll = end, roll
        self.flight = FlightRecorder()
        self.alarm = Alarm(store, rank, size)
        self.verdict: Verdict | None = None
        self._once, self._done = threading.Lock(), threading.Event()
        self._closed = threading.Event()
        self._left: tuple[str, BaseException | None] | None = None  # how the block was left
        self._main = threading.get_ident()
        self._wake, self._bell = os.pipe()
        self._held, self._signals = ExitStack(), ExitStack()
        self._thread = threading.Thread(target=self._watch, name="fmlab-watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        self._held.enter_context(self.flight)
        self._thread.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, tb: TracebackType | None) -> None:
        self._left = ("finished", error)
        try:
            if error is not None and _is_communication(error):
                self.sound(f"{type(error).__name__} on rank {self.rank}", error)
                raise CommunicationError(str(self.verdict and self.verdict.headline)) from error
            # Others may come to wait for this rank: what it did last must be there then.
            self.alarm.answer(self.flight.record(*self._left, lines=None).to_json())
        finally:
            self._closed.set()
            os.write(self._bell, b"c")
            self._thread.join(2 * _ANSWER)
            self._signals.close()  # not before: a launcher ends ranks while they still find out why
            self._held.close()
            os.close(self._wake)
            os.close(self._bell)

    # region the thread
    def _watch(self) -> None:
        """Look now and then until the block is left."""
        mark, since = None, time.monotonic()
        while not self._closed.is_set():
            byte = self._pause()
            if self._left is not None:
                return  # the main thread answers
            if byte and byte[0] == signal.SIGTERM:
                return self.stop()
            now = time.monotonic()
            progress, waits = self._position()
            if progress != mark or not waits:
                mark, since = progress, now
            if now - since > self.seconds:
                return self.sound(f"no collective has ended for {self.seconds:g} s")
            if (why := self.alarm.raised()) is not None:
                return self.sound(why)
            if self.alarm.lost and now - since > min(_LOST, self.seconds):
                return self.sound("the store that the first rank keeps is gone, and so is that rank")

    # endregion

    def _position(self) -> tuple[Any, bool]:
        """(a value that changes as long as collectives end, whether this rank is in one).

        Making a group is no collective, and waits for all ranks, too: it is seen by where the main thread is.
        """
        progress, is_open = self.flight.progress()
        lines, where = of_thread(self._main)
        return (progress, [str(line) for line in lines] if where else None), is_open or bool(where)

    def _pause(self) -> bytes:
        ready, _, _ = select.select([self._wake], [], [], max(_LOOK, self.size / 1000))
        return os.read(self._wake, 1) if ready else b""

    def stop(self) -> None:
        """The launcher asks this process to end, as when another rank died: say so if it did, then end.

        The main thread learns of a death in its next collective, for which it has a moment.
        """
        until = time.monotonic() + _FAST
        while time.monotonic() < until and not self._once.locked():
            if self.flight.progress()[1]:
                self.sound("the launcher ends the ranks", code=ENDED)
            time.sleep(_LOOK / 10)
        if self._once.locked():
            self._done.wait(4 * _ANSWER)
        os._exit(ENDED)

    def sound(self, why: str, error: BaseException | None = None, code: int = ALARM) -> None:
        """Raise or answer the alarm, say the verdict if nobody has, and end; the first caller does it."""
        if not self._once.acquire(blocking=False):
            self._done.wait(4 * _ANSWER)
            return
        self.alarm.raise_(why)
        mine = self.flight.record(*(self._left or ("running", error)), lines=None)
        self.alarm.answer(mine.to_json())  # first of all: the others wait for it
        with suppress(OSError):
            self._write(f"rank-{self.rank}.json", mine.to_json())
        dumps = self._answers(mine, _ANSWER if error is None and code == ALARM else _FAST)
        # Where the store is gone, no rank can answer, and only the first is known to be gone.
        self.verdict = verdict(dumps, [0] * (self.rank != 0) if self.alarm.lost else None)
        if code == ENDED and self.verdict.kind != "dead":
            pass  # that a rank is in a collective is nothing to be told when all are asked to end
        elif self.alarm.is_speaker() or self.alarm.lost:
            self._say(why)
        else:
            self.alarm.wait_until_said(_ANSWER)
        running = sum(dump.rank != self.rank and dump.state != "finished" for dump in dumps)
        self.alarm.leave(running, _ANSWER)
        self._done.set()
        if self.end is not None:
            self.end(self.verdict)
        elif error is None:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _answers(self, mine: Dump, seconds: float) -> list[Dump]:
        """The dumps of all ranks that answer in time."""
        texts = self.alarm.answers(max(seconds, 8 * self.size / 1000))
        found = {self.rank: mine}
        for rank, text in texts.items():
            with suppress(ValueError):
                found.setdefault(rank, Dump.from_json(text))
        return [found[rank] for rank in sorted(found)]

    def _say(self, why: str) -> None:
        assert self.verdict is not None
        text = f"{why}\n{self.verdict}\n"
        if self.roll is not None and self.verdict.ranks:
            text += f"{self.roll.of_ranks(self.verdict.ranks)}\n"
        with suppress(OSError):
            self._write("verdict.txt", text)
        lines = "\n".join(f"fmlab: train: {line}" for line in text.splitlines())
        print(lines, file=sys.stderr, flush=True)
        self.alarm.said()

    def _write(self, name: str, text: str) -> None:
        if self.folder is not None:
            make_folder(self.folder)
            write_atomic(self.folder / name, text.encode())

    # region signals
    def heed_signals(self) -> None:
        """Let SIGTERM ring the thread's bell until the block's end: the main thread, which calls this, may be
        deep in a collective, where Python's handlers do not run."""
        os.set_blocking(self._bell, False)
        wakeup = signal.set_wakeup_fd(self._bell, warn_on_full_buffer=False)
        before = signal.signal(signal.SIGTERM, lambda *_: None)
        self._signals.callback(signal.set_wakeup_fd, wakeup)
        self._signals.callback(signal.signal, signal.SIGTERM, before)

    # endregion


def _is_communication(error: BaseException) -> bool:
    """Whether an error came out of torch.distributed, and not out of settings or code of ours."""
    return isinstance(error, RuntimeError) and bool(of_traceback(error.__traceback__)[1])


@contextmanager
def recorded(check: bool = False) -> Iterator[None]:
    """Have the process groups that are made inside the block record their collectives for a flight recorder.

    check: have torch compare every collective between the ranks before it runs; one that does not fit raises
    on all of them. Raises ValueError when there is a process group already.
    """
    level = dist.get_debug_level()
    if check and dist.is_initialized():
        raise ValueError(
            "check_collectives must be set before the ranks meet, and they have; it works where fmlab train "
            "makes the process group, as under torchrun"
        )
    if not dist.is_initialized():
        keep_recording()
    if check:
        dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        yield
    finally:
        dist.set_debug_level(level)


@contextmanager
def watching(
    seconds: float, rank: int, size: int, out: str | None, roll: Roll | None = None
) -> Iterator[Watchdog | None]:
    """Watch the ranks of a group that this process has just made; nothing for one rank, or for 0 seconds."""
    if size == 1 or not seconds:
        yield None
        return
    store = dist.distributed_c10d._get_default_store()
    folder = None if out is None else Path(out) / FOLDER
    if not faulthandler.is_enabled():
        faulthandler.enable()  # gloo ends a process whose tensors do not fit: its line is told
    with Watchdog(seconds, store, rank, size, folder, roll=roll) as dog:
        if threading.current_thread() is threading.main_thread():
            dog.heed_signals()
        yield dog
