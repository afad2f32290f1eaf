"""Is a person sitting at this notebook? Objects are live for a person and static otherwise."""

import sys


def is_live() -> bool:
    """True when the cell was run from a front end that can ask its user something.

    A kernel is told so with every request (`allow_stdin`): JupyterLab and its like say yes; a headless build
    or test says no, and so gets static, repeatable outputs.
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    kernel = getattr(shell, "kernel", None)
    if kernel is None:
        return False
    content = kernel.get_parent("shell").get("content", {})
    return bool(content.get("allow_stdin", False))
