"""Collectives that say who is wrong, instead of hanging or adding up what does not belong together.

    with checked(timeout=20):
        train_step()              # dist.all_reduce, DDP's reducer, functional collectives, and ours

Before each collective every rank writes into the store, which the ranks share since their start, what it is
about to do: which call, with which shape, type, operation and root, and where in the user's code. Then it
reads what the others wrote. If they do not agree, or somebody does not come in time, every rank raises
Mismatch, which names the rank and the call. This costs a few messages to the store for each collective: use
it to find a bug, not to train.
"""

import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fmlab.collectives.fingerprint import Call, caller, describe, of_operator
from fmlab.collectives.guard import GUARD
from fmlab.collectives.proof import ranks_of

__all__ = ["Mismatch", "checked"]

ALL_CAME = "all came"
GRACE = 0.5  # seconds to wait for the calls of the others once it is known that one will not come

_entered: Counter[str] = Counter()  # how often each group was checked: the same on all of its ranks


class Mismatch(RuntimeError):
    """Ranks disagree about a collective. `calls`: rank -> what it called, None if it did not come."""

    def __init__(self, message: str, calls: Mapping[int, Call | None]) -> None:
        super().__init__(message)
        self.calls = dict(calls)


@contextmanager
def checked(group: Any = None, timeout: float = 30) -> Iterator[None]:
    """Compare every collective of the block between the ranks before it runs.

    group: check only the collectives of this group (default: of every group). All its ranks enter the block,
        and leave it after the same number of collectives.
    timeout: seconds to wait for the others at each collective.

    Raises Mismatch on every rank; ValueError for a timeout that is not positive, and outside of a group.
    """
    if not timeout > 0:
        raise ValueError(f"timeout must be a positive number of seconds, not {timeout}")
    if not dist.is_initialized():
        raise ValueError("there is no process group to check; call init_process_group first")
    watch = _Checker(group, timeout)
    token = GUARD.set(watch)
    try:
        with _Watch(watch):
            yield
    except Mismatch:
        raise
    except BaseException as error:
        watch.leave(f"left the block by {type(error).__name__}: {error}")
        raise
    else:
        watch.leave("left the block")
        watch.wait_for_all()
    finally:
        GUARD.reset(token)


class _Watch(TorchDispatchMode):
    """Sees collectives where PyTorch hands them to the process group, whoever called them."""

    def __init__(self, checker: "_Checker") -> None:
        super().__init__()
        self.checker = checker

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            found = of_operator(func, args)
            if found is not None:
                self.checker.compare(*found)
        return func(*args, **(kwargs or {}))


class _Checker:
    """What one rank tells the others, and learns from them."""

    def __init__(self, group: Any, timeout: float) -> None:
        world: Any = dist.group.WORLD
        self.group = world if group is None else group
        self.only = None if group is None else group.group_name
        self.timeout = timeout
        self.rank, self.ranks = dist.get_rank(), tuple(dist.get_process_group_ranks(self.group))
        name = self.group.group_name
        _entered[name] += 1
        store = dist.distributed_c10d._get_default_store()
        self.store = dist.PrefixStore(f"fmlab checked/{name}/{_entered[name]}", store)
        self.numbers: Counter[str] = Counter()  # group -> its collectives so far
        self.seen_leaving = 0.0  # when nobody that is waited for had left yet

    def enter(self, collective: str, group: Any, tensor: Tensor | None, **details: Any) -> None:
        """A collective of ours is about to begin (see `guard`)."""
        group = dist.group.WORLD if group is None else group
        ranks = tuple(dist.get_process_group_ranks(group))
        shape, dtype = describe(tensor)
        text = ", ".join(f"{name} {value}" for name, value in details.items())
        self.compare(group.group_name, ranks, Call(f"fmlab {collective}", shape, dtype, text, caller()))

    # region compare
    def compare(self, group: str, ranks: Sequence[int], call: Call) -> None:
        """Tell the others, wait for them, and raise Mismatch unless all agree."""
        if self.only not in (None, group):
            return
        self.numbers[group] += 1
        number = self.numbers[group]
        self._write(f"{group}/{number}/{self.rank}", call)
        self._write(f"last/{self.rank}", call._replace(op=f"{call.op} #{number}"))
        keys = {rank: f"{group}/{number}/{rank}" for rank in ranks}
        what = f"collective #{number} of {_group_text(ranks)}"
        self._wait(keys, what, f"{group}/{number}/verdict")
        calls = {rank: self._read(key) for rank, key in keys.items()}
        if differing := _differences(list(calls.values())):
            self._fail(_disagreement(number, ranks, calls, differing), calls)
        if number > 1:  # everybody has read the one before
            self.store.delete_key(f"{group}/{number - 1}/{self.rank}")

    # endregion

    def leave(self, how: str) -> None:
        """Tell the others that no more collectives come from this rank."""
        total = sum(self.numbers.values())
        self._write(f"left/{self.rank}", Call(f"{how} after {total} collectives", (), "", "", caller()))

    def wait_for_all(self) -> None:
        """Wait until every rank has left the block."""
        keys = {rank: f"left/{rank}" for rank in self.ranks}
        self._wait(keys, "the end of the checked block", "left/verdict")

    # region wait
    def _wait(self, keys: Mapping[int, str], what: str, verdict: str) -> None:
        """Return when all keys are written, or raise Mismatch: on every rank that waits for them the same.

        Some may see the last key arrive while others give up, so the first to decide writes the verdict.
        """
        self.seen_leaving = time.monotonic()
        deadline, pause = self.seen_leaving + self.timeout, 0.0005
        while not self.store.check(list(keys.values())):
            reason = self._why_give_up(keys, what, late=time.monotonic() > deadline)
            if reason:
                break
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        else:
            reason = ALL_CAME
        decided = self.store.compare_set(verdict, "", reason).decode()
        if decided != ALL_CAME:
            self._fail(decided, {rank: self._known(key) for rank, key in keys.items()})

    # endregion

    def _why_give_up(self, keys: Mapping[int, str], what: str, late: bool) -> str:
        """Why some rank will not come any more, or ""."""
        if self.store.check(["failed"]):
            return str(self.store.get("failed").decode())
        missing = [rank for rank, key in keys.items() if not self.store.check([key])]
        left = [rank for rank in missing if self.store.check([f"left/{rank}"])]
        left = [rank for rank in left if not self.store.check([keys[rank]])]  # it may have come in between
        if not left:
            self.seen_leaving = time.monotonic()
        if not left and not (late and missing):
            return ""
        if left and len(left) < len(missing) and not late and time.monotonic() < self.seen_leaving + GRACE:
            return ""  # the others come soon: name their calls too
        absent = left or missing
        lines = [
            f"{_ranks_text(absent)} did not come to {what}" + (f" within {self.timeout:g} s" * (not left))
        ]
        calls = {rank: self._known(key) for rank, key in keys.items()}
        lines += _lines({rank: call for rank, call in calls.items() if call is not None})
        for rank in absent:
            last = self._known(f"left/{rank}" if left else f"last/{rank}")
            lines.append(
                f"  rank {rank}{'' if left else ', last seen in'}: {last or 'no collective of this block'}"
            )
        return "\n".join(lines)

    def _fail(self, message: str, calls: Mapping[int, Call | None]) -> None:
        self.store.set("failed", message)  # so that ranks that wait elsewhere learn it at once
        raise Mismatch(message, calls)

    def _known(self, key: str) -> Call | None:
        return self._read(key) if self.store.check([key]) else None

    def _write(self, key: str, call: Call) -> None:
        self.store.set(key, json.dumps(call))

    def _read(self, key: str) -> Call:
        op, shape, dtype, details, where = json.loads(self.store.get(key))
        return Call(op, tuple(shape), dtype, details, where)


def _differences(calls: Sequence[Call]) -> list[str]:
    """Names of the fields in which calls differ; where they were made does not matter."""
    if len({call.op for call in calls}) > 1:
        return ["call"]
    names = {"shape": "shape", "dtype": "type", "details": "arguments"}
    return [word for name, word in names.items() if len({getattr(call, name) for call in calls}) > 1]


def _disagreement(number: int, ranks: Sequence[int], calls: Mapping[int, Call], differing: list[str]) -> str:
    groups: dict[tuple[Any, ...], list[int]] = {}
    for rank, call in calls.items():
        groups.setdefault(call[:4], []).append(rank)
    fewest = min(groups.values(), key=lambda members: (len(members), -members[0]))
    if len(groups) == len(calls):
        who = "all ranks differ"
    elif len(fewest) * 2 == len(calls):
        who = f"one half ({_ranks_text(fewest)}) and the other differ"
    else:
        who = f"{_ranks_text(fewest)} differ{'s' * (len(fewest) == 1)} from the others"
    head = f"collective #{number} of {_group_text(ranks)}: {who} in the {' and '.join(differing)}"
    return "\n".join([head, *_lines(calls)])


def _lines(calls: Mapping[int, Call]) -> list[str]:
    """One line for the ranks that did the same in the same place."""
    same: dict[Call, list[int]] = {}
    for rank, call in calls.items():
        same.setdefault(call, []).append(rank)
    return [f"  {_ranks_text(ranks)}: {call}" for call, ranks in same.items()]


def _ranks_text(ranks: Sequence[int]) -> str:
    return ranks_of(sum(1 << rank for rank in ranks))


def _group_text(ranks: Sequence[int]) -> str:
    return f"the group of {_ranks_text(ranks)}"
