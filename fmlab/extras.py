"""Optional packages: imported where they are used, with a message that says how to get them."""

from importlib import import_module
from types import ModuleType


def require(extra: str, module: str) -> ModuleType:
    """Import `module`, which belongs to the optional dependencies `extra` of fmlab.

    Raises ImportError that names the missing package and the command that installs it.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"this needs the package {error.name!r}, which is not installed; "
            f"install it with: pip install '.[{extra}]' (in fmlab's folder)"
        ) from error
