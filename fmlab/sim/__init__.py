"""Simulated chips: a PyTorch device whose arithmetic is real, and whose time and memory are a chip's.

Each public name is loaded at its first use, so that importing this package touches no device.
"""

from importlib import import_module
from typing import Any

_LAZY = {
    "DryRun": "fmlab.sim.report",
    "Event": "fmlab.sim.event",
    "SimOutOfMemory": "fmlab.sim.memory",
    "Simulated": "fmlab.sim.simulated",
    "Split": "fmlab.sim.split",
    "dry_run": "fmlab.sim.dry",
    "record": "fmlab.sim.trace",
    "simulate": "fmlab.sim.attach",
    "simulated_mode": "fmlab.sim.mode",
}
__all__ = sorted(_LAZY)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'fmlab.sim' has no attribute {name!r}")
