"""Environment variables that a device's software reads once: set them before it is loaded, or be told.

A variable that is set too late does nothing, and nobody says so. Importing this module starts a watch: when
one of the libraries below has been loaded, the environment is kept and can be compared later. torch_xla reads
some of its variables only when its runtime starts; see xla_environment.configure.
"""

import os
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

#: library -> the beginnings of the names that it, or the runtime under it, reads when it is loaded
READ_ONCE = {
    "torch_xla": ("PJRT_", "XLA_", "CPU_NUM_DEVICES", "LIBTPU_", "TPU_"),
    "torch_neuronx": ("NEURON_RT_", "NEURON_LOGICAL_NC_CONFIG", "TORCH_NEURONX_", "NEURON_LAUNCH_BLOCKING"),
    "torch_tpu": ("TORCH_TPU_", "TPU_", "LIBTPU_", "XLA_FLAGS"),
}
#: what each library had read: those variables of the environment when it was loaded
_seen: dict[str, dict[str, str]] = {}


class LateEnvironmentWarning(UserWarning):
    """A variable was set after the library that reads it had been loaded."""


def set_early(library: str, name: str, value: str) -> None:
    """Set a variable for `library`; warns where it comes too late to be read.

    A value that is there already and differs is replaced; setting what is set already is silent.
    """
    if os.environ.get(name) == value and name not in late_variables(library):
        return
    os.environ[name] = value
    warn_if_late(library)


def late_variables(library: str) -> dict[str, tuple[str | None, str | None]]:
    """The variables of `library` that have changed since it was loaded: name -> (when loaded, now)."""
    if library not in _seen:
        return {}
    then, now = _seen[library], _relevant(library)
    return {
        name: (then.get(name), now.get(name))
        for name in sorted({*then, *now})
        if then.get(name) != now.get(name)
    }


def warn_if_late(library: str) -> None:
    """Warn of each variable that was changed after `library` had been loaded, with the remedy."""
    for name, (then, now) in late_variables(library).items():
        was = "unset" if then is None else repr(then)
        remedy = f"{name}={now}" if now is not None else f"env -u {name}"
        warnings.warn(
            f"{name} was changed after {library} had been loaded, so that it still counts as {was}: restart "
            f"and set it first, either before the program ({remedy} python ...) or above the first import "
            f"of torch and {library}",
            LateEnvironmentWarning,
            stacklevel=3,
        )


def _relevant(library: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(READ_ONCE[library])}


class _Watch(MetaPathFinder):
    """Notes the environment down when a library has been loaded; what it sets itself meanwhile is its own."""

    looking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in READ_ONCE or self.looking:
            return None
        self.looking = True  # the others are asked for the module, and this one again
        try:
            spec = find_spec(fullname)
        finally:
            self.looking = False
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_note(module: ModuleType) -> None:
                load(module)
                _seen[fullname] = _relevant(fullname)

            spec.loader.exec_module = load_and_note  # type: ignore[method-assign]
        return spec


def _start_watch() -> None:
    if not any(type(finder).__name__ == "_Watch" for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())
    for library in READ_ONCE:
        if library in sys.modules:  # when it was loaded nobody watched: what changes from here on is late
            _seen.setdefault(library, _relevant(library))


_start_watch()
