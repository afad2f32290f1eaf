"""fmlab: train foundation models on emerging AI chips, with real ranks on a laptop.

Importing this package imports nothing heavy: each public name is loaded when it is first used.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_LAZY = {"Ranks": "fmlab.ranks", "RankError": "fmlab.ranks"}
__all__ = ["RankError", "Ranks", "__version__"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'fmlab' has no attribute {name!r}")
