"""Which collectives each rank entered, and where two ranks disagree about them.

torch's flight recorder keeps the last collectives of a process in a ring buffer, written in C++ for every
path that reaches gloo: `torch.distributed` functions, functional collectives, DDP's reducer, FSDP, DTensor.
It costs a few microseconds a collective (`fmlab bench ranks`), so it is always on. Ranks are compared per
process group; point-to-point calls are not collectives and may differ.
"""

import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fmlab.entered import Collective, Disagreement, collective_of, differ, members_of_groups

__all__ = ["BUFFER", "Collective", "Disagreement", "Log", "Recorder", "compare", "out_of_step"]

BUFFER = 512  # collectives kept per rank: the window in which operations, shapes and dtypes are compared


@dataclass
class Log:
    """What one rank has entered: per group its members and last number, the newest entries, what is open.

    full: older entries have left the buffer, so that a group without a number here may have had some.
    """

    members: dict[str, tuple[int, ...]] = field(default_factory=dict)
    last: dict[str, int] = field(default_factory=dict)
    entries: list[Collective] = field(default_factory=list)
    open: list[Collective] = field(default_factory=list)
    full: bool = False

    def number(self, group: str) -> int | None:
        """The last number within a group, None where it is no longer known."""
        return self.last.get(group, None if self.full else 0)


class Recorder:
    """Reads the flight recorder of this process."""

    def __init__(self) -> None:
        import torch._C._distributed_c10d as c10d

        self._dump = getattr(c10d, "_dump_fr_trace", None)
        self._status: Any = None
        self._log = Log()
        self._before: dict[str, int] = {}

    def mark(self) -> None:
        """A call begins: entries up to here belong to earlier calls and are not compared again."""
        self._before = dict(self.read().last)
        self._log = replace(self._log, entries=[])

    def read(self) -> Log:
        """The log so far; cheap when nothing happened since the last reading."""
        if self._dump is None:
            return Log()
        status = pickle.loads(self._dump(False, False, False)).get("pg_status")
        if status == self._status and not self._log.open:
            return self._log
        entries = pickle.loads(self._dump(True, False, False)).get("entries", [])
        log = Log(members=members_of_groups(), full=len(entries) >= BUFFER)
        for entry in entries:
            if entry["is_p2p"]:
                continue
            one = collective_of(entry)
            if one.group not in log.members:
                continue  # its group was destroyed
            if one.number > self._before.get(one.group, 0):
                log.entries.append(one)
            log.last[one.group] = max(log.last.get(one.group, 0), one.number)
            if not entry["retired"]:
                log.open.append(one)
        self._status, self._log = status, log
        return log

    def lines(self, group: str, number: int) -> list[tuple[str, int, str]]:
        """The Python stack (file, line, function), innermost first, that entered a collective."""
        if self._dump is None:
            return []
        for entry in pickle.loads(self._dump(True, True, False)).get("entries", []):
            if entry["process_group"][0] == group and entry["collective_seq_id"] == number:
                return [(f["filename"], f["line"], f["name"]) for f in entry["frames"]]
        return []


def compare(logs: Mapping[int, Log], finished: Iterable[int]) -> Disagreement | None:
    """The first disagreement between ranks, or None.

    Operations are compared under equal numbers. A missing entry counts only for ranks in `finished` that
    still have the group, since the others may still enter it, or have done so.
    """
    done = set(finished)
    table: dict[tuple[str, int], dict[int, Collective]] = {}
    for rank, log in logs.items():
        for one in log.entries:
            table.setdefault((one.group, one.number), {})[rank] = one
    order = sorted(table, key=lambda key: (key[1], key[0]))
    for group, number in order:
        entered: dict[int, Collective | None] = dict(table[group, number])
        members = _group_members(logs, group)
        for rank in members:
            # A rank that has finished may have destroyed the group, and with it what it knew of its messages.
            here = rank in done and rank in logs and group in logs[rank].members
            known = logs[rank].number(group) if here else None
            if known is not None and known < number:
                entered[rank] = None
        if len(entered) > 1 and differ(list(entered.values())):
            return Disagreement(group, number, entered)
    return None


def out_of_step(logs: Mapping[int, Log]) -> bool:
    """Whether ranks that are idle again have entered another number, or other kinds, of collectives.

    Their process group cannot be used further then; tensors of another shape or dtype leave it usable.
    """
    for group in {group for log in logs.values() for group in log.members}:
        numbers = {log.number(group) for log in logs.values() if group in log.members}
        if len(numbers - {None}) > 1:
            return True
    kinds: dict[tuple[str, int], set[str]] = {}
    for log in logs.values():
        for one in log.entries:
            kinds.setdefault((one.group, one.number), set()).add(one.op)
    return any(len(ops) > 1 for ops in kinds.values())


def _group_members(logs: Mapping[int, Log], group: str) -> Sequence[int]:
    return next((log.members[group] for log in logs.values() if group in log.members), ())
