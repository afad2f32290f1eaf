"""Kills under torchrun: the launcher starts the ranks again, the run goes on by itself to the same bits.

`python -m tests.soak.elastic CASE OUT PACE ASYNC` is one rank; PACE: seconds that a step waits, so that kills
find it at work.
"""

import random
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch

from fmlab.bench.launched import Launched
from fmlab.train import Callback, train
from fmlab.train.elastic import last_step
from tests.soak.cases import CASES, STEPS, Case
from tests.soak.kills import Killed, same_end
from tests.train.tiny_run import tiny_corpus, tiny_tokenizer

#: one of every engine, and one whose ranks divide the model
NAMES = ("ZeRO 1", "torch FSDP2", "DeepSpeed ZeRO 2", "pipeline")
_LIMIT = 240.0  # seconds that a job may take from one kill to the next
_PACE = 0.15  # seconds


def kill_under_torchrun(case: Case, folder: Path, number: int, draw: random.Random, beside: bool) -> Killed:
    """Kill ranks of one job, `number` times; then let it end, and compare with a job that nobody kills.

    beside: with checkpoints written beside the steps. Raises AssertionError that says what differs.
    """
    straight = _launch(case, folder, "straight", 0.0, beside)
    try:
        assert straight.wait(_LIMIT) == 0, f"{case.name}: {straight.said}"
    finally:
        straight.close()
    out, done = folder / "killed", Killed(case.name)
    while True:
        launched = _launch(case, folder, "killed", _PACE, beside)
        try:
            while done.kills < number and _at_a_moment(launched, out, draw):
                if launched.kill_rank(draw.randrange(case.ranks)):
                    done.kills += 1
                    done.in_a_save += any((out / "steps").glob(".*.incomplete"))
            assert launched.wait(_LIMIT) == 0, f"{case.name} under torchrun: {launched.said}"
        finally:
            launched.close()
        same_end(case, out, folder / "straight")
        if done.kills >= number:
            return done
        shutil.rmtree(out)  # it ended before the last kill: another job


def _launch(case: Case, folder: Path, name: str, pace: float, beside: bool) -> Launched:
    options = ["--standalone", "--nproc-per-node", str(case.ranks), "--max-restarts", "100"]
    command = ["tests.soak.elastic", case.name, str(folder / name), str(pace), str(int(beside))]
    return Launched(options, command, folder / f"{name}.log")


def _at_a_moment(launched: Launched, out: Path, draw: random.Random) -> bool:
    """Wait until the ranks of a new start are there, and then somewhere into it: often while it trains,
    sometimes while it starts. False when the job has ended."""
    before, ranks, deadline = last_step(out), launched.ranks(), time.monotonic() + _LIMIT
    early = draw.random() < 0.25
    while time.monotonic() < deadline:
        if launched.wait(0) is not None:
            return False
        at_work = last_step(out) not in (None, before)
        if (early and launched.ranks() not in ([], ranks)) or at_work:
            time.sleep(draw.uniform(0, 2 if early else 0.6 * _PACE * STEPS))
            return launched.wait(0) is None
        time.sleep(0.01)
    raise AssertionError(f"no step within {_LIMIT:.0f} s: {launched.said}")


class _Slow(Callback):
    def __init__(self, pace: float) -> None:
        self.pace = pace

    def on_step(self, metrics: Any) -> None:
        time.sleep(self.pace)


def main(name: str, out: str, pace: str, beside: str) -> None:
    """One rank."""
    torch.set_num_threads(1)
    case = next(case for case in CASES if case.name == name)
    train(
        case.config(Path(out), async_save=beside == "1"),
        model=case.model(),
        tokenizer=tiny_tokenizer(),
        corpus=tiny_corpus(),
        callbacks=[_Slow(float(pace))],
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
