"""What a failure costs a run under torchrun, and whether the planner says how much of the time is training.

Both parts run `fmlab train` itself, with two ranks, and send SIGKILL to one of them. First at chosen steps:
from the kill to the launcher that notices, to ranks that have met again, to a checkpoint that is loaded, to
the step that was the last before. Then at random moments (a Poisson process, seeded): the time of a step, of
a save and of a restart, measured before, go into fmlab.planner.goodput with the rate; and the steps that the
run gets done in its time are compared with that.
"""

import random
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fmlab.bench import Result
from fmlab.bench.launched import Launched
from fmlab.planner.goodput import goodput_at, optimal_interval
from fmlab.train.elastic import Start, last_step, starts

RANKS = 2
SETTINGS = ["--batch-size", "4", "--seq-len", "32", "--eval-every", "0", "--log-every", "0"]
_LOOK = 0.004  # seconds between looks at the run's last step
_EVERY, _AFTER = 10, 6  # a checkpoint every so many steps; kills that many steps behind one
_STEPS = 1_000_000  # more than are ever made
_LIMIT = 120.0  # seconds that a start may take


class Run:
    """`fmlab train` under torchrun, and every step that it was seen to finish, as (step, time)."""

    def __init__(self, folder: Path, save_every: int) -> None:
        self.out, self.seen = folder / "run", list[tuple[int, float]]()
        command = ["fmlab.train", "gpt2-tiny", "--out", str(self.out), "--steps", str(_STEPS), *SETTINGS]
        options = ["--standalone", "--nproc-per-node", str(RANKS), "--max-restarts", "1000"]
        self.save_every, self._over = save_every, threading.Event()
        self.launched = Launched(options, [*command, "--save-every", str(save_every)], folder / "log")
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def _watch(self) -> None:
        while not self._over.wait(_LOOK):
            found = last_step(self.out)
            if found is not None and self.seen[-1:] != [found]:
                self.seen.append(found)

    def until(self, step: int, kills: int = 0, after: float = 0.0) -> float:
        """Wait until it has done the step, in its start after so many kills and later than `after`; the time
        of that step. Raises OSError if it ends before or takes too long."""
        deadline = time.monotonic() + _LIMIT
        while True:
            if len(starts(self.out)) > kills:
                found = [at for done, at in self.seen if at > after and done >= step]
                if found:
                    return found[0]
            if time.monotonic() > deadline or self.launched.wait(0) is not None:
                raise OSError(f"the run under torchrun came to no step {step}: {self.launched.said[-2000:]}")
            time.sleep(5 * _LOOK)

    def close(self) -> None:
        self._over.set()
        self._watcher.join()
        self.launched.close()


@dataclass(frozen=True)
class Failure:
    """Seconds of one recovery: until the launcher noticed, ranks had met again, the checkpoint was loaded,
    and what had been done was done again."""

    noticed: float
    restarted: float
    loaded: float
    again: float

    @property
    def restart(self) -> float:
        """Until training goes on."""
        return self.noticed + self.restarted + self.loaded


def failures(run: Run, number: int) -> list[Failure]:
    """Kill one rank after another, each some steps behind a checkpoint, and take the recoveries apart."""
    found = []
    for kill in range(number):
        target = (kill + 1) * 2 * _EVERY + _AFTER
        run.until(target, kill)
        killed = time.time()
        run.launched.kill_rank(kill % RANKS)
        run.until(1, kill + 1)
        start: Start = starts(run.out)[kill + 1]
        recovery = start.recovery
        if recovery is None:
            raise OSError(f"the run says nothing of its recovery: {run.launched.said[-2000:]}")
        noticed = next((at for at in run.launched.noticed if at >= killed), killed)
        ready = start.at + recovery.ready
        again = run.until(recovery.last, kill + 1, ready) - ready
        found.append(Failure(noticed - killed, start.at - noticed, recovery.ready, again))
    return found


def costs(run: Run) -> tuple[float, float]:
    """Median seconds of a step, and of a checkpoint beside it."""
    plain: list[float] = []
    saving: list[float] = []
    for (before, start), (step, end) in zip(run.seen, run.seen[1:], strict=False):
        if step == before + 1:
            (saving if before % run.save_every == 0 else plain).append(end - start)
    seconds = statistics.median(plain)
    return seconds, max(statistics.median(saving) - seconds, 0.01 * seconds)


def run(quick: bool) -> Iterator[Result]:
    """Time to recover, part by part; goodput predicted and measured. About 1.5 minutes, or 6; three times
    that on a busy machine."""
    with tempfile.TemporaryDirectory() as folder:
        one = Run(Path(folder), _EVERY)
        try:
            found = failures(one, 2 if quick else 5)
            step, save = costs(one)
        finally:
            one.close()
    parts = {
        "noticed": "from SIGKILL to torchrun's first line",
        "restarted": "until the ranks have met: old ranks end, Python starts and imports, connections",
        "loaded": "data, model, newest checkpoint, every byte of it verified",
        "again": f"{_AFTER} steps since the checkpoint and more, until the last one is done again",
    }
    for name, what in parts.items():
        yield Result(f"recovery: {name}", _median(found, name), "s", detail=what)
    restart = _median(found, "restart")
    yield Result("recovery: until training goes on", restart, "s", detail=f"of {len(found)} kills; median")
    yield from goodput(step, save, restart, quick)


def goodput(step: float, save: float, restart: float, quick: bool) -> Iterator[Result]:
    """A run under about 6 failures at random moments, or 20, with the best interval between checkpoints for
    their rate; all times in seconds. What the machine does otherwise than before (its steps, its restarts)
    is in the first ratio, and not in the second."""
    mean = (1.5 if quick else 2.0) * restart
    seconds = min(6 * mean, 150.0) if quick else min(20 * mean, 400.0)
    save_every = max(1, round(optimal_interval(save, mean) / step))
    told = goodput_at(save_every * step, save, mean, restart)
    with tempfile.TemporaryDirectory() as folder:
        one = Run(Path(folder), save_every)
        try:
            kills = _under_failures(one, mean, seconds)
            done = one.seen[-1][0]
            found = [start.recovery for start in starts(one.out) if start.recovery is not None]
            step_now, save_now = costs(one)
        finally:
            one.close()
    share = done * step_now / seconds
    detail = f"a failure every {mean:.1f} s, a checkpoint every {save_every} steps of {step:.3g} s"
    yield Result("goodput: predicted", told.share, "of the time", kind="modelled", detail=f"{detail}; {told}")
    again = sum(recovery.again for recovery in found)
    detail = f"{done} steps of {step_now:.3g} s in {seconds:.0f} s, {kills} kills, {again} steps done again"
    yield Result("goodput: measured", share, "of the time", detail=detail)
    yield Result("goodput: measured over predicted", share / told.share, "x")
    if found:
        took = statistics.median(one.seconds - one.stepped for one in found)
        drawn = goodput_at(save_every * step_now, save_now, seconds / kills, took).share
        detail = f"a failure every {seconds / kills:.1f} s, restarts of {took:.1f} s: {drawn:.1%} predicted"
        yield Result("goodput: measured over predicted for what came", share / drawn, "x", detail=detail)


def _under_failures(one: Run, mean: float, seconds: float) -> int:
    """Kill ranks at random moments for so many seconds from the first step on; how many kills."""
    draw, kills = random.Random(0), 0
    due = one.until(1) + draw.expovariate(1 / mean)
    end = one.seen[0][1] + seconds
    while time.time() < end:
        if time.time() >= due and one.launched.kill_rank(draw.randrange(RANKS)):
            kills += 1
            due += draw.expovariate(1 / mean)
        if one.launched.wait(0) is not None:
            raise OSError(f"the run under torchrun ended: {one.launched.said[-2000:]}")
        time.sleep(_LOOK)
    return kills


def _median(found: list[Failure], name: str) -> float:
    return statistics.median(getattr(one, name) for one in found)
