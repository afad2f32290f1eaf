"""Programs that hang, with a flight recorder in each rank. Few imports: ranks that hung are started anew."""

import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp

import torch.distributed as dist

from fmlab import RankError, Ranks
from fmlab.meter.flight import FlightRecorder, read_dumps
from fmlab.meter.flight_verdict import Verdict, verdict

_CALLER = re.compile(r" \(from [^)]*, in recorded\)")  # the line below that calls the program
_CELL = re.compile(r"\S*ipykernel_\d+/\d+\.py:|ipython-input-[\w-]+, line ")  # of a notebook, in a rank
_LINGER = 1.0  # seconds a rank that is done stays: when it returns, the pool ends those that wait for it


def verdict_of(program: Callable[[], object], ranks: Ranks, limit: float = 3.0) -> Verdict:
    """Run a program that hangs on all ranks, a flight recorder in each, and read what they kept."""
    folder = Path(mkdtemp(prefix="fmlab-"))
    ranks.run(_imported)  # the pool ends a mismatch within half a second, which an import would take up
    with suppress(RankError):
        ranks.run(recorded, program, folder, timeout=limit)
    found = verdict(read_dumps(folder))
    return replace(found, headline=_CELL.sub("notebook cell, line ", _CALLER.sub("", found.headline)))


def _imported() -> None:
    """Nothing: who can call it has this module."""


def recorded(program: Callable[[], object], folder: Path) -> None:
    """Run it; a second thread writes what the flight recorder has, twenty times a second."""
    path = folder / f"rank-{dist.get_rank()}.json"
    over = threading.Event()
    with FlightRecorder() as flight:

        def keep() -> None:
            while not over.wait(0.05):
                flight.dump(path)

        writer = threading.Thread(target=keep, daemon=True)
        writer.start()
        program()
        over.set()
        writer.join()
        path.write_text(flight.record("finished").to_json())
        time.sleep(_LINGER)
