"""The commands of fm.py, on a Python that is new enough."""

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from environment import (
    FRONTENDS,
    FRONTENDS_EXTRAS,
    LAB_EXTRAS,
    MAIN,
    ROOT,
    TEST_EXTRAS,
    XLA,
    XLA_EXTRAS,
    XLA_TEST_EXTRAS,
)
from install import SetupError


def run(name: str, argv: list[str]) -> int:
    """Carry out a command and return its exit code: 2 for what the user can put right."""
    commands = {
        "setup": setup,
        "lab": lab,
        "lab-xla": lab_xla,
        "lab-frontends": lab_frontends,
        "check": check,
        "test": test,
        "soak": soak,
        "parity": parity,
        "audit": audit,
        "bench": bench,
        "clean": clean,
    }
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
    python = MAIN.ensure(args.extras.split(","), args.installer)
    print(f"Ready in {time.monotonic() - start:.0f} s. Its Python: {python}")
    return 0


def lab(argv: list[str]) -> int:
    start = time.monotonic()
    python = MAIN.ensure(LAB_EXTRAS)
    if XLA.is_complete():
        XLA.ensure(())  # lists its kernel again if .venv was made anew
    print(f"The environment is ready ({time.monotonic() - start:.0f} s).", flush=True)
    _replace([str(python), "-m", "fmlab.cli", "lab", *argv])
    return 0


def lab_xla(argv: list[str]) -> int:
    """Prepare the environment of the chapters on XLA, beside the lab's, and its kernel."""
    parser = argparse.ArgumentParser(prog="make lab-xla ARGS=")
    parser.add_argument("--installer", default="auto", choices=["auto", "uv", "pip"])
    args = parser.parse_args(argv)
    if reason := XLA.why_not():
        raise SetupError(f"no environment for XLA here: {reason}.\nEverything else works: make lab")
    start = time.monotonic()
    MAIN.ensure(LAB_EXTRAS, args.installer)
    XLA.ensure(XLA_EXTRAS, args.installer)
    print(
        f"Ready in {time.monotonic() - start:.0f} s. The chapters that need torch_xla run with the kernel "
        f"{XLA.kernel.title!r}: make lab, and choose it at the top right of the notebook."
    )
    return 0


def lab_frontends(argv: list[str]) -> int:
    """Prepare the environment with TensorFlow and JAX, which a chapter compares with PyTorch."""
    parser = argparse.ArgumentParser(prog="make lab-frontends ARGS=")
    parser.add_argument("--installer", default="auto", choices=["auto", "uv", "pip"])
    args = parser.parse_args(argv)
    if reason := FRONTENDS.why_not():
        raise SetupError(f"no environment with TensorFlow and JAX here: {reason}.\nThe rest works: make lab")
    start = time.monotonic()
    FRONTENDS.ensure(FRONTENDS_EXTRAS, args.installer)
    print(f"Ready in {time.monotonic() - start:.0f} s. Chapter 1.12 runs TensorFlow and JAX now: make lab")
    return 0


def check(argv: list[str]) -> int:
    return _tests(["--quick", *argv])


def test(argv: list[str]) -> int:
    MAIN.ensure(TEST_EXTRAS)
    if not {"-h", "--help", "--quick"} & set(argv):
        _prepare_frontends(strict="--strict-system" in argv)
    if _wants_xla(argv):
        argv = [*argv, *_prepare_xla(strict="--strict-system" in argv)]
    return _tests(argv)


def _wants_xla(argv: list[str]) -> bool:
    """Whether a step in .venv-xla may run: with the options --quick, --help or --only unit none does."""
    if {"-h", "--help", "--quick"} & set(argv):
        return False
    only = [word for word in argv if word.startswith("--only")]
    return not only or "xla" in " ".join(argv)


def _prepare_xla(strict: bool) -> list[str]:
    """Make the environment of the tests on XLA; where it cannot be, the option that says why they are left
    out."""
    try:
        XLA.ensure(XLA_TEST_EXTRAS)
    except SetupError as error:
        reason = str(error)
        if strict and XLA.why_not() is None:
            raise
        print(f"The tests on XLA are left out: {reason}", flush=True)
        return ["--without-xla", reason.splitlines()[-1]]
    return []


def _prepare_frontends(strict: bool) -> None:
    """Make the environment with TensorFlow and JAX; where it cannot be, its tests are skipped and say so."""
    try:
        FRONTENDS.ensure(FRONTENDS_EXTRAS)
    except SetupError as error:
        if strict and FRONTENDS.why_not() is None:
            raise
        print(f"The tests with TensorFlow and JAX are left out: {error}", flush=True)


def _tests(argv: list[str]) -> int:
    python = MAIN.ensure(TEST_EXTRAS)
    _replace([str(python), str(ROOT / "scripts" / "checks.py"), *argv])
    return 0


def soak(argv: list[str]) -> int:
    """What only many repetitions show; only local processes and temporary folders."""
    python = MAIN.ensure(TEST_EXTRAS)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # many ranks share the cores
    _replace([str(python), "-m", "tests.soak", *argv])
    return 0


def parity(argv: list[str]) -> int:
    """Every cell that has no outcome yet; --fresh for all."""
    python = MAIN.ensure(TEST_EXTRAS)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # many ranks share the cores
    _replace([str(python), "-m", "fmlab.parallel.matrix", *argv])
    return 0


def audit(argv: list[str]) -> int:
    """The step of the checks, and a vulnerability service where one answers."""
    python = MAIN.ensure(TEST_EXTRAS)
    _replace([str(python), str(ROOT / "scripts" / "audit.py"), "--online", *argv])
    return 0


def bench(argv: list[str]) -> int:
    python = MAIN.ensure(LAB_EXTRAS)
    _replace([str(python), "-m", "fmlab.cli", "bench", *argv])
    return 0


def _replace(command: list[str]) -> None:
    """Become the command, so that an interrupt reaches it and nothing else."""
    os.chdir(ROOT)
    sys.stdout.flush()
    os.execve(command[0], command, MAIN.variables())


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
    parser.add_argument("--all", action="store_true", help="remove .venv, .venv-xla, .venv-frontends")
    args = parser.parse_args(argv)
    for path in leftovers(ROOT):
        print(f"removing {path.relative_to(ROOT)}")
        shutil.rmtree(path)
    for made in (MAIN, XLA, FRONTENDS) if args.all else ():
        if made.path.exists():
            print(f"removing {made.folder}")
            subprocess.run(["rm", "-rf", str(made.path)], check=True)
    return 0


def leftovers(root: Path) -> list[Path]:
    """What builds and tests left under `root`; nothing of the environments, and never a learner's runs/."""
    found = {path for pattern in LEFTOVERS for path in root.glob(pattern) if path.is_dir()}
    environments = {MAIN.folder, XLA.folder, FRONTENDS.folder}
    return sorted(path for path in found if not environments & set(path.relative_to(root).parts))
