"""Run the checks in steps and sum them up: `make check` (--quick) and `make test`. Runs inside .venv.

The last line is "N passed, N failed, N skipped" over all steps. A step that is no test run (lint, types,
audit) counts as one check. The output of each step is kept in test-artifacts/ and shown when the step fails.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

from environment import MAIN, ROOT, XLA
from summary import Count, count_junit, final_line, table

ARTIFACTS = ROOT / "test-artifacts"
SHOWN = 400  # lines of a failing step
TOGETHER = 75 * 60  # seconds for all steps: set-up takes minutes more, and what CI gives is 90 minutes
PATHS = ("fmlab", "tests", "scripts", "notebooks", "examples")


@dataclass(frozen=True)
class Step:
    """One command. `tests` says that it is pytest, whose results are counted one by one.

    `absent`: why it cannot run here; then it counts as one skipped test with that reason.
    """

    name: str
    command: list[str]
    seconds: float  # after which it is ended
    tests: bool = False
    env: dict[str, str] = field(default_factory=dict)
    absent: str = ""


def _pytest(
    name: str, arguments: list[str], seconds: float, workers: int, python: Path | None = None, **env: str
) -> Step:
    spread = ["-n", str(workers), "--dist", "loadfile"] if workers > 1 else ["-p", "no:xdist"]
    command = [str(python or sys.executable), "-m", "pytest", "-q", "--durations=15", *spread, *arguments]
    return Step(name, [*command, f"--junitxml={ARTIFACTS / name}.xml"], seconds, tests=True, env=env)


def steps(quick: bool, strict: bool, cores: int, without_xla: str = "") -> list[Step]:
    """What is checked, cheapest first. Tests on many ranks share one process, with one pool of each size;
    those that launch programs of their own run two at a time.

    without_xla: why there is no .venv-xla here.
    """
    python, workers = sys.executable, min(cores, 4)
    system = ["--strict-system"] if strict else []
    plain = "not multirank and not launched and not browser and not xla"
    ranks = "multirank and not launched and not browser and not matrix"
    first = [
        Step("lint", [python, "-m", "ruff", "check", *PATHS], 40),
        Step("format", [python, "-m", "ruff", "format", "--check", *PATHS], 40),
        Step("types", [python, "-m", "mypy", "fmlab"], 200),
        Step("audit", [python, str(ROOT / "scripts" / "audit.py")], 120),
    ]
    if quick:
        chosen = ["tests", "-m", f"{plain} and not slow", *system]
        return [*first, _pytest("unit", chosen, 600, workers, OMP_NUM_THREADS="1")]
    nbval = ["--nbval", "--nbval-cell-timeout=180", "--nbval-sanitize-with=tests/notebooks/sanitize.cfg"]
    here = [*nbval, "--nbval-current-env"]
    return [
        *first,
        _pytest("unit", ["tests", "-m", plain, *system], 1200, workers, OMP_NUM_THREADS="1"),
        _pytest("ranks", ["tests", "-m", ranks, *system], 1500, 1),
        _pytest("launched", ["tests", "-m", "launched", *system], 600, min(workers, 2), OMP_NUM_THREADS="1"),
        _pytest("matrix", ["tests/parallel", "-m", "matrix", *system], 600, 1, OMP_NUM_THREADS="1"),
        # one thread each: with two, two notebooks on two cores wait for each other and take twice as long
        _pytest("notebooks", [*here, *notebooks(ROOT)], 1800, min(workers, 2), OMP_NUM_THREADS="1"),
        _pytest("browser", ["tests", "-m", "browser", *system], 360, 1),
        *_xla_steps(nbval, workers, without_xla),
    ]


def _xla_steps(nbval: list[str], workers: int, absent: str) -> list[Step]:
    """What runs in .venv-xla: its own tests, and those of the rooms that both versions of PyTorch share.

    The notebooks run there too, driven from .venv by the kernel that they name.
    """
    shared = [f"tests/{room}" for room in ("models", "objectives", "train", "sim/test_charge.py")]
    chosen = ["tests/xla", *shared, "-m", "not multirank and not launched and not browser and not slow"]
    made = [
        _pytest("xla", chosen, 700, min(workers, 2), python=XLA.python, OMP_NUM_THREADS="1"),
        _pytest("xla-notebooks", [*nbval, *notebooks(ROOT, XLA.kernel.name)], 300, min(workers, 2)),
    ]
    return [replace(step, absent=absent) for step in made]


def notebooks(root: Path, kernel: str = MAIN.kernel.name) -> list[str]:
    """Every committed notebook of that kernel, solved and unsolved."""
    found = sorted((root / "notebooks").rglob("*.ipynb"))
    committed = [path for path in found if ".ipynb_checkpoints" not in path.parts]
    return [str(path.relative_to(root)) for path in committed if _kernel(path) == kernel]


def _kernel(notebook: Path) -> str:
    try:
        return str(json.loads(notebook.read_text())["metadata"]["kernelspec"]["name"])
    except (ValueError, KeyError):
        return MAIN.kernel.name  # not a notebook: let its step fail and say so


def run(step: Step) -> Count:
    """Run a step to its end or its time limit, and count its results."""
    log, junit = ARTIFACTS / f"{step.name}.log", ARTIFACTS / f"{step.name}.xml"
    junit.unlink(missing_ok=True)
    if step.absent:
        log.write_text(step.absent)
        return Count(step.name, 0.0, skipped=1, skip_reasons=(step.absent,))
    start = time.monotonic()
    with open(log, "wb") as sink:
        process = subprocess.Popen(
            step.command,
            cwd=ROOT,
            env={**_variables(step), **step.env},
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that the whole step can be ended at once
        )
        code = _wait(process, step)
    seconds = time.monotonic() - start
    return count(step, code, seconds)


def in_time(step: Step, left: float) -> Step:
    """The step, to be ended when the time of all steps is over."""
    return replace(step, seconds=max(1.0, min(step.seconds, left)))


def _variables(step: Step) -> dict[str, str]:
    inside = XLA if step.command[0] == str(XLA.python) else MAIN
    return inside.variables()


def count(step: Step, code: int | None, seconds: float) -> Count:
    """The results of a step that ended with `code` (None: at its time limit)."""
    junit = ARTIFACTS / f"{step.name}.xml"
    result = Count(step.name, seconds)
    if step.tests and junit.exists():
        result = count_junit(step.name, seconds, junit.read_text())
    elif code == 0 and not step.tests:
        result = Count(step.name, seconds, passed=1)
    if code is None:
        result = result.add_failure(f"ended at its limit of {step.seconds:.0f} s")
    elif code != 0 and result.failed == 0:
        result = result.add_failure("no test was found" if code == 5 else f"ended with code {code}")
    return result


def _wait(process: subprocess.Popen[bytes], step: Step) -> int | None:
    start = time.monotonic()
    try:
        while True:
            try:
                return process.wait(timeout=min(60.0, step.seconds))
            except subprocess.TimeoutExpired:
                past = time.monotonic() - start
                if past >= step.seconds:
                    return None
                print(f"  {step.name}: {past:.0f} s", flush=True)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # also what the step left running
        process.wait()


def _show(name: str) -> None:
    lines = (ARTIFACTS / f"{name}.log").read_text(errors="replace").splitlines()
    print(f"\n----- {name} failed; its output" + (f" (last {SHOWN} lines)" if len(lines) > SHOWN else ""))
    print("\n".join(lines[-SHOWN:]))
    print(f"----- end of {name}\n", flush=True)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="make test ARGS=", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="lint, types, audit and the quick unit tests")
    parser.add_argument("--strict-system", action="store_true", help="fail where a system part is absent")
    parser.add_argument("--only", default="", metavar="STEPS", help="comma-separated: unit,ranks")
    parser.add_argument("--without-xla", default="", metavar="WHY", help="leave out what needs .venv-xla")
    args = parser.parse_args(argv)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    chosen = steps(args.quick, args.strict_system, cores, args.without_xla)
    names = [step.name for step in chosen]
    only = [name for name in args.only.split(",") if name]
    if unknown := [name for name in only if name not in names]:
        print(f"there is no step {unknown[0]!r}; the steps are: {', '.join(names)}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    ARTIFACTS.mkdir(exist_ok=True)
    counts, end = [], time.monotonic() + TOGETHER
    for step in chosen:
        if only and step.name not in only:
            continue
        print(f"{step.name} ...", flush=True)
        counts.append(run(in_time(step, end - time.monotonic())))
        if counts[-1].failed:
            _show(step.name)
    reasons = Counter(reason for result in counts for reason in result.skip_reasons)
    for reason, times in reasons.most_common():
        print(f"skipped {times}: {reason}")
    print(f"\n{table(counts)}\n\n{final_line(counts)}", flush=True)
    return 1 if any(result.failed for result in counts) else 0


if __name__ == "__main__":
    try:
        exit_code = main(sys.argv[1:])
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        exit_code = 130
    sys.exit(exit_code)
