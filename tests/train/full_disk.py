"""Runs on file systems that are full, read-only or gone: `python -m tests.train.full_disk FOLDER` in a mount
namespace of its own, where FOLDER is ours to mount on. Prints a JSON of what each case came to."""

import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fmlab.cli import guarded
from fmlab.storage import StorageError
from fmlab.train import Callback, checkpoint
from tests.train.tiny_run import tiny_train

STEPS = 6


class At(Callback):
    """Do something to the disk when a step has been made, before its checkpoint is written."""

    def __init__(self, step: int, act: Callable[[], Any]) -> None:
        self.step, self.act = step, act

    def on_step(self, metrics: Any) -> None:
        if metrics.step == self.step:
            self.act()


def mount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], check=True)


def unmount(folder: Path) -> None:
    subprocess.run(["umount", "-l", str(folder)], check=True)


def read_only(folder: Path) -> None:
    subprocess.run(["mount", "--bind", str(folder), str(folder)], check=True)
    remount(folder, "bind,ro")


def remount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True)


def weights(result: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in result.model.state_dict().items()}


def run(out: Path, *callbacks: Callback, **changes: Any) -> Any:
    settings = {"steps": STEPS, "save_every": 1, "keep": STEPS, "out": str(out)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tiny_train(callbacks=callbacks, **(settings | changes))


def state(out: Path) -> dict[str, Any]:
    """The checkpoints there are, which of them are damaged, and what else lies about."""
    found = checkpoint.steps(out) if out.exists() else []
    steps = out / checkpoint.STEPS
    known = {checkpoint.folder_of(out, step).name for step in found}
    return {
        "steps": found,
        "damaged": [step for step in found if checkpoint.damage(checkpoint.folder_of(out, step))],
        "latest": (out / checkpoint.LATEST).read_text() if (out / checkpoint.LATEST).exists() else "",
        "rubbish": sorted({path.name for path in steps.iterdir()} - known) if steps.exists() else [],
        "loose": sorted(path.name for path in out.glob(".*writing*")) if out.exists() else [],
    }


def case(
    folder: Path,
    expected: dict[str, torch.Tensor],
    options: str,
    *callbacks: Callback,
    room: Callable[[], Any],
    **changes: Any,
) -> dict[str, Any]:
    """A run that cannot save to its end, then, with room made, its resumption."""
    mount(folder, options)
    out, said = folder / "run", ""
    try:
        run(out, *callbacks, **changes)
    except StorageError as error:
        said = str(error)
    found: dict[str, Any] = {"said": said, **state(out)}
    room()
    try:
        resumed = weights(run(out, resume=bool(found["steps"]), **changes))
        found["same"] = all(torch.equal(resumed[name], expected[name]) for name in expected)
        found["after"] = state(out)
    except (OSError, ValueError) as error:
        found["after"] = repr(error)
    unmount(folder)
    return found


def main(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    other = folder.parent / "elsewhere"
    expected = weights(run(other / "whole"))
    out, gone, filler = folder / "run", folder / "gone", folder / "another user's"

    def fill() -> None:
        filler.write_bytes(bytes(shutil.disk_usage(folder).free - 100_000))

    def litter() -> None:
        for number in range(os.statvfs(folder).f_favail - 2):
            (folder / f"litter-{number}").touch()

    def clean() -> None:
        for file in folder.glob("litter-*"):
            file.unlink()

    for beside in (False, True):
        name = "full, written beside" if beside else "full"
        found[name] = case(folder, expected, "size=8m", At(4, fill), room=filler.unlink, async_save=beside)
    found["no inodes"] = case(folder, expected, "size=8m,nr_inodes=99", At(4, litter), room=clean)
    steps = out / checkpoint.STEPS  # all of the run's folder cannot be: a file in it is open for writing
    protect = At(3, lambda: read_only(steps))
    found["read-only"] = case(folder, expected, "size=8m", protect, room=lambda: unmount(steps))
    vanish = At(3, lambda: out.rename(gone))
    found["vanished"] = case(folder, expected, "size=8m", vanish, room=lambda: _back(gone, out))

    mount(folder, "size=16k")
    started = guarded("train", lambda: run(folder / "run") and 0)
    found["too small"] = {"code": started, "left": sorted(p.name for p in (folder / "run").rglob("*"))}
    unmount(folder)
    shutil.rmtree(other)
    return found


def _back(gone: Path, out: Path) -> None:
    if out.exists():
        shutil.rmtree(out)
    gone.rename(out)


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
