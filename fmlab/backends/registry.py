"""Finding a backend by name, or the best one of this machine.

A backend is a file of this folder, so that a new one needs no change here; or it comes from elsewhere by a
Python entry point. A package of yours offers one with these lines of its pyproject.toml,

    [project.entry-points."fmlab.backends"]
    mychip = "mypackage.backend:MyChip"

where MyChip is a subclass of fmlab.backends.Backend. One that cannot be loaded warns and is left out.
"""

import difflib
import os
import pkgutil
import warnings
from functools import cache
from importlib import import_module, metadata

import fmlab.backends
from fmlab.backends.base import Backend

GROUP = "fmlab.backends"
# "auto" takes the first that is available. Native chips come before GPUs, because a host with such a
# chip was chosen for it; a simulated device is never taken without being asked for.
DETECTION_ORDER = ("neuron", "tpu", "cuda", "xpu", "mps", "xla", "cpu")
# Files of this folder that help backends and are none; so is any with an underscore in its name.
_NOT_BACKENDS = {"base", "environment", "interface", "moving", "preflight", "registry", "stacks"}
# The entry points of this package itself, as pyproject.toml has them. They are repeated here because the
# installed metadata may be older than the source: an editable installation keeps those of its first day.
OWN_ENTRY_POINTS = {"sim": "fmlab.sim.backend:Sim"}


def backend_names() -> list[str]:
    """The names of all backends, of this package and of others, available on this machine or not."""
    return sorted({*_files(), *OWN_ENTRY_POINTS, *_foreign()} - _broken)


def available_backends() -> list[str]:
    """The names of those that this machine can use."""
    return [name for name in backend_names() if (found := _load(name)) is not None and found.is_available()]


def get_backend(name: str = "auto", index: int | None = None) -> Backend:
    """The backend called `name` ("cpu", "cuda", …; "sim:trn2" with a variant), or "auto" for the best.

    index: the number of this process's device on the host; LOCAL_RANK by default.
    Raises ValueError for a name that does not exist or that this machine cannot use.
    """
    if index is None:
        index = int(os.environ.get("LOCAL_RANK", "0"))
    backend, variant = _find(name)
    return backend.create(variant or None, index)


def check_backend(name: str) -> None:
    """Raise ValueError unless `get_backend(name)` would find a backend; none is made."""
    _find(name)


def _find(name: str) -> tuple[type[Backend], str]:
    """The class that a name means, and the variant; see get_backend."""
    if name == "auto":
        name = detect()
    base, _, variant = name.partition(":")
    backend = _load(base) if base in backend_names() else None
    if backend is None:
        names = backend_names()
        close = difflib.get_close_matches(base.lower(), names, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"unknown backend {name!r}; legal: auto, {', '.join(names)}{hint}")
    if not backend.is_available():
        raise ValueError(
            f"this machine has no {base!r} device that torch can use; available: auto, "
            f"{', '.join(available_backends())}. {backend.why_absent()}".strip(". ")
        )
    if variant and variant not in backend.variants():
        legal = ", ".join(f"{base}:{word}" for word in backend.variants()) or base
        close = difflib.get_close_matches(variant.lower(), backend.variants(), n=1)
        hint = f"; did you mean {base}:{close[0]}?" if close else ""
        raise ValueError(f"unknown variant {name!r}; legal: {legal}{hint}")
    return backend, variant


def detect() -> str:
    """The name of the first available backend in the order of detection."""
    present = backend_names()
    found = (_backend_class(name) for name in DETECTION_ORDER if name in present)
    return next(backend.name for backend in found if backend.automatic() and backend.is_available())


def _files() -> list[str]:
    return [
        module.name
        for module in pkgutil.iter_modules(fmlab.backends.__path__)
        if module.name not in _NOT_BACKENDS and "_" not in module.name
    ]


@cache
def _foreign() -> dict[str, metadata.EntryPoint]:
    """Entry points of other packages, by name; nothing of them is imported. Ours keep their names."""
    found = {}
    for point in metadata.entry_points(group=GROUP):
        if OWN_ENTRY_POINTS.get(point.name) == point.value:
            continue
        if point.name in (*_files(), *OWN_ENTRY_POINTS, "auto") or not point.name.isidentifier():
            owner = point.dist.name if point.dist is not None else point.value
            warnings.warn(
                f"the backend {point.name!r} of the package {owner} is left out: its name is taken or is no "
                "plain word; ask its author to give it another",
                stacklevel=3,
            )
        else:
            found[point.name] = point
    return found


_broken: set[str] = set()


def _load(name: str) -> type[Backend] | None:
    """The class of a backend; None, after a warning, for one of another package that cannot be loaded."""
    point = _foreign().get(name)
    if point is None:
        return _backend_class(name)
    try:
        found = point.load()
        if not (isinstance(found, type) and issubclass(found, Backend)):
            raise TypeError(f"{point.value} is not a subclass of fmlab.backends.Backend")
    except Exception as error:
        _broken.add(name)
        warnings.warn(
            f"the backend {name!r} ({point.value}) is left out, because it cannot be loaded: "
            f"{type(error).__name__}: {error}",
            stacklevel=3,
        )
        return None
    return found


def _backend_class(name: str) -> type[Backend]:
    if name in OWN_ENTRY_POINTS:
        module, _, attribute = OWN_ENTRY_POINTS[name].partition(":")
    else:
        module, attribute = f"fmlab.backends.{name}", "BACKEND"
    backend: type[Backend] = getattr(import_module(module), attribute)
    return backend
