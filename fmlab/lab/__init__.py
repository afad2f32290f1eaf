"""Everything Jupyter: tables, figures, panels, exercises, and the machinery that makes the notebooks.

Each name is loaded when it is first used. `%load_ext fmlab.lab` in a notebook registers the `%%ranks` magic.
"""

from importlib import import_module
from typing import Any

_LAZY = {
    "LiveCurve": "live",
    "Panel": "panels",
    "Row": "prediction",
    "Table": "table",
    "balance_panel": "balance",
    "caption": "figures",
    "check": "exercises",
    "compare": "prediction",
    "figure": "figures",
    "graph_diff_panel": "graph_diff",
    "memory_panel": "memory",
    "need_xla": "xla",
    "overlap_panel": "overlap",
    "plan_panel": "whatif",
    "predict": "prediction",
    "progress": "live",
    "roofline_figure": "roofline",
    "roofline_panel": "roofline",
    "schedule_panel": "pipelines",
    "show_source": "source",
    "style": "figures",
    "ticker": "live",
    "view": "graph_view",
    "within": "bounds",
}
__all__ = [*_LAZY, "load_ipython_extension"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f"fmlab.lab.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'fmlab.lab' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


def load_ipython_extension(shell: Any) -> None:
    """Called by `%load_ext fmlab.lab`: adds the `%%ranks` cell magic."""
    import_module("fmlab.lab.magic").load_ipython_extension(shell)
