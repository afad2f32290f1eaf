"""Functions and classes of a script, a notebook or a test module travel by value; installed ones by name."""

import functools
import inspect
import io
import itertools
import sys
import weakref
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, ClassVar

import cloudpickle
from cloudpickle.cloudpickle import _DYNAMIC_CLASS_TRACKER_BY_ID as _trackers

from fmlab.stacks import installed_roots


def dumps(obj: Any, *related: Any) -> bytes:
    """Pickle `obj`; user code that it or `related` is made of goes by value.

    Raises ValueError that says what cannot be sent and why.
    """
    with by_value(obj, *related):
        try:
            buffer = io.BytesIO()
            Pickler(buffer).dump(obj)
            return buffer.getvalue()
        except Exception as error:  # pickling runs foreign code: anything may come out of it
            raise ValueError(f"cannot send {_name(obj)} to the ranks: {error}") from error


def _reduce_code(code: CodeType) -> Any:
    make, args = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return _make_code, (make, args, code.co_filename)


class Pickler(cloudpickle.Pickler):
    """cloudpickle's, with two differences: code keeps its file name, since error reports quote the source;
    and a class that comes back to the process that defined it is left as it is there.
    """

    dispatch_table: ClassVar[Any] = ChainMap({CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table)

    def reducer_override(self, obj: Any) -> Any:
        """Called by pickle for what is not built in."""
        reduced = super().reducer_override(obj)
        if isinstance(obj, type) and isinstance(reduced, tuple) and len(reduced) == 6:
            make, args, state, _, _, set_state = reduced
            return (_make_class, (make, args), (set_state, state), None, None, _set_class_state)
        return reduced


_received: "weakref.WeakSet[type]" = weakref.WeakSet()  # classes that were made by unpickling


def _make_class(make: Callable[..., type], args: tuple[Any, ...]) -> type:
    known = set(_trackers.values())
    made = make(*args)  # cloudpickle finds the class if this process has it already
    if made not in known:
        _received.add(made)
    return made


def _set_class_state(made: type, state: tuple[Callable[..., Any], Any]) -> None:
    set_state, inner = state
    if made in _received:
        set_state(made, inner)


def _make_code(make: Callable[..., CodeType], args: tuple[Any, ...], file: str) -> CodeType:
    return make(*args).replace(co_filename=file)


def loads(data: bytes) -> Any:
    """The object `dumps` was given."""
    return cloudpickle.loads(data)


@contextmanager
def by_value(*objects: Any) -> Iterator[None]:
    """Within the context, code of the user's modules that `objects` are made of is pickled by value."""
    mine = [m for m in _modules(objects) if m.__name__ != "__main__" and not _registered(m)]
    for module in mine:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in mine:
            cloudpickle.unregister_pickle_by_value(module)


def _registered(module: ModuleType) -> bool:
    return module.__name__ in cloudpickle.list_registry_pickle_by_value()


def _modules(objects: Iterable[Any]) -> dict[ModuleType, None]:
    """The user's modules that the objects' functions and classes are defined in, and those these use."""
    found: dict[ModuleType, None] = {}
    for obj in objects:
        while isinstance(obj, functools.partial):
            obj = obj.func
        if is_dataclass(obj) and not isinstance(obj, type):
            found |= _modules(getattr(obj, field.name) for field in fields(obj))
        if isinstance(obj, (list, tuple, dict)):
            items = obj.values() if isinstance(obj, dict) else obj
            found |= _modules(itertools.islice(items, 100))
        else:
            _add_module(obj, found)
    return found


def _add_module(obj: Any, found: dict[ModuleType, None]) -> None:
    named = obj if inspect.isroutine(obj) or isinstance(obj, type) else type(obj)
    module = sys.modules.get(getattr(named, "__module__", None) or "")
    if module is None or module in found or not _is_users(module):
        return
    found[module] = None
    for name, value in list(vars(module).items()):
        if not name.startswith("__") and (inspect.isroutine(value) or isinstance(value, type)):
            _add_module(value, found)


def _is_users(module: ModuleType) -> bool:
    """Whether a module is neither built in, nor installed, nor part of fmlab."""
    file = getattr(module, "__file__", None)
    if file is None or module.__name__.partition(".")[0] == "fmlab":
        return False
    path = Path(file).resolve()
    if not {"site-packages", "dist-packages"}.isdisjoint(path.parts):
        return False  # of any environment: a .pth file may add one's packages to another
    return not str(path).startswith(installed_roots())


def _name(obj: Any) -> str:
    if isinstance(obj, tuple) and obj:
        obj = obj[0]
    return getattr(obj, "__qualname__", None) or f"an object of type {type(obj).__name__}"
