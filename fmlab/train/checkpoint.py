"""Checkpoints of a run: whole or absent, checksummed, independent of the number of ranks.

out/steps/000200/   model.safetensors optimizer.safetensors run.json tokenizer.json ... manifest.json
out/latest          the name of the newest complete one; write an older name there to go back to it
out/model/          the trained model and tokenizer in Hugging Face's format

This file reads them; saver.py writes them.
"""

import json
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fmlab import storage
from fmlab.parallel import Engine
from fmlab.parallel.checkpoint import on_first
from fmlab.storage import StorageError, check_free_space

STEPS, LATEST, RUN = "steps", "latest", "run.json"


@dataclass(frozen=True)
class RunState:
    """What a run needs besides weights and optimizer to go on as if it had not stopped.

    step: finished optimizer steps; updates: those that changed the weights; sampler: see TokenSampler;
    losses: of all steps so far; settings: of the run; validation: (step, loss, count) of each measurement;
    extra: see Engine.extra_state.
    """

    step: int
    updates: int
    sampler: dict[str, Any]
    losses: list[float]
    settings: dict[str, Any]
    validation: list[tuple[int, float, int]] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)


# region resume
def resume(out: str | Path, engine: Engine) -> tuple[Path, RunState]:
    """Put the newest whole checkpoint of a run into `engine`, under any layout; every rank calls it.

    A damaged one is passed over with a warning that names the file, and the next older one is taken. Raises
    ValueError that names the parameters that do not fit, or says that there is no checkpoint; StorageError
    when none is whole.
    """
    found: list[Path] = on_first(lambda: list(_newest_first(out)), engine.ranks)
    damaged = []
    for path in found:
        try:
            state: RunState = on_first(partial(run_state, path), engine.ranks)
            engine.load(path)
        except StorageError as error:
            damaged.append(str(error))
            continue
        if damaged and engine.is_writer:
            said = "; ".join(damaged)
            warnings.warn(f"{said}. The run goes on from step {state.step} instead", stacklevel=2)
        return path, state
    raise StorageError(
        5, f"no checkpoint in {out} is whole: {'; '.join(damaged)}. Start anew in another folder"
    )


# endregion


def newest_whole(out: str | Path) -> RunState:
    """The run state of the newest checkpoint whose run state is whole: what it was trained with. Raises
    ValueError without a checkpoint, StorageError when all are damaged."""
    problem: StorageError | None = None
    for path in _newest_first(out):
        try:
            return run_state(path)
        except StorageError as error:
            problem = problem or error
    assert problem is not None
    raise problem


def run_state(path: str | Path) -> RunState:
    """The run state of a checkpoint. Raises ValueError when there is none, StorageError when it is
    damaged."""
    folder = Path(path)
    if not (folder / RUN).exists() and not (folder / storage.MANIFEST).exists():
        raise ValueError(f"{folder} is not a checkpoint of a run: it has no {RUN}")
    text = storage.read_file(folder, RUN, listed=False)
    try:
        state = RunState(**json.loads(text))
        kinds = [(state.step, int), (state.updates, int), (state.sampler, dict), (state.losses, list)]
        if wrong := [value for value, kind in kinds if not isinstance(value, kind)]:
            raise TypeError(f"{wrong[0]!r} is of the wrong type")
    except (ValueError, TypeError, RecursionError) as error:
        raise StorageError(5, f"{folder / RUN} is damaged: {error}") from error
    if folder.name.isdecimal() and int(folder.name) != state.step:
        raise StorageError(
            5, f"{folder} is damaged: it is named after another step than {state.step}, its own"
        )
    return state


def damage(path: str | Path) -> str:
    """What is wrong with a checkpoint, by file; "" if nothing is."""
    if found := storage.damage(path):
        return found
    try:
        run_state(path)
    except (StorageError, ValueError) as error:
        return str(error)
    return ""


def steps(out: str | Path) -> list[int]:
    """The steps that have a complete checkpoint in the folder `out`, in order."""
    folder = Path(out) / STEPS
    return sorted(
        int(p.name)
        for p in folder.glob("[0-9]*")
        if p.name.isdecimal() and ((p / RUN).exists() or (p / storage.MANIFEST).exists())
    )


def folder_of(out: str | Path, step: int) -> Path:
    """Where the checkpoint of a step is, or would be."""
    return Path(out) / STEPS / f"{step:06d}"


def latest(out: str | Path) -> Path:
    """The newest complete checkpoint in the folder `out`. Raises ValueError when there is none."""
    return next(_newest_first(out))


def _newest_first(out: str | Path) -> Iterator[Path]:
    """The checkpoints to go on from, best first: the one that `latest` names and older ones; all where it
    names none. The writer names a checkpoint before it moves it into place: a name that is not there says
    that it was killed between the two."""
    found = steps(out)
    if not found:
        raise ValueError(
            f"there is no checkpoint in {out}: start without resume, or give the folder of a run"
        )
    marker = Path(out) / LATEST
    name = marker.read_text(errors="replace").strip() if marker.is_file() else ""
    named = int(name) if name.isascii() and name.isdecimal() and len(name) < 20 else -1
    last = named if named in found else found[-1]
    yield from (folder_of(out, step) for step in reversed(found) if step <= last)


# --- before a run, and for who holds the folder alone ----------------------------------------------------


def sweep(out: str | Path) -> None:
    """Delete what a run left that was killed while it wrote. Only for who holds the folder alone."""
    root = Path(out)
    for folder in (root / STEPS).glob(".*"):
        shutil.rmtree(folder, ignore_errors=True)
    storage.recover(root)


def check_space(out: str | Path, parameters: int, keep: int) -> None:
    """Raise StorageError unless there is room for the checkpoints of a model with that many parameters.

    Weights and two moments, four bytes each; one checkpoint more than is kept, and the model at the end.
    """
    check_free_space(out, (12 * (keep + 1) + 4) * parameters)
