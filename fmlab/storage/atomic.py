"""Files and folders that are either whole or not there.

What is written gets a temporary name beside its final one, is flushed to disk and renamed, so that a crash, a
power cut, a full disk or a second reader never meets half of it. Three things reach the disk on their own:
what is in a file (fsync of the file), that it has its name (fsync of its folder), and that a folder has its
name (fsync of the folder above). They are asked for in that order, and the rename comes after the first two.
"""

import errno
import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path

from safetensors import SafetensorError

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class StorageError(OSError):
    """A folder that cannot be written, a full disk, or a file that is damaged."""

    def __str__(self) -> str:
        """The sentence without the number of the error."""
        return str(self.strerror or super().__str__())


# --- before work starts --------------------------------------------------------------------------


def check_writable(path: str | Path) -> Path:
    """Create the folder `path` if need be and prove that files can be written there.

    Raises StorageError that names the folder and the reason.
    """
    folder = Path(path).expanduser()
    try:
        make_folder(folder)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".write-test-"):
            pass
    except OSError as error:
        raise StorageError(
            error.errno, f"cannot write to {folder} ({error.strerror}); choose another folder"
        ) from error
    return folder


def check_free_space(path: str | Path, needed: int) -> None:
    """Raise StorageError unless the file system that holds `path` has `needed` bytes free."""
    folder = Path(path).expanduser().absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise StorageError(
            errno.ENOSPC,
            f"{folder} has {readable(free)} free and {readable(needed)} are needed; free some space or "
            "choose another folder",
        )


@contextmanager
def exclusive(path: str | Path) -> Iterator[None]:
    """Hold the folder `path` alone; the system lets go of it even when this process is killed.

    Raises StorageError when another process, or another run of this one, holds it. File systems without
    locks are not guarded.
    """
    folder = Path(path).expanduser()
    with open(folder / ".lock", "w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StorageError(
                errno.EBUSY, f"another run is writing to {folder}; wait for its end or choose another folder"
            ) from error
        except OSError:
            pass
        yield


# --- atomic folders and files --------------------------------------------------------------------


@contextmanager
def atomic_directory(path: str | Path, overwrite: bool = False) -> Iterator[Path]:
    """Write a folder as a whole or not at all: yields a temporary sibling, renamed to `path` at the end.

    When the body raises, the temporary folder is removed and whatever stood at `path` before stays.
    Raises StorageError when the disk is full, ValueError when `path` exists and `overwrite` is false.
    """
    final = Path(path)
    if final.exists() and not overwrite:
        raise ValueError(_exists(final))
    temporary = _beside(final)
    try:
        make_folder(final.parent)
        temporary.mkdir()
        yield temporary
        for file in temporary.rglob("*"):
            flush(file)
        flush(temporary)
        _put_in_place(temporary, final, overwrite)
        flush(final.parent)
    except (OSError, SafetensorError) as error:
        raise explain(error, final) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_atomic(path: str | Path, data: bytes) -> None:
    """Write a file as a whole or not at all. Raises StorageError when the disk is full."""
    final = Path(path)
    temporary = _beside(final)
    try:
        temporary.write_bytes(data)
        flush(temporary)
        os.replace(temporary, final)
        flush(final.parent)
    except OSError as error:
        raise explain(error, final) from error
    finally:
        temporary.unlink(missing_ok=True)


def make_folder(path: str | Path) -> Path:
    """Make a folder, and those above it, so that it is still there after a power cut."""
    folder = Path(path)
    missing = list(takewhile(lambda one: not one.is_dir(), [folder, *folder.parents]))
    folder.mkdir(parents=True, exist_ok=True)
    for made in missing:
        flush(made.parent)
    return folder


def _beside(final: Path) -> Path:
    """A name of this writer's own: on a shared file system another host may have a process of our number."""
    return final.parent / f".{final.name}.writing-{os.getpid()}-{secrets.token_hex(4)}"


def _exists(final: Path) -> str:
    return f"{final} exists already and is not overwritten; choose another name"


def _put_in_place(temporary: Path, final: Path, overwrite: bool) -> None:
    """Rename over `final`; a folder that stood there is moved aside first and brought back on failure.

    Without `overwrite` one that another writer has put there meanwhile stays.
    """
    if not overwrite or not final.exists():
        try:
            os.rename(temporary, final)
        except OSError as error:
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR) and final.exists():
                raise ValueError(_exists(final)) from error
            raise
        return
    old = final.parent / f".{final.name}.replaced-{os.getpid()}"
    os.rename(final, old)
    try:
        os.rename(temporary, final)
    except OSError:
        os.rename(old, final)
        raise
    flush(final.parent)  # both renames, before the old one goes
    shutil.rmtree(old, ignore_errors=True)


def recover(path: str | Path) -> None:
    """Put right what writers left in the folder `path` that were killed: half of a new file or folder goes,
    an old folder that had been moved aside comes back. Only for who holds the folder alone."""
    folder = Path(path)
    for left in folder.glob(".*.replaced-*"):
        final = folder / left.name[1:].rpartition(".replaced-")[0]
        if final.exists():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.rename(final)
    for left in folder.glob(".*.writing-*"):
        shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Force a file or folder to disk. Some file systems cannot flush folders: that is no error."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if path.is_dir():
            with suppress(OSError):
                os.fsync(descriptor)
        else:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def explain(error: Exception, path: Path) -> StorageError:
    """What an error means that was met in writing `path`; a StorageError stays itself."""
    if isinstance(error, StorageError):
        return error
    full = getattr(error, "errno", None) in _NO_SPACE or any(
        text in str(error) for text in ("No space left", "File too large", "quota")
    )
    if full:
        return StorageError(
            errno.ENOSPC,
            f"the disk is full{_of_files(path)}: {path} was not written; what stood there before is "
            "unchanged. Free some space or choose another folder, then resume from the last checkpoint",
        )
    return StorageError(getattr(error, "errno", None) or errno.EIO, f"could not write {path}: {error}")


def _of_files(path: Path) -> str:
    """Of files rather than bytes: a file system may hold so many and no more."""
    folder = next((one for one in path.parents if one.is_dir()), None)
    if folder is None:
        return ""
    counts = os.statvfs(folder)
    return " (no further file fits, however small)" if counts.f_files and not counts.f_favail else ""


def readable(number: float) -> str:
    """A number of bytes as people write it."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"
