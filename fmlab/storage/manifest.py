"""What a folder must hold: size and SHA-256 of every file, in manifest.json, which has a checksum itself.

    {"version": 2,
     "files": {"model.safetensors": {"bytes": 7340128, "sha256": "9f86...", ...}, "run.json": {...}},
     "sha256": of all the above, as JSON with sorted keys and no spaces}

A changed byte in any file, in the manifest too, is found before anything is made of it. Version 1, which is
still read, had no checksum of itself and listed only tensors.
"""

import errno
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fmlab.storage.atomic import StorageError, flush, write_atomic

MANIFEST = "manifest.json"
_VERSION = 2


def write_manifest(folder: str | Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the manifest of a folder. files: name -> what is known of it, at least bytes and sha256."""
    content = {"version": _VERSION, "files": dict(files)}
    text = json.dumps({**content, "sha256": _digest(content)}, indent=1, sort_keys=True)
    write_atomic(Path(folder) / MANIFEST, text.encode())


def read_manifest(folder: str | Path) -> dict[str, dict[str, Any]]:
    """name -> what is known of each file. Raises StorageError for a manifest that is missing or damaged."""
    path = Path(folder) / MANIFEST
    try:
        found = json.loads(path.read_text())
        if found["version"] not in (1, _VERSION):
            raise StorageError(
                errno.EIO, f"{path} is of version {found['version']!r} and this fmlab reads 1 and {_VERSION}"
            )
        files: dict[str, dict[str, Any]] = found["files"]
        first = found["version"] == 1 and "sha256" not in found  # a changed byte does not make it that
        if not first and found["sha256"] != _digest({"version": found["version"], "files": files}):
            raise ValueError("its own checksum differs")
        for name, entry in files.items():
            _ = int(entry["bytes"]), str(entry["sha256"])
            if Path(name).name != name or name in ("", ".", "..", MANIFEST):
                raise ValueError(f"{name!r} is no file of this folder")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise StorageError(errno.ENOENT, f"{folder} is not a checkpoint: it has no {MANIFEST}") from error
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(error.errno, f"cannot read {path} ({error.strerror})") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise StorageError(errno.EIO, f"{path} is damaged: {error!r}") from error
    return files


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def sha256(path: str | Path) -> str:
    """Hexadecimal SHA-256 of a file."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


# --- before a file is used ------------------------------------------------------------------------------


def damage(folder: str | Path, part: int = 0, parts: int = 1) -> str:
    """The first thing wrong with a folder, by file; "" if nothing is. Of several processes each may check
    its part of the files. Nothing is raised."""
    try:
        files = read_manifest(folder)
        for name in sorted(files)[part::parts]:
            verify(Path(folder) / name, files[name])
    except StorageError as error:
        return str(error)
    return ""


def verify(file: Path, entry: Mapping[str, Any]) -> None:
    """Raise StorageError unless the file is as its entry in the manifest says."""
    try:
        size = file.stat().st_size
        if size != entry["bytes"]:
            raise StorageError(errno.EIO, f"{file} is damaged: {size} bytes instead of {entry['bytes']}")
        if sha256(file) != entry["sha256"]:
            raise StorageError(errno.EIO, f"{file} is damaged: its SHA-256 differs from the manifest")
    except StorageError:
        raise
    except FileNotFoundError as error:
        raise StorageError(errno.ENOENT, f"{file} is missing; the manifest lists it") from error
    except OSError as error:
        raise StorageError(error.errno, f"cannot read {file} ({error.strerror})") from error


def read_file(folder: str | Path, name: str, listed: bool = True) -> bytes:
    """A small file, read once: what is returned is what was checked. Raises StorageError.

    listed: false to take a file as it is where the manifest is of version 1 and does not know it.
    """
    path = Path(folder) / name
    known = listed or name in read_manifest(folder) or not _is_first(folder)
    entry = entry_of(folder, name) if known else None
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise StorageError(errno.ENOENT, f"{path} is missing; the manifest lists it") from error
    except OSError as error:
        raise StorageError(error.errno, f"cannot read {path} ({error.strerror})") from error
    if entry is None:
        return data
    if len(data) != entry["bytes"] or hashlib.sha256(data).hexdigest() != entry["sha256"]:
        raise StorageError(errno.EIO, f"{path} is damaged: its SHA-256 differs from the manifest")
    return data


def _is_first(folder: str | Path) -> bool:
    return bool(json.loads((Path(folder) / MANIFEST).read_text())["version"] == 1)


def entry_of(folder: str | Path, name: str) -> dict[str, Any]:
    """What the manifest knows of a file. Raises StorageError that names the folder's files."""
    files = read_manifest(folder)
    if name not in files:
        raise StorageError(errno.ENOENT, f"{folder} holds no {name}; it holds {', '.join(sorted(files))}")
    return files[name]


# --- files that did not change ----------------------------------------------------------------------------


def enter_files(
    folder: str | Path,
    files: Mapping[str, Mapping[str, Any]],
    names: Iterable[str],
    before: str | Path | None,
) -> None:
    """Write the manifest of a folder: of `files`, whose entries are known, and of `names`, read now.

    Those of `names` that are as in the folder `before` become links to the files there.
    """
    found = dict(files)
    for name in sorted(set(names)):
        path = Path(folder) / name
        found[name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
        if same := unchanged(before, name, found[name]):
            path.unlink()
            _link(same, path)
        flush(path)
    write_manifest(folder, found)


def unchanged(before: str | Path | None, name: str, entry: Mapping[str, Any]) -> Path | None:
    """The file of that name in the folder `before`, if it is the same and whole; else None.

    entry: what is known of the new file: "sha256", or "content" (of tensors).
    """
    if before is None:
        return None
    with suppress(StorageError):
        old = entry_of(before, name)
        if all(old.get(key) == value for key, value in entry.items()):
            verify(Path(before) / name, old)
            return Path(before) / name
    return None


def _link(old: Path, new: Path) -> None:
    """A second name for a file; a copy where the file system has no such thing."""
    try:
        os.link(old, new)
    except OSError:
        new.write_bytes(old.read_bytes())
