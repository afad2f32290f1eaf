"""Files that are either whole or not there: atomic folders, and tensors with a checksummed manifest.

A folder is written under a temporary name beside its final one, flushed to disk and renamed, so that a
crash, a full disk or a second reader never meets half a checkpoint.
"""

import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

MANIFEST = "manifest.json"
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
        folder.mkdir(parents=True, exist_ok=True)
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
            f"{folder} has {_size(free)} free and {_size(needed)} are needed; free some space or choose "
            "another folder",
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
        final.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        yield temporary
        for file in temporary.rglob("*"):
            _flush(file)
        _flush(temporary)
        _put_in_place(temporary, final, overwrite)
        _flush(final.parent)
    except (OSError, SafetensorError) as error:
        raise _explain(error, final) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_atomic(path: str | Path, data: bytes) -> None:
    """Write a file as a whole or not at all. Raises StorageError when the disk is full."""
    final = Path(path)
    temporary = _beside(final)
    try:
        temporary.write_bytes(data)
        _flush(temporary)
        os.replace(temporary, final)
        _flush(final.parent)
    except OSError as error:
        raise _explain(error, final) from error
    finally:
        temporary.unlink(missing_ok=True)


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
    shutil.rmtree(old, ignore_errors=True)


def _flush(path: Path) -> None:
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


def _explain(error: Exception, path: Path) -> StorageError:
    if isinstance(error, StorageError):
        return error
    full = getattr(error, "errno", None) in _NO_SPACE or any(
        text in str(error) for text in ("No space left", "File too large", "quota")
    )
    if full:
        return StorageError(
            errno.ENOSPC,
            f"the disk is full: {path} was not written; what stood there before is unchanged. Free some "
            "space or choose another folder, then resume from the last checkpoint",
        )
    return StorageError(getattr(error, "errno", None) or errno.EIO, f"could not write {path}: {error}")


# --- tensors -------------------------------------------------------------------------------------


def save_tensors(
    directory: str | Path,
    tensors: Mapping[str, Tensor],
    name: str = "tensors",
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Write `tensors` to directory/name.safetensors and enter its size and SHA-256 in the manifest.

    Names that share one tensor (tied weights) are written once and restored under every name.
    `metadata` is anything JSON can hold. Use inside `atomic_directory`. Raises StorageError.
    """
    folder = Path(directory)
    unique: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for key, tensor in tensors.items():
        # Where a device shows no address (torch_xla: always 0), only the same object is the same tensor.
        place = tensor.data_ptr() or ("no address", id(tensor))
        identity = (place, tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if tensor.numel() and identity in seen:
            aliases[key] = seen[identity]
        else:
            seen[identity] = key
            unique[key] = tensor.detach().to("cpu").contiguous()
    file = folder / f"{name}.safetensors"
    try:
        save_file(_own_storage(unique), file)
        entry = {"bytes": file.stat().st_size, "sha256": sha256(file), "aliases": aliases}
        new: dict[str, Any] = {"version": 1, "files": {}}
        manifest = _read_manifest(folder) if (folder / MANIFEST).exists() else new
        manifest["files"][file.name] = {**entry, "metadata": dict(metadata or {})}
        write_atomic(folder / MANIFEST, json.dumps(manifest, indent=2, sort_keys=True).encode())
    except (OSError, SafetensorError) as error:
        raise _explain(error, file) from error


def load_tensors(directory: str | Path, name: str = "tensors", verify: bool = True) -> dict[str, Tensor]:
    """Read what `save_tensors` wrote; with `verify`, size and SHA-256 are checked first.

    Raises StorageError that names the file when it is missing, cut short or changed.
    """
    folder = Path(directory)
    file = folder / f"{name}.safetensors"
    entry = _entry(folder, file)
    if verify:
        _verify(file, entry)
    try:
        with safe_open(file, framework="pt") as reader:
            tensors = {key: reader.get_tensor(key) for key in reader.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise StorageError(errno.EIO, f"{file} is damaged and cannot be read: {error}") from error
    for alias, key in entry["aliases"].items():
        tensors[alias] = tensors[key]
    return tensors


def load_metadata(directory: str | Path, name: str = "tensors") -> dict[str, Any]:
    """The metadata given to `save_tensors`."""
    folder = Path(directory)
    metadata: dict[str, Any] = _entry(folder, folder / f"{name}.safetensors")["metadata"]
    return metadata


def sha256(path: str | Path) -> str:
    """Hexadecimal SHA-256 of a file."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _own_storage(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors that are views of a larger or shared buffer: the file format refuses shared memory."""
    owned: dict[str, Tensor] = {}
    storages: set[int] = set()
    for key, tensor in tensors.items():
        pointer = tensor.untyped_storage().data_ptr()
        whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        owned[key] = tensor if whole and pointer not in storages else tensor.clone()
        storages.add(pointer)
    return owned


def _read_manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
        for entry in manifest["files"].values():
            _ = int(entry["bytes"]), entry["sha256"], dict(entry["aliases"]), dict(entry["metadata"])
    except (FileNotFoundError, NotADirectoryError) as error:
        raise StorageError(errno.ENOENT, f"{folder} is not a checkpoint: it has no {MANIFEST}") from error
    except OSError as error:
        raise StorageError(error.errno, f"cannot read {folder / MANIFEST} ({error.strerror})") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise StorageError(errno.EIO, f"{folder / MANIFEST} is damaged: {error!r}") from error
    return manifest


def _entry(folder: Path, file: Path) -> dict[str, Any]:
    files = _read_manifest(folder)["files"]
    if file.name not in files:
        raise StorageError(errno.ENOENT, f"{folder} holds no {file.name}; it holds {sorted(files)}")
    entry: dict[str, Any] = files[file.name]
    return entry


def _verify(file: Path, entry: Mapping[str, Any]) -> None:
    if not file.exists():
        raise StorageError(errno.ENOENT, f"{file} is missing; the manifest lists it")
    size = file.stat().st_size
    if size != entry["bytes"]:
        raise StorageError(errno.EIO, f"{file} is damaged: {size} bytes instead of {entry['bytes']}")
    if sha256(file) != entry["sha256"]:
        raise StorageError(errno.EIO, f"{file} is damaged: its SHA-256 differs from the manifest")


def _size(number: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"
