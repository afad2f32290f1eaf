"""Whether a shell and SLURM can read a launch script; see kubernetes.py for PyTorchJobs.

list(lint_shell(text))       [] or what bash says, where there is a bash
list(lint_sbatch(text))      [] or what sbatch would refuse or silently pass over
"""

import re
import shutil
import subprocess
from collections.abc import Iterator

_LIMIT = 10.0  # seconds
_NAME = r"[\w.@%+-]+"
_TIME = r"(\d+|\d+:\d{2}|\d+:\d{2}:\d{2}|\d+-\d{1,2}(:\d{2}){0,2})"
_MEMORY = r"\d+[KMGT]?"
_GRES = rf"{_NAME}(:{_NAME})*(,{_NAME}(:{_NAME})*)*"
_COUNT = r"[1-9]\d*"
_TEXT = r"\S.*"

#: sbatch's options (https://slurm.schedmd.com/sbatch.html) that a job of ranks has use for -> their values;
#: None for those that have none
OPTIONS: dict[str, str | None] = {
    "account": _NAME,
    "begin": _TEXT,
    "chdir": _TEXT,
    "comment": _TEXT,
    "constraint": _TEXT,
    "contiguous": None,
    "cpus-per-gpu": _COUNT,
    "cpus-per-task": _COUNT,
    "deadline": _TEXT,
    "dependency": _TEXT,
    "error": _TEXT,
    "exclude": _TEXT,
    "exclusive": r"(user|mcs|topo)?",
    "export": _TEXT,
    "gpus": rf"({_NAME}:)?{_COUNT}",
    "gpus-per-node": rf"({_NAME}:)?{_COUNT}",
    "gpus-per-task": rf"({_NAME}:)?{_COUNT}",
    "gres": _GRES,
    "hint": r"compute_bound|memory_bound|(no)?multithread",
    "hold": None,
    "job-name": _TEXT,
    "kill-on-invalid-dep": r"yes|no",
    "licenses": _TEXT,
    "mail-type": r"[A-Z0-9_]+(,[A-Z0-9_]+)*",
    "mail-user": _TEXT,
    "mem": _MEMORY,
    "mem-per-cpu": _MEMORY,
    "mem-per-gpu": _MEMORY,
    "nice": r"(-?\d+)?",
    "no-requeue": None,
    "nodelist": _TEXT,
    "nodes": rf"{_COUNT}(-{_COUNT})?",
    "ntasks": _COUNT,
    "ntasks-per-gpu": _COUNT,
    "ntasks-per-node": _COUNT,
    "open-mode": r"append|truncate",
    "output": _TEXT,
    "partition": _TEXT,
    "priority": r"\d+",
    "qos": _NAME,
    "requeue": None,
    "reservation": _TEXT,
    "segment": _COUNT,
    "signal": rf"([RB]{{1,2}}:)?{_NAME}(@\d+)?",
    "switches": r"\d+(@\S+)?",
    "threads-per-core": _COUNT,
    "time": _TIME,
    "time-min": _TIME,
    "tmp": _MEMORY,
    "wait-all-nodes": r"[01]",
}


def lint_shell(text: str) -> Iterator[str]:
    """What bash cannot read in a script; nothing is run. Nothing is said where there is no bash."""
    bash = shutil.which("bash")
    if bash is not None:
        done = subprocess.run([bash, "-n"], input=text, capture_output=True, text=True, timeout=_LIMIT)
        if done.returncode:
            yield from done.stderr.strip().splitlines()


def lint_sbatch(text: str) -> Iterator[str]:
    """What sbatch would refuse in its directives, or pass over: those after the first command."""
    lines = text.splitlines()
    if not lines or not lines[0].startswith("#!/"):
        yield "line 1: sbatch takes a script that begins with #! and the path of a shell"
    commands, seen = False, set()
    for number, line in enumerate(lines, 1):
        if not line.startswith("#SBATCH"):
            commands = commands or bool(line.strip() and not line.lstrip().startswith("#"))
            continue
        if commands:
            yield f"line {number}: sbatch passes over a directive that comes after a command"
        name, fault = _directive(line)
        if fault:
            yield f"line {number}: {fault}"
        if name in seen:
            yield f"line {number}: --{name} is given twice"
        seen.add(name)


def _directive(line: str) -> tuple[str, str]:
    """The option of a #SBATCH line, and what is wrong with it, if anything is."""
    found = re.fullmatch(r"#SBATCH\s+--([\w-]+)(?:=(.*?))?(?:\s+#.*)?\s*", line)
    if found is None:
        return "", f"{line!r} is no #SBATCH --OPTION=VALUE"
    name, value = found[1], found[2]
    if name not in OPTIONS:
        return name, f"sbatch has no option --{name} (or none for a job of ranks)"
    form = OPTIONS[name]
    if form is None:
        return name, "" if value is None else f"--{name} takes no value"
    if re.fullmatch(form, value or "") is None:
        return name, f"--{name} cannot be {value!r}" if value is not None else f"--{name} needs a value"
    return name, ""
