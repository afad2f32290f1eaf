"""The commands of fm.py, on a Python that is new enough."""

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import environment
from install import SetupError

LAB_EXTRAS = ["lab", "hf", "data", "log"]
TEST_EXTRAS = [*LAB_EXTRAS, "test"]


def run(name: str, argv: list[str]) -> int:
    """Carry out a command and return its exit code: 2 for what the user can put right."""
    commands = {"setup": setup, "lab": lab, "check": check, "test": test, "bench": bench, "clean": clean}
    if name not in commands:
        print(f"unknown command {name!r}; there are: {', '.join(commands)}", file=sys.stderr)
        return 2
    try:
        return commands[name](argv)
    except SetupError as error:
        print(f"\n{error}", file=sys.stderr)
        return 2


def setup(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="make setup ARGS=")
    parser.add_argument(
        "--extras", default=",".join(LAB_EXTRAS), help="comma-separated (default: %(default)s)"
    )
    parser.add_argument("--installer", default="auto", choices=["auto", "uv", "pip"])
    args = parser.parse_args(argv)
    start = time.monotonic()
    python = environment.ensure(args.extras.split(","), args.installer)
    print(f"Ready in {time.monotonic() - start:.0f} s. Its Python: {python}")
    return 0


def lab(argv: list[str]) -> int:
    start = time.monotonic()
    python = environment.ensure(LAB_EXTRAS)
    print(f"The environment is ready ({time.monotonic() - start:.0f} s).", flush=True)
    _replace([str(python), "-m", "fmlab.cli", "lab", *argv])
    return 0


def check(argv: list[str]) -> int:
    return _tests(["--quick", *argv])


def test(argv: list[str]) -> int:
    return _tests(argv)


def _tests(argv: list[str]) -> int:
    python = environment.ensure(TEST_EXTRAS)
    _replace([str(python), str(environment.ROOT / "scripts" / "checks.py"), *argv])
    return 0


def bench(argv: list[str]) -> int:
    python = environment.ensure(LAB_EXTRAS)
    _replace([str(python), "-m", "fmlab.cli", "bench", *argv])
    return 0


def _replace(command: list[str]) -> None:
    """Become the command, so that an interrupt reaches it and nothing else."""
    os.chdir(environment.ROOT)
    sys.stdout.flush()
    os.execve(command[0], command, environment.child_environment())


LEFTOVERS = (
    "build",
    "dist",
    "test-artifacts",
    ".pytest_cache",
    ".mypy_cache",
    ".ruff_cache",
    ".hypothesis",
    "**/__pycache__",
    "**/.ipynb_checkpoints",
    "*.egg-info",
)


def clean(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="make clean ARGS=")
    parser.add_argument("--all", action="store_true", help="remove .venv too")
    args = parser.parse_args(argv)
    for path in leftovers(environment.ROOT):
        print(f"removing {path.relative_to(environment.ROOT)}")
        shutil.rmtree(path)
    if args.all and environment.VENV.exists():
        print("removing .venv")
        subprocess.run(["rm", "-rf", str(environment.VENV)], check=True)
    return 0


def leftovers(root: Path) -> list[Path]:
    """What builds and tests left under `root`; nothing inside .venv, and never a learner's runs/."""
    found = {path for pattern in LEFTOVERS for path in root.glob(pattern) if path.is_dir()}
    return sorted(path for path in found if ".venv" not in path.relative_to(root).parts)
