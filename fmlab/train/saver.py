"""Writing a run's checkpoints: at once, or beside the steps that follow.

A checkpoint is written into steps/.000200.incomplete and has its name only when it is whole and on disk:

1. every rank takes a snapshot of what it writes, and writes it: files, fsync
2. the first rank adds run.json, the tokenizer and the manifest: files, fsync, fsync of the folder
3. checkpoints of later steps go: they are of a run that was taken back
4. `latest` gets the new name, then the folder gets it, then steps/ is flushed
5. checkpoints beyond those to keep go

Killed anywhere, the folder holds a whole checkpoint: the old one until the rename of step 4, the new one
after.
"""

import json
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fmlab import storage
from fmlab.data import TextTokenizer
from fmlab.parallel import Engine
from fmlab.parallel.checkpoint import Snapshot, all_see, on_each, on_first
from fmlab.storage import StorageError, write_atomic
from fmlab.train import checkpoint
from fmlab.train.checkpoint import LATEST, RUN, RunState

_LOOK = 0.01  # seconds between looks for the parts of other ranks
_PATIENCE = 30.0  # seconds to wait for them when the run has failed

Entries = dict[str, dict[str, Any]]


@dataclass
class Saver:
    """Writes the checkpoints of one run; every rank has one, and all call its methods together.

    keep:   newest checkpoints to keep; keep_every: those of steps divisible by it stay too, 0 for none
    beside: write in a thread, while the steps go on; costs memory for a copy of what a rank writes
    done:   called with step and folder of each checkpoint that is complete, on every rank
    """

    out: str | Path
    engine: Engine
    tokenizer: TextTokenizer
    keep: int = 2
    keep_every: int = 0
    beside: bool = False
    done: Callable[[int, Path], None] = lambda step, path: None
    _writing: "_Writing | None" = field(default=None, init=False)

    # region save
    def save(self, state: RunState) -> None:
        """Write a checkpoint of step state.step, or begin to; one that is being written is waited for.

        Raises StorageError on every rank, also for the one before, with what its writer met; older
        checkpoints are then as before.
        """
        self.wait()
        ranks = self.engine.ranks
        final = checkpoint.folder_of(self.out, state.step)
        staging = final.parent / f".{final.name}.incomplete"
        before: Path | None = on_first(lambda: self._begin(staging), ranks)
        try:
            all_see(staging, ranks)
            taken = self.engine.snapshot(copy=self.beside)
            if self.beside:
                self._writing = _Writing(self, taken, staging, before, state)
                return
            written = on_each(lambda: taken.write(staging, before), ranks)
            entries = {name: entry for theirs in written for name, entry in theirs.items()}
            on_first(lambda: self.finish(staging, entries, before, state), ranks)
        except BaseException:
            self._clear(staging)
            raise
        self.done(state.step, final)

    # endregion

    def wait(self) -> None:
        """Wait for the checkpoint that is being written. Raises StorageError on every rank if it failed."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            on_each(writing.join, self.engine.ranks)
        except BaseException:
            self._clear(writing.staging)
            raise
        self.done(writing.state.step, checkpoint.folder_of(self.out, writing.state.step))

    def close(self) -> None:
        """After a failure elsewhere: let the checkpoint that is being written become whole if it can, and
        raise nothing. Ranks need not call it together."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.give_up_after(_PATIENCE)

    def _begin(self, staging: Path) -> Path | None:
        """On the first rank: a new folder to write into; the checkpoint whose files may be linked."""
        try:
            shutil.rmtree(staging, ignore_errors=True)
            storage.make_folder(staging.parent)
            staging.mkdir()
        except OSError as error:
            raise storage.explain(error, staging) from error
        try:
            return checkpoint.latest(self.out)
        except ValueError:
            return None

    def _clear(self, staging: Path) -> None:
        if self.engine.is_writer:
            shutil.rmtree(staging, ignore_errors=True)

    # region finish
    def finish(self, staging: Path, entries: Entries, before: Path | None, state: RunState) -> None:
        """On the first rank, when all parts are written: steps 2 to 5."""
        root = Path(self.out)
        final = checkpoint.folder_of(root, state.step)
        try:
            (staging / RUN).write_text(json.dumps(vars(state), indent=1))
            self.tokenizer.save(staging)
            names = {path.name for path in staging.iterdir()} - entries.keys()
            others = {name for name in names if not name.startswith(".")}
            storage.enter_files(staging, entries, others, before)
            for step in checkpoint.steps(root):
                if step >= state.step:  # left by a run that was resumed from an older step
                    _remove(checkpoint.folder_of(root, step))
            write_atomic(root / LATEST, final.name.encode())
            staging.rename(final)
            storage.flush(final.parent)
            self._retain(state.step)
        except OSError as error:
            raise storage.explain(error, final) from error

    def _retain(self, step: int) -> None:
        found = checkpoint.steps(self.out)
        kept = {*found[-self.keep :], step}
        for other in found:
            if other not in kept and not (self.keep_every and other % self.keep_every == 0):
                _remove(checkpoint.folder_of(self.out, other))

    # endregion


def _remove(folder: Path) -> None:
    """Delete a checkpoint: first its name, so that no half of it is ever taken for one."""
    doomed = folder.parent / f".{folder.name}.deleted"
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


class _Writing:
    """A checkpoint that a thread of each rank writes. The threads send nothing: each leaves a note of what it
    wrote in the folder, and the first rank's looks for the notes of all."""

    def __init__(
        self, saver: Saver, taken: Snapshot, staging: Path, before: Path | None, state: RunState
    ) -> None:
        self.saver, self.taken, self.staging, self.before, self.state = saver, taken, staging, before, state
        ranks = saver.engine.ranks
        self.rank = 0 if ranks is None else dist.get_rank(ranks)
        self.size = 1 if ranks is None else dist.get_world_size(ranks)
        self._failed: Exception | None = None
        self._deadline: float | None = None
        self._thread = threading.Thread(target=self._run, name=f"checkpoint of step {state.step}")
        self._thread.start()

    def join(self) -> None:
        """Wait for this rank's thread, and raise what it met."""
        self._thread.join()
        if self._failed is not None:
            raise self._failed

    def give_up_after(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds
        self._thread.join()

    def _run(self) -> None:
        try:
            try:
                entries = self.taken.write(self.staging, self.before)
                self._leave({"files": entries})
            except Exception as error:
                if self.rank:
                    self._leave({"error": str(error)})
                raise
            finally:
                self.taken.files.clear()  # the copies
            if self.rank == 0:
                self.saver.finish(self.staging, self._collect(), self.before, self.state)
        except Exception as error:
            self._failed = error

    def _note(self, rank: int) -> Path:
        return self.staging / f".note-{rank:04d}.json"

    def _leave(self, note: Mapping[str, Any]) -> None:
        write_atomic(self._note(self.rank), json.dumps(note).encode())

    def _collect(self) -> Entries:
        entries: Entries = {}
        for rank in range(self.size):
            while not self._note(rank).exists():
                if self._deadline is not None and time.monotonic() > self._deadline:
                    raise StorageError(5, f"rank {rank} never wrote its part of {self.staging}")
                time.sleep(_LOOK)
            note = json.loads(self._note(rank).read_text())
            if "error" in note:
                raise StorageError(5, f"rank {rank} could not write its part: {note['error']}")
            entries |= note["files"]
        for rank in range(self.size):
            self._note(rank).unlink()
        return entries
