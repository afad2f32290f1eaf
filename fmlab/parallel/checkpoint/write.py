"""Every rank writes what it holds, into one folder that is there as a whole or not at all."""

import errno
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from fmlab import storage
from fmlab.parallel.checkpoint import named
from fmlab.parallel.checkpoint.pieces import Piece
from fmlab.parallel.checkpoint.planner import Planned, SavePlanner
from fmlab.parallel.ddp.replicas import sendable

if TYPE_CHECKING:
    from fmlab.parallel.engine import Engine

METADATA = ".metadata"  # torch.distributed.checkpoint's table of what is where


# region save
def save(engine: "Engine", directory: str | Path) -> None:
    """Write weights, buffers and optimizer state of a divided engine; every rank calls it.

    Every rank writes its own pieces at the same time, and none ever holds the whole. All ranks must see the
    folder: on several hosts it lies on a file system that they share. Raises ValueError on every rank if they
    do not, or if it exists, StorageError if it cannot be written; nothing is left behind then.
    """
    weights = named.weights(engine)
    pieces = named.choose_writers(
        weights | named.optimizer_state(engine, weights), _gather, dist.get_rank() if _in_group() else 0
    )
    opened: list[AbstractContextManager[Path]] = []

    def begin() -> Path:
        opened.append(storage.atomic_directory(directory))
        return opened[0].__enter__()

    folder = _on_first(begin)
    try:
        _all_see(folder)
        _write(folder, pieces)
        sums = {
            name: entry for theirs in _on_each(lambda: _checksums(folder)) for name, entry in theirs.items()
        }
        _on_first(lambda: _finish(folder, sums))
    except BaseException as error:
        if opened:
            opened[0].__exit__(type(error), error, error.__traceback__)
        raise
    _on_first(lambda: opened[0].__exit__(None, None, None))  # moves it to its name


# endregion


def _write(folder: Path, pieces: dict[str, Piece]) -> None:
    writer = dcp.FileSystemWriter(folder, sync_files=False)  # flushed to disk with the folder
    planned = {key: Planned(piece) for key, piece in pieces.items()}
    try:
        dcp.save(planned, storage_writer=writer, planner=SavePlanner(), no_dist=not _in_group())
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise storage.StorageError(
            getattr(cause, "errno", None) or errno.EIO,
            f"rank {rank} could not write its part to {folder}: {cause}",
        ) from cause


def _all_see(folder: Path) -> None:
    blind = [rank for rank, sees in enumerate(_gather(folder.is_dir())) if not sees]
    if blind:
        raise ValueError(
            f"rank{'s' * (len(blind) > 1)} {', '.join(map(str, blind))} cannot see {folder.parent}, where "
            "the first rank writes; save to a file system that all hosts share"
        )


def _checksums(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of this rank's files; the first rank's include the table."""
    rank = dist.get_rank() if _in_group() else 0
    files = [*folder.glob(f"__{rank}_*"), *([folder / METADATA] if rank == 0 else [])]
    return {f.name: {"bytes": f.stat().st_size, "sha256": storage.sha256(f)} for f in files}


def _finish(folder: Path, sums: dict[str, Any]) -> None:
    manifest = {"version": 1, "format": "sharded", "files": sums}
    storage.write_atomic(folder / storage.MANIFEST, json.dumps(manifest, indent=2, sort_keys=True).encode())


def _in_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def _gather(item: Any) -> list[Any]:
    """Every rank's `item`, by rank."""
    if not _in_group():
        return [item]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, item)
    return every


def _on_each(action: Callable[[], Any]) -> list[Any]:
    """Run `action` on every rank; all get the results by rank, or learn which rank failed."""
    mine: tuple[Any, Exception | None]
    try:
        mine = action(), None
    except Exception as error:
        mine = None, sendable(error)
    every = _gather(mine)
    for rank, (_, failure) in enumerate(every):
        if failure is not None:
            number = getattr(failure, "errno", None) or errno.EIO
            raise storage.StorageError(number, f"rank {rank}: {failure}") from failure
    return [result for result, _ in every]


def _on_first(action: Callable[[], Any]) -> Any:
    """Run `action` on the first rank; all get its result, or raise what it raised."""
    outcome: list[Any] = [None, None]
    if not _in_group() or dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except Exception as error:
            outcome[1] = sendable(error)
    if _in_group():
        dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]
