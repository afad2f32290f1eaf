"""Sends names of the notebook to the ranks, when a cell needs them and they changed.

The rule a learner needs: whoever assigned a name last owns it. A name that a cell assigned on the ranks stays
there until the notebook assigns it anew; a name of the notebook is sent when a cell, or a function the cell
uses, first needs it, and kept up to date from then on.
"""

import ast
import hashlib
import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from fmlab._ranks import pickling
from fmlab._ranks.names import globals_of, needed

LIMIT = 64 << 20  # bytes of one name; more belongs on the ranks from the start
RESERVED = frozenset({"rank", "world_size", "torch", "dist", "display"})  # always the ranks' own


def _rank_namespace() -> dict[str, Any]:
    from fmlab._ranks.worker import NAMESPACE

    return NAMESPACE


class _Namespace:
    """Stands for the notebook's globals; on a rank it becomes the rank's."""

    def __reduce__(self) -> Any:
        return (_rank_namespace, ())


class _TooLarge(Exception):
    pass


class _Buffer(io.BytesIO):
    def write(self, data: Any) -> int:
        if self.tell() + len(data) > LIMIT:
            raise _TooLarge
        return super().write(data)


class _Pickler(pickling.Pickler):
    """Functions of the notebook see the rank's namespace; their globals are noted, not copied."""

    def __init__(self, file: io.BytesIO, ns: dict[str, Any]) -> None:
        super().__init__(file)
        self.ns = ns
        self.read: set[str] = set()
        self.storages: set[int] = set()

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, FunctionType) and obj.__globals__ is self.ns:
            make, args, (state, slots), *rest = super().reducer_override(obj)
            self.read |= globals_of(obj.__code__) & self.ns.keys()
            return (make, (args[0], _Namespace(), *args[2:]), (state, {**slots, "__globals__": {}}), *rest)
        storage = getattr(obj, "untyped_storage", None)
        if storage is not None and not isinstance(obj, type):
            self.storages |= {storage().data_ptr()} - {0}
        return super().reducer_override(obj)


_ABSENT = object()


@dataclass
class _Sent:
    """A value the ranks have a copy of. It is kept, so that its identity can be compared."""

    value: Any
    digest: str
    reads: set[str]
    storages: set[int]


class Sender:
    """Knows what the ranks have of the notebook's names; after a restart of the ranks, make a new one."""

    def __init__(self, ns: dict[str, Any]) -> None:
        self.ns = ns
        self.sent: dict[str, _Sent] = {}
        self.theirs: dict[str, Any] = {}  # assigned on the ranks → the notebook's value then, or _ABSENT
        self._latest: set[str] = set()

    @property
    def names(self) -> list[str]:
        """All names that were sent to the ranks or assigned there."""
        return sorted({*self.sent, *self.theirs})

    def collect(self, tree: ast.Module) -> bytes | None:
        """What to send along with a cell, pickled; None when nothing changed.

        Raises ValueError that names what cannot be sent, and what to do instead.
        """
        used = {name for name in needed(tree) if self._is_notebooks(name)}
        todo = used | {name for name in self.sent if name in self.ns}
        seen: set[str] = set()
        changed: dict[str, _Sent] = {}
        while todo:
            name = todo.pop()
            seen.add(name)
            value = self.ns[name]
            if self.theirs.get(name, _ABSENT) is value:
                continue
            try:
                new = self._changed(name, value)
            except Exception as error:  # pickling runs foreign code: anything may come out of it
                if name not in used:
                    continue  # sent earlier; this cell does not use it itself
                raise ValueError(_unsendable(name, value, error)) from None
            if new is not None:
                changed[name] = new
            reads = (new or self.sent[name]).reads
            todo |= {other for other in reads if self._is_notebooks(other)} - seen
            used |= reads
        self._check_sharing(changed)
        self._latest = set()
        if not changed:
            return None
        data = self._pickle({name: one.value for name, one in changed.items()})[0]
        self.sent |= changed
        self._latest = set(changed)
        for name in changed:
            self.theirs.pop(name, None)
        return data

    def unsend(self) -> None:
        """What was collected last did not arrive."""
        for name in self._latest:
            self.sent.pop(name, None)

    def note_assigned(self, names: Iterable[str]) -> None:
        """Names the ranks assigned are theirs until the notebook assigns its own anew."""
        for name in names:
            self.theirs[name] = self.ns.get(name, _ABSENT)
            self.sent.pop(name, None)

    def _changed(self, name: str, value: Any) -> _Sent | None:
        """What to send for a name, None if the ranks have it.

        Tensors, and what holds tensors, live their own life on each side once sent: only a new assignment
        sends them again. Other values are sent again when their content changed.
        """
        old = self.sent.get(name)
        if old is not None and old.value is value and old.storages:
            return None
        data, pickler = self._pickle(value)
        new = _Sent(value, hashlib.sha256(data).hexdigest(), pickler.read, pickler.storages)
        if old is not None and old.digest == new.digest:
            self.sent[name] = new
            return None
        return new

    def _is_notebooks(self, name: str) -> bool:
        return name in self.ns and name not in RESERVED and not name.startswith("__")

    def _pickle(self, value: Any) -> tuple[bytes, _Pickler]:
        buffer = _Buffer()
        pickler = _Pickler(buffer, self.ns)
        with pickling.by_value(value):
            pickler.dump(value)
        return buffer.getvalue(), pickler

    def _check_sharing(self, changed: Mapping[str, _Sent]) -> None:
        for other, new in changed.items():
            for name, old in self.sent.items():
                if name not in changed and new.storages & old.storages:
                    raise ValueError(
                        f"{other!r} shares tensors with {name!r}, which the ranks already have a copy of; "
                        f"make {other!r} in a %%ranks cell, or run %ranks restart to send both together"
                    )


def _unsendable(name: str, value: Any, error: Exception) -> str:
    kind = type(value).__name__
    if isinstance(error, _TooLarge):
        return f"{name!r} ({kind}) has more than {LIMIT >> 20} MB: make it on the ranks, in a %%ranks cell"
    return f"{name!r} ({kind}) cannot be sent to the ranks ({error}): make it there, in a %%ranks cell"
