"""The flight recorder: the last collectives and messages of a rank, to be read when a run has gone wrong.

    with FlightRecorder() as flight:    # before the process group is made
        dist.init_process_group(...)
        ...
        flight.dump("flight/rank-0.json")
    print(verdict(read_dumps("flight")))     # of all ranks: who is missing, who entered what else, where

Collectives come from torch's own recorder, a ring buffer in C++ that every path to gloo or NCCL fills:
`torch.distributed`, functional collectives, DDP's reducer, FSDP, DTensor, from any thread. On gloo it leaves
out sends and receives, which are noted down here. No operation of a step passes through Python for it.
"""

import json
import math
import os
import pickle
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fmlab.entered import Collective, collective_of, members_of_groups
from fmlab.meter.flight_messages import Messages, lines_of
from fmlab.stacks import of_thread, of_traceback

BUFFER = 512  # collectives and messages kept, unless told otherwise
_VARIABLE = "TORCH_FR_BUFFER_SIZE"  # torch reads it when it records for the first time
_SYMBOLS = "torch._inductor.codecache"  # what torch imports to put names to the frames of a stack
_ITEM = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int16": 2}


@dataclass(frozen=True)
class FlightEntry:
    """One collective or message as this rank issued it.

    number: counts the collectives of its group, or the messages with this peer in it, from 1. bytes: the
    larger of what goes in and what comes out. ranks: of its group, in the world. issued: seconds since 1970.
    ended: whether it is over. lines: of the user's code that issued it, innermost first; peer: of a send or
    receive, in the world.
    """

    group: str
    number: int
    op: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    ranks: tuple[int, ...]
    issued: float
    ended: bool
    lines: tuple[str, ...] = ()
    peer: int | None = None

    @property
    def is_message(self) -> bool:
        """Whether it is a send or a receive, not a collective."""
        return self.op in ("send", "recv")

    @property
    def collective(self) -> Collective:
        """What is compared with the entries of other ranks."""
        return Collective(self.group, self.number, self.op, self.dtype, self.shape)

    def __str__(self) -> str:
        if not self.is_message:
            return str(self.collective)
        peer = "anyone" if self.peer is None else f"rank {self.peer}"
        return f"{self.op} #{self.number} {self.dtype}{list(self.shape)} {_WAY[self.op]} {peer}"


_WAY = {"send": "to", "recv": "from"}


@dataclass
class Dump:
    """What a rank knows of itself: its last entries, and where its main thread is.

    state: "running", "finished" or "raised" (`error` says what). where: the communication call it is in, or
    "". lines: of the user's code it is at, innermost first. last: number of the last collective of each
    group. at: seconds since 1970.
    """

    rank: int
    world_size: int
    entries: list[FlightEntry] = field(default_factory=list)
    last: dict[str, int] = field(default_factory=dict)
    state: str = "running"
    error: str = ""
    where: str = ""
    lines: tuple[str, ...] = ()
    at: float = 0.0
    host: str = ""
    pid: int = 0

    def to_json(self) -> str:
        """As text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "Dump":
        """From what `to_json` gave. Raises ValueError for another text."""
        try:
            fields = json.loads(text)
            entries = [_made(each) for each in fields.pop("entries")]
            return cls(**{**fields, "lines": tuple(fields.get("lines", ())), "entries": entries})
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"this is no dump of a flight recorder: {error}") from error


def _made(fields: Mapping[str, Any]) -> FlightEntry:
    """An entry from JSON, which has lists where we have tuples."""
    return FlightEntry(**{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})  # type: ignore[arg-type]


class FlightRecorder:
    """Keeps the last collectives and messages of this process; a context manager.

    Enter it before the process group is made (in Ranks it may be entered at any time). Only what is issued
    inside the block is in `entries`.
    """

    def __init__(self, entries: int = BUFFER) -> None:
        """Raises ValueError for fewer than 1 entry, or when torch was not told to record in time."""
        if entries < 1:
            raise ValueError(f"entries must be at least 1, got {entries}")
        keep_recording(entries)
        self.messages = Messages(entries)
        self._main = threading.get_ident()
        self._from = 0.0
        self._held = ExitStack()

    def __enter__(self) -> "FlightRecorder":
        self._from = time.time()
        self._held.enter_context(self.messages.watch())
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def entries(self, lines: bool = True) -> list[FlightEntry]:
        """The last collectives and messages, oldest first; without their source lines it is faster."""
        return [entry for entry in self._all(lines) if entry.issued >= self._from]

    def _all(self, lines: bool) -> list[FlightEntry]:
        return sorted(self._entries(lines), key=lambda entry: entry.issued)

    def _entries(self, lines: bool) -> Iterator[FlightEntry]:
        groups = members_of_groups()
        for entry in _recorded(lines):
            if not entry["is_p2p"]:
                yield _entry(entry, groups)
        for m in list(self.messages.last):
            at = lines_of(m.stack)
            yield FlightEntry(
                m.group, m.number, m.op, m.dtype, m.shape, m.bytes, m.ranks, m.issued, m.ended, at, m.peer
            )  # fmt: skip

    def progress(self) -> tuple[Any, bool]:
        """(a value that changes whenever something is issued or ends, whether something has not ended yet).

        A few microseconds, for who looks often.
        """
        status = _status()
        open_ = any(s["last_enqueued_collective"] > s["last_completed_collective"] for s in status.values())
        messages = [m for m in list(self.messages.last) if not (m.ended or m.failed)]
        counts = tuple((name, *s.values()) for name, s in status.items())
        return (counts, self.messages.count.total(), len(messages)), open_ or bool(messages)

    def record(
        self, state: str = "running", error: BaseException | None = None, lines: bool | None = True
    ) -> Dump:
        """What this rank knows of itself now; from any thread.

        error: what its main thread has raised. lines: of all collectives; None for only where that takes no
        import (seconds, at torch's first look into stacks). Where the main thread is is always told.
        """
        every = self._all(_SYMBOLS in sys.modules if lines is None else lines)
        last = {e.group: e.number for e in sorted(every, key=lambda e: e.number) if not e.is_message}
        entries = [entry for entry in every if entry.issued >= self._from]
        if error is None:
            frames, where = of_thread(self._main)
        else:
            state = "raised"
            frames, where = of_traceback(error.__traceback__)
            if where and entries:  # the call that raised it is over for torch, and not for the others
                entries[-1] = FlightEntry(**{**entries[-1].__dict__, "ended": False})
        is_on = dist.is_initialized()
        return Dump(
            dist.get_rank() if is_on else int(os.environ.get("RANK", "0")),
            dist.get_world_size() if is_on else int(os.environ.get("WORLD_SIZE", "1")),
            entries, last, state, "" if error is None else f"{type(error).__name__}: {error}", where,
            tuple(str(frame) for frame in reversed(frames)), time.time(), socket.gethostname(), os.getpid(),
        )  # fmt: skip

    def dump(self, path: str | Path) -> None:
        """Write `record()` as JSON; the file appears as a whole. Raises OSError."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f".{path.name}.{os.getpid()}")
        new.write_text(self.record().to_json())
        new.replace(path)


def read_dumps(folder: str | Path) -> list[Dump]:
    """The dumps in a folder (rank-*.json), by rank. Raises ValueError when there is none, or one is torn."""
    found = []
    for path in Path(folder).glob("rank-*.json"):
        try:
            found.append(Dump.from_json(path.read_bytes()))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
    if not found:
        raise ValueError(f"{folder} holds no dumps of a flight recorder, rank-0.json and so on")
    return sorted(found, key=lambda dump: dump.rank)


def keep_recording(entries: int = BUFFER) -> None:
    """Ask torch to keep the last collectives; before the process group is made.

    Raises ValueError when it is too late.
    """
    if _VARIABLE not in os.environ and dist.is_available() and dist.is_initialized():
        raise ValueError(
            "torch began without its flight recorder: enter FlightRecorder before "
            f"torch.distributed.init_process_group, or set {_VARIABLE}={entries} for the program"
        )
    os.environ.setdefault(_VARIABLE, str(entries))


# region torch's recorder
def _recorded(stacks: bool) -> list[dict[str, Any]]:
    return [e for dump in _dumpers() for e in pickle.loads(dump(True, stacks, False)).get("entries", [])]


def _status() -> dict[str, dict[str, int]]:
    """Group -> its last collective that was issued, begun, completed."""
    found: dict[str, dict[str, int]] = {}
    for dump in _dumpers():
        found |= pickle.loads(dump(False, False, False)).get("pg_status", {})
    return found


def _dumpers() -> Sequence[Any]:
    """gloo's buffer, and NCCL's where there are GPUs."""
    if not dist.is_available():
        return []
    import torch._C._distributed_c10d as c10d

    names = ["_dump_fr_trace"] + ["_dump_nccl_trace"] * torch.cuda.is_available()
    return [getattr(c10d, name) for name in names if hasattr(c10d, name)]


def _entry(entry: Mapping[str, Any], groups: Mapping[str, tuple[int, ...]]) -> FlightEntry:
    one = collective_of(entry)
    sizes = (entry["input_sizes"], entry["output_sizes"])
    payload = max(sum(map(math.prod, side)) for side in sizes) * _ITEM.get(one.dtype, 1)
    stack = tuple((f["filename"], f["line"], f["name"]) for f in entry.get("frames", ()))
    issued = entry["time_created_ns"] / 1e9
    ranks = groups.get(one.group, ())
    return FlightEntry(*one, payload, ranks, issued, bool(entry["retired"]), lines_of(stack))


# endregion
