"""A folder of the user's for things that are quick to make again: tokenizers and encoded corpora."""

import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from fmlab.storage import StorageError, check_writable, write_atomic

T = TypeVar("T")


def cache_directory() -> Path:
    """Where the platform keeps caches: XDG_CACHE_HOME or ~/.cache on Linux, ~/Library/Caches on macOS."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "fmlab"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fmlab"


def cached(name: str, make: Callable[[], T], to_bytes: Callable[[T], bytes], read: Callable[[bytes], T]) -> T:
    """The thing stored in the cache as `name`, made and stored first if it is not there.

    `name` holds a hash of everything that the content depends on. Files are written atomically, so that
    several ranks may do this at once; a damaged file is made again; where the folder cannot be written,
    the thing is made every time and one warning says so.
    """
    file = cache_directory() / name
    try:
        return read(file.read_bytes())
    except OSError:
        pass  # not there yet, or not readable
    except Exception as error:
        warnings.warn(f"{file} is damaged ({error}) and is made again", stacklevel=2)
    made = make()
    try:
        check_writable(file.parent)
        write_atomic(file, to_bytes(made))
    except StorageError as error:
        warnings.warn(f"working without a cache: {error}", stacklevel=2)
    return made
