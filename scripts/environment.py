"""Make .venv: create it, install the tested set, and know in a moment whether that is done already."""

import fcntl
import hashlib
import json
import os
import platform
import shutil
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import install
from install import SetupError, quiet, step

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "fmlab-stamp.json"
# OpenMP threads that wait by spinning slow a training step 6-fold once another program wants a core.
PASSIVE = ("OMP_WAIT_POLICY", "passive")


def key(root: Path = ROOT, version: str = platform.python_version()) -> str:
    """A hash of all that an installation depends on, but for the extras chosen.

    The folder is part of it: a virtual environment holds absolute paths, so a moved clone needs a new one.
    """
    project = tomllib.loads((root / "pyproject.toml").read_text())
    hatch = project.get("tool", {}).get("hatch", {})
    facts = [project["project"], project["build-system"], hatch, version, str(root), "stamp 2"]
    text = json.dumps(facts, sort_keys=True) + (root / "constraints.txt").read_text()
    return hashlib.sha256(text.encode()).hexdigest()


def read_stamp(path: Path = STAMP) -> dict:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def complete(stamp: dict, wanted: str, extras: list[str]) -> bool:
    """Whether the environment that left `stamp` already is what is asked for."""
    return stamp.get("key") == wanted and set(extras) <= set(stamp.get("extras", []))


def ensure(extras: list[str], installer: str = "auto") -> Path:
    """The Python of a complete .venv with these extras, made or completed where needed.

    Raises SetupError with the fix when that is not possible.
    """
    with _one_at_a_time():
        version = quiet([str(PYTHON), "-c", "import platform; print(platform.python_version())"])
        stamp = read_stamp()
        if version and complete(stamp, key(version=version), extras):
            return PYTHON
        _make(stamp, version, extras, installer)
    return PYTHON


def _make(stamp: dict, version: str | None, extras: list[str], installer: str) -> None:
    moved = stamp.get("root") not in (None, str(ROOT))
    if VENV.exists() and (version is None or moved or not _supported(version)):
        _discard(f".venv {'was made elsewhere' if moved else 'does not run'}: making it anew")
        version = None
    extras = sorted({*extras, *stamp.get("extras", [])})
    tools = install.Tools.find(installer)
    print(
        f"Setting up fmlab in {VENV} with {tools.name} (Python {version or platform.python_version()}).",
        flush=True,
    )
    _check_disk()
    STAMP.unlink(missing_ok=True)  # until all is done, the next run must not take this for complete
    if not PYTHON.exists():
        with step("creating the virtual environment", "a few seconds"):
            install.create_venv(VENV, tools)
    install.packages(ROOT, VENV, extras, tools)
    if "lab" in extras:
        with step("registering the Jupyter kernel", "a second"):
            command = [str(PYTHON), "-m", "ipykernel", "install", "--sys-prefix"]
            install.run([*command, "--env", *PASSIVE], VENV)
    with step("checking that PyTorch and fmlab load", "a few seconds"):
        install.run([str(PYTHON), "-c", "import torch, fmlab.cli"], VENV)
    version = quiet([str(PYTHON), "-c", "import platform; print(platform.python_version())"])
    done = {"key": key(version=str(version)), "extras": extras, "root": str(ROOT)}
    STAMP.write_text(json.dumps(done, indent=1) + "\n")


def _supported(version: str) -> bool:
    from fm import supported

    return supported(tuple(int(part) for part in version.split(".")[:2]))


def _discard(why: str) -> None:
    if VENV.is_symlink() or (not (VENV / "pyvenv.cfg").exists() and any(VENV.iterdir())):
        raise SetupError(f"{VENV} is no virtual environment; move it away and run this again")
    print(why, flush=True)
    shutil.rmtree(VENV)


def _check_disk() -> None:
    free = shutil.disk_usage(ROOT).free / 2**30
    if free < 3:
        raise SetupError(f"{free:.1f} GB are free under {ROOT}; this needs 3 GB (8 GB with CUDA)")


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Two terminals may ask at once; the second waits for the first and finds the work done."""
    with open(ROOT / ".venv.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("waiting for another set-up of this folder to finish ...", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def child_environment() -> dict[str, str]:
    """For programs of .venv: its bin folder first on PATH, as an activated environment has it."""
    env = {PASSIVE[0]: PASSIVE[1], **os.environ, "VIRTUAL_ENV": str(VENV)}
    env["PATH"] = f"{VENV / 'bin'}{os.pathsep}{env.get('PATH', os.defpath)}"
    for name in ("PYTHONHOME", "MAKEFLAGS", "MFLAGS", "MAKELEVEL"):  # a make inside must not see our options
        env.pop(name, None)
    return env


if __name__ == "__main__":
    sys.exit("run 'make setup' instead")
