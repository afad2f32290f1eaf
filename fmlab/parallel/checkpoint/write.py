"""Every rank writes what it holds, into one folder that is there as a whole or not at all."""

import errno
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from fmlab import storage
from fmlab.parallel.checkpoint.snapshot import take
from fmlab.parallel.ddp.replicas import sendable
from fmlab.parallel.state import gather

if TYPE_CHECKING:
    from fmlab.parallel.engine import Engine


# region save
def save(engine: "Engine", directory: str | Path) -> None:
    """Write weights, buffers and optimizer state; every rank calls it.

    Where tensors are divided every rank writes its own pieces at the same time, and none ever holds the
    whole. All ranks must see the folder: on several hosts it lies on a file system that they share. Raises
    ValueError on every rank if they do not, or if it exists, StorageError if it cannot be written; nothing
    is left behind then.
    """
    ranks = engine.ranks
    opened: list[AbstractContextManager[Path]] = []

    def begin() -> Path:
        opened.append(storage.atomic_directory(directory))
        return opened[0].__enter__()

    folder: Path = on_first(begin, ranks)
    try:
        all_see(folder, ranks)
        taken = take(engine)
        written = on_each(lambda: taken.write(folder), ranks)
        entries = {name: entry for theirs in written for name, entry in theirs.items()}
        on_first(lambda: storage.write_manifest(folder, entries), ranks)
    except BaseException as error:
        if opened:
            opened[0].__exit__(type(error), error, error.__traceback__)
        raise
    on_first(lambda: opened[0].__exit__(None, None, None), ranks)  # moves it to its name


# endregion


def all_see(folder: Path, ranks: Any) -> None:
    """Raise ValueError on every rank unless all see a folder that the first has made; every rank calls it."""
    blind = [rank for rank, sees in enumerate(gather(folder.is_dir(), ranks)) if not sees]
    if blind:
        raise ValueError(
            f"rank{'s' * (len(blind) > 1)} {', '.join(map(str, blind))} cannot see {folder.parent}, where "
            "the first rank writes; save to a file system that all hosts share"
        )


def on_each(action: Callable[[], Any], ranks: Any) -> list[Any]:
    """Run `action` on every rank; all get the results by rank, or learn which rank failed."""
    mine: tuple[Any, Exception | None]
    try:
        mine = action(), None
    except Exception as error:
        mine = None, sendable(error)
    every = gather(mine, ranks)
    for rank, (_, failure) in enumerate(every):
        if failure is not None:
            if len(every) == 1:
                raise failure
            number = getattr(failure, "errno", None) or errno.EIO
            raise storage.StorageError(
                number, f"rank {rank} could not write its part: {failure}"
            ) from failure
    return [result for result, _ in every]


def on_first(action: Callable[[], Any], ranks: Any) -> Any:
    """Run `action` on the first rank; all get its result, or raise what it raised."""
    outcome: list[Any] = [None, None]
    if ranks is None or dist.get_rank(ranks) == 0:
        try:
            outcome[0] = action()
        except Exception as error:
            outcome[1] = sendable(error)
    if ranks is not None:
        dist.broadcast_object_list(outcome, src=dist.get_global_rank(ranks, 0), group=ranks)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]
