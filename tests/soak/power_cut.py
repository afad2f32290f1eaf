"""A disk whose plug is pulled after each thing that is asked of it.

What is done to files under `root` goes through functions of `os`; after each one the state of the disk is
noted as three folders, each of which a machine may find when it starts again:

killed      the process died, the system lived: everything is as it was seen
cautious    the power failed, and only what fsync was asked for is there: bytes of files, names in folders
eager       the power failed, all names are there, and the bytes of files that fsync was not asked for are not
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_WATCHED = ("fsync", "mkdir", "rename", "replace", "unlink", "rmdir", "link", "remove")


class Disk:
    """Notes the state after each operation under `root` into `notes`; see `states`."""

    def __init__(self, root: Path, notes: Path) -> None:
        self.root, self.notes = root, notes
        self.bytes: dict[int, bytes] = {}  # inode -> what is on disk of a file
        self.names: dict[Path, dict[str, int | None]] = {}  # folder -> its names on disk; None for a folder
        self.operations: list[str] = []
        for path in [root, *root.rglob("*")]:
            self._synced(path)

    def _synced(self, path: Path) -> None:
        if path.is_dir():
            entries = {one.name: None if one.is_dir() else one.stat().st_ino for one in path.iterdir()}
            self.names[path] = entries
        else:
            self.bytes[path.stat().st_ino] = path.read_bytes()

    def _moved(self, old: Path, new: Path) -> None:
        """What is known of a folder goes with it."""
        for path in [p for p in self.names if p == old or old in p.parents]:
            self.names[new / path.relative_to(old)] = self.names.pop(path)

    @contextmanager
    def watching(self, fail_at: int = -1, error: OSError | None = None) -> Iterator[None]:
        """Note the operations meanwhile. The one with number `fail_at` fails with `error` instead."""
        real = {name: getattr(os, name) for name in _WATCHED}
        for name in _WATCHED:
            setattr(os, name, self._watched(name, real[name], fail_at, error))
        try:
            yield
        finally:
            for name, function in real.items():
                setattr(os, name, function)

    def _watched(self, name: str, real: Callable[..., Any], fail_at: int, error: OSError | None) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            named = args[1] if name in ("rename", "replace", "link") else args[0]
            target = _folder_of(named) if name == "fsync" else Path(named)
            if kwargs.get("dir_fd") is not None:
                target = _folder_of(kwargs["dir_fd"]) / named
            if self.root not in [target, *target.parents]:
                return real(*args, **kwargs)
            self.operations.append(f"{name} {target.relative_to(self.root)}")
            if len(self.operations) - 1 == fail_at and error is not None:
                raise error
            result = real(*args, **kwargs)
            if name == "fsync":
                self._synced(target)
            elif name in ("rename", "replace") and target.is_dir():
                self._moved(Path(args[0]), target)
            if error is None:
                self._note()
            return result

        return call

    def _note(self) -> None:
        folder = self.notes / f"{len(self.operations) - 1:03d}"
        shutil.copytree(self.root, folder / "killed")
        for path in self.root.rglob("*"):
            new = folder / "eager" / path.relative_to(self.root)
            if path.is_dir():
                new.mkdir(parents=True)
            else:
                new.parent.mkdir(parents=True, exist_ok=True)
                new.write_bytes(self.bytes.get(path.stat().st_ino, b""))
        self._write_names(self.root, folder / "cautious")

    def _write_names(self, path: Path, new: Path) -> None:
        new.mkdir()
        for name, inode in self.names.get(path, {}).items():
            if inode is None:
                self._write_names(path / name, new / name)
            else:
                (new / name).write_bytes(self.bytes.get(inode, b""))

    def states(self) -> Iterator[tuple[str, Path]]:
        """What happened last, and the folder as it may be found afterwards."""
        for folder in sorted(self.notes.iterdir()):
            for kind in ("killed", "cautious", "eager"):
                yield f"{kind} after {self.operations[int(folder.name)]}", folder / kind


def _folder_of(descriptor: int) -> Path:
    """The file or folder that is open under this number."""
    return Path(os.readlink(f"/proc/self/fd/{descriptor}"))
