"""Finding a backend by name, or the best one of this machine.

A backend is a file of this folder, so that a new one needs no change here.
"""

import difflib
import os
import pkgutil
from importlib import import_module

import fmlab.backends
from fmlab.backends.base import Backend

# "auto" takes the first that is available. Native chips come before GPUs, because a host with such a
# chip was chosen for it; a simulated device is never taken without being asked for.
DETECTION_ORDER = ("neuron", "tpu", "cuda", "xpu", "mps", "xla", "cpu")
# Files of this folder that help backends and are none; so is any with an underscore in its name.
_NOT_BACKENDS = {"base", "environment", "moving", "preflight", "registry", "stacks"}


def backend_names() -> list[str]:
    """The names of all backends of this package, available on this machine or not."""
    return sorted(
        module.name
        for module in pkgutil.iter_modules(fmlab.backends.__path__)
        if module.name not in _NOT_BACKENDS and "_" not in module.name
    )


def available_backends() -> list[str]:
    """The names of those that this machine can use."""
    return [name for name in backend_names() if _backend_class(name).is_available()]


def get_backend(name: str = "auto", index: int | None = None) -> Backend:
    """The backend called `name` ("cpu", "cuda", …; "sim:trn2" with a variant), or "auto" for the best.

    index: the number of this process's device on the host; LOCAL_RANK by default.
    Raises ValueError for a name that does not exist or that this machine cannot use.
    """
    if index is None:
        index = int(os.environ.get("LOCAL_RANK", "0"))
    if name == "auto":
        name = detect()
    base, _, variant = name.partition(":")
    names = backend_names()
    if base not in names:
        close = difflib.get_close_matches(base.lower(), names, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"unknown backend {name!r}; legal: auto, {', '.join(names)}{hint}")
    backend = _backend_class(base)
    if not backend.is_available():
        raise ValueError(
            f"this machine has no {base!r} device that torch can use; available: auto, "
            f"{', '.join(available_backends())}. {backend.why_absent()}".strip(". ")
        )
    if variant and variant not in backend.variants():
        legal = ", ".join(f"{base}:{word}" for word in backend.variants()) or base
        raise ValueError(f"unknown variant {name!r}; legal: {legal}")
    return backend.create(variant or None, index)


def detect() -> str:
    """The name of the first available backend in the order of detection."""
    present = backend_names()
    found = (_backend_class(name) for name in DETECTION_ORDER if name in present)
    return next(backend.name for backend in found if backend.automatic() and backend.is_available())


def _backend_class(name: str) -> type[Backend]:
    backend: type[Backend] = import_module(f"fmlab.backends.{name}").BACKEND
    return backend
