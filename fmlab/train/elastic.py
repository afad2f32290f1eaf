"""A job that goes on by itself: torchrun starts the ranks again, and the run takes up its last checkpoint.

The first rank notes in the run's folder

out/last_step      the last finished step and its time, overwritten by each step; gone after a good end
out/starts.jsonl   a line for each start that made a step: whose job, how many ranks, from which step, and
                   what the recovery took

A start of the same job goes on from the newest whole checkpoint without being told to (--resume); another
job's is refused, as ever. With fewer ranks than before, a layout whose data degree is open gets a smaller one
and more micro-batches, so that the rows of a step, and what a rank holds of them at once, stay the same.
"""

import ctypes
import json
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fmlab.parallel import Layout
from fmlab.parallel.checkpoint import on_first
from fmlab.train import checkpoint
from fmlab.train.config import TrainConfig
from fmlab.train.launch import World

STARTS, LAST_STEP = "starts.jsonl", "last_step"
_MOST_RANKS = 64  # legal numbers of ranks are looked for up to here
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Recovery:
    """What it took to go on after a run was broken off; seconds from the end of its last step.

    step, last: the checkpoint's step, and the last one that had been done: those between are done again
    launched: until a new process was started: the failure is noticed, the old ranks end, launchers agree
    joined: from there until all ranks have met: Python's imports, connections
    ready: from there until the first step could begin: data, model, checkpoint
    stepped: the first step
    """

    step: int
    last: int
    launched: float
    joined: float
    ready: float
    stepped: float

    @property
    def seconds(self) -> float:
        """From the end of the last step to the end of the first new one."""
        return self.launched + self.joined + self.ready + self.stepped

    @property
    def again(self) -> int:
        """Steps that are done again."""
        return self.last - self.step

    def __str__(self) -> str:
        return (
            f"recovered in {self.seconds:.1f} s: {self.again} steps done again, from step {self.step} "
            f"({self.launched:.1f} s until restarted, {self.joined:.1f} s until joined, {self.ready:.1f} s "
            f"until loaded, {self.stepped:.1f} s first step)"
        )


@dataclass(frozen=True)
class Start:
    """A line of starts.jsonl. job: of the launcher, "" without one; at: seconds since 1970."""

    job: str
    ranks: int
    step: int
    at: float
    recovery: Recovery | None = None


# region the job
def job() -> str:
    """What torchrun calls the job that started this process, the same for all its starts; "" without one."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "")
    if name != "none":
        return name
    return f"none, process {os.getppid()} of {_begun(os.getppid()):.0f}"  # it was not told: who started us


def end_with_launcher() -> None:
    """End this process when torchrun is killed: it would train on, and hold the folder of the next start."""
    if job() and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def go_on(config: TrainConfig, world: World) -> TrainConfig:
    """The settings of this start of a job that torchrun may have started before; every rank calls it.

    Raises ValueError for a number of ranks that the layout cannot have, with those it can have.
    """
    if not job():
        return config
    try:
        layout = config.layout_for(world.size)
    except ValueError as error:
        raise ValueError(f"{error}. {_advice(config, world.size)}") from error
    if config.out is None or config.resume:
        return config
    out = config.out
    before = on_first(lambda: _layout_before(out), dist.group.WORLD if world.size > 1 else None)
    if before is None:
        return config
    return replace(config, resume=True, layout=_with_rows_of(before, layout, config.batch_size))


def _layout_before(out: str) -> dict[str, Any] | None:
    """The layout of the newest checkpoint, if the folder is of this job's earlier starts."""
    found = starts(out)
    if not found or found[-1].job != job() or not checkpoint.steps(out):
        return None
    return dict(checkpoint.newest_whole(out).settings.get("layout", {}))


def _with_rows_of(before: dict[str, Any], layout: Layout, batch_size: int) -> Layout:
    """As many more micro-batches as keep a micro-batch's rows at what they were, where ranks were lost."""
    were = batch_size // (before.get("data", 1) * before.get("micro_batches", 1))
    if layout.data >= before.get("data", 1):
        return layout
    for number in range(layout.micro_batches, batch_size + 1, layout.micro_batches):
        rows, rest = divmod(batch_size, layout.data * number)
        if rest == 0 and rows <= were:
            return replace(layout, micro_batches=number)
    return layout


def _advice(config: TrainConfig, size: int) -> str:
    """How a job whose layout does not fit the ranks there are can wait for more."""
    legal = []
    for number in range(1, max(_MOST_RANKS, config.layout.world_size) + 1):
        with suppress(ValueError):
            config.layout_for(number)
            legal.append(number)
    return (
        f"torchrun started {size} ranks, and the layout can have {', '.join(map(str, legal)) or 'none'}; its "
        "--nnodes MIN:MAX waits until MIN hosts are there: choose MIN so that its ranks are one of these, or "
        "leave --data out, so that the data degree follows the number of ranks"
    )


# endregion


def starts(out: str | Path) -> list[Start]:
    """The starts of a run that made a step, oldest first; what is no such line is passed over."""
    found = []
    with suppress(OSError):
        for line in (Path(out) / STARTS).read_text(errors="replace").splitlines():
            with suppress(ValueError, TypeError):
                fields = dict(json.loads(line))
                recovery = fields.pop("recovery", None)
                found.append(Start(**fields, recovery=recovery and Recovery(**recovery)))
    return found


# region the log
class StartLog:
    """Keeps last_step and starts.jsonl of one start, on the first rank. Made when the ranks have met.

    A folder that cannot be written is no error here: a save would have said so.
    """

    def __init__(self, out: str, ranks: int) -> None:
        self.out, self.ranks = Path(out), ranks
        self._joined, self._ready = time.time(), 0.0
        self._before: tuple[int, float] | None = None
        self._first = True
        self._file: int | None = None

    def ready(self, resumed: bool) -> None:
        """The first step can begin."""
        self._ready = time.time()
        self._before = last_step(self.out) if resumed else None
        with suppress(OSError):
            self._file = os.open(self.out / LAST_STEP, os.O_WRONLY | os.O_CREAT, 0o644)

    def step(self, number: int) -> Recovery | None:
        """A step is done; on the first one of a resumed run: what going on took."""
        now, recovery = time.time(), None
        if self._first:
            self._first = False
            recovery = self._recovery(number - 1, now)
            self._append(Start(job(), self.ranks, number - 1, self._joined, recovery))
        if self._file is not None:
            with suppress(OSError):
                os.pwrite(self._file, f"{number:12d} {now:20.6f}\n".encode(), 0)
        return recovery

    def done(self) -> None:
        """The run has come to its end: one that goes on from there later does not recover from anything."""
        self.close()
        with suppress(OSError):
            (self.out / LAST_STEP).unlink(missing_ok=True)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _recovery(self, step: int, now: float) -> Recovery | None:
        if self._before is None or self._before[0] < step:
            return None
        last, ended = self._before
        begun = max(_begun(os.getpid()), ended)
        moments = [ended, begun, self._joined, self._ready, now]
        parts = [max(b - a, 0.0) for a, b in pairwise(moments)]
        return Recovery(step, last, *parts)

    def _append(self, start: Start) -> None:
        with suppress(OSError), (self.out / STARTS).open("a") as stream:
            stream.write(json.dumps(asdict(start)) + "\n")


# endregion


def last_step(out: str | Path) -> tuple[int, float] | None:
    """(step, seconds since 1970) of the last step that a run has finished; None where it is not known."""
    try:
        step, at = (Path(out) / LAST_STEP).read_text().split()
        return int(step), float(at)
    except (OSError, ValueError):
        return None


def _begun(pid: int) -> float:
    """When a process was started, in seconds since 1970; now, where the system does not tell."""
    now = time.time()
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return now - age
    except (OSError, AttributeError, ValueError, IndexError):
        return now
