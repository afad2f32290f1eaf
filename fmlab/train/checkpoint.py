"""Checkpoints of a run: whole or absent, checksummed, independent of the number of ranks.

out/steps/000200/   model.safetensors optimizer.safetensors manifest.json run.json tokenizer.json
out/latest          the name of the newest complete one
out/model/          the trained model and tokenizer in Hugging Face's format
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fmlab.data import TextTokenizer
from fmlab.parallel import Engine
from fmlab.storage import StorageError, check_free_space, write_atomic
from fmlab.train.launch import World

_STEPS, _LATEST, _RUN = "steps", "latest", "run.json"


@dataclass(frozen=True)
class RunState:
    """What a run needs besides weights and optimizer to go on as if it had not stopped.

    step: finished optimizer steps; updates: those that changed the weights; sampler: see TokenSampler;
    losses: of all steps so far; settings: of the run, for the reader.
    """

    step: int
    updates: int
    sampler: dict[str, Any]
    losses: list[float]
    settings: dict[str, Any]


def save(
    out: str | Path, engine: Engine, state: RunState, tokenizer: TextTokenizer, world: World, keep: int = 2
) -> Path:
    """Write a checkpoint of step state.step, then delete all but the newest `keep`; every rank calls it.

    Raises StorageError on every rank when the disk is full; older checkpoints are then as before.
    """
    root = Path(out)
    final = root / _STEPS / f"{state.step:06d}"
    staging = final.parent / f".{final.name}.incomplete"

    def clear() -> None:
        shutil.rmtree(staging, ignore_errors=True)

    def finish() -> None:
        write_atomic(staging / _RUN, json.dumps(vars(state), indent=1).encode())
        tokenizer.save(staging)
        shutil.rmtree(final, ignore_errors=True)  # left by a run that was resumed from an older step
        staging.rename(final)
        write_atomic(root / _LATEST, final.name.encode())
        _retain(root, state.step, keep)

    world.on_first(clear)
    try:
        engine.save(staging)
        world.on_first(finish)
    except (StorageError, OSError):
        if world.is_first:
            clear()
        raise
    return final


def _retain(root: Path, step: int, keep: int) -> None:
    """Delete all but the newest `keep` up to `step`; later ones are of a run that was taken back."""
    found = steps(root)
    kept = [s for s in found if s <= step][-keep:]
    for other in set(found) - set(kept):
        shutil.rmtree(root / _STEPS / f"{other:06d}", ignore_errors=True)


def load(path: str | Path, engine: Engine) -> RunState:
    """Put weights and optimizer state of a checkpoint into `engine`, under any layout; its run state.

    Raises ValueError that names the parameters that do not fit, StorageError that names a damaged file.
    """
    state = run_state(path)
    engine.load(path)
    return state


def run_state(path: str | Path) -> RunState:
    """The run state of a checkpoint. Raises ValueError when there is none, or when it is damaged."""
    folder = Path(path)
    try:
        state = RunState(**json.loads((folder / _RUN).read_text()))
        kinds = [(state.step, int), (state.updates, int), (state.sampler, dict), (state.losses, list)]
        if wrong := [value for value, kind in kinds if not isinstance(value, kind)]:
            raise TypeError(f"{wrong[0]!r} is of the wrong type")
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{folder} is not a checkpoint of a run: it has no {_RUN}") from None
    except (json.JSONDecodeError, TypeError, UnicodeDecodeError) as error:
        raise ValueError(f"{folder / _RUN} is damaged: {error}") from error
    return state


def steps(out: str | Path) -> list[int]:
    """The steps that have a complete checkpoint in the folder `out`, in order."""
    folder = Path(out) / _STEPS
    return sorted(int(p.name) for p in folder.glob("[0-9]*") if p.name.isdecimal() and (p / _RUN).exists())


def latest(out: str | Path) -> Path:
    """The newest complete checkpoint in the folder `out`. Raises ValueError when there is none."""
    found = steps(out)
    if not found:
        raise ValueError(
            f"there is no checkpoint in {out}: start without resume, or give the folder of a run"
        )
    marker = Path(out) / _LATEST
    name = marker.read_text(errors="replace").strip() if marker.exists() else ""
    path = Path(out) / _STEPS / name
    return path if name.isdecimal() and (path / _RUN).exists() else Path(out) / _STEPS / f"{found[-1]:06d}"


def sweep(out: str | Path) -> None:
    """Delete what a run left that was killed while it wrote. Only for who holds the folder alone."""
    root = Path(out)
    for folder in (root / _STEPS).glob(".*"):
        shutil.rmtree(folder, ignore_errors=True)
    for left in root.glob(".*.writing-*"):
        shutil.rmtree(left) if left.is_dir() else left.unlink()


def check_space(out: str | Path, parameters: int, keep: int) -> None:
    """Raise StorageError unless there is room for the checkpoints of a model with that many parameters.

    Weights and two moments, four bytes each; one checkpoint more than is kept, and the model at the end.
    """
    check_free_space(out, (12 * (keep + 1) + 4) * parameters)
