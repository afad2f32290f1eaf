"""`need_xla()`: the first cell of the chapters that run on torch_xla.

torch_xla's last release needs PyTorch 2.9, so these chapters have an environment and a kernel of their own.
In that kernel the call sets torch_xla up; in any other it says how to get there.
"""

import importlib.util
import platform
import subprocess
import sys
from pathlib import Path

from fmlab.lab.curriculum import XLA_KERNEL, notebooks_folder

TITLE = XLA_KERNEL.title
MACHINE = "linux-x86_64"


class NeedsXLA(ImportError):
    """This kernel has no torch_xla; Jupyter shows one line, which says what to do."""

    def _render_traceback_(self) -> list[str]:
        return [f"\x1b[1;31m{self}\x1b[0m"]


def need_xla(install: bool = False, capture: bool = True) -> None:
    """Set up torch_xla for a lesson, before anything else uses it; prints one line.

    install: where this kernel has no torch_xla, make the environment that has (Linux on x86_64, 7.6 GB, some
             minutes), and show how far it is
    capture: keep compiled programs for `fmlab.backends.xla_program.capture`

    Raises NeedsXLA, an ImportError, in a kernel without torch_xla, and ValueError when it comes too late.
    """
    if importlib.util.find_spec("torch_xla") is None:
        if install and _can_install() is None:
            _install()
            raise NeedsXLA(
                f"Ready. Now choose the kernel {TITLE!r} at the top right, and run this cell again."
            )
        raise NeedsXLA(how_to_get_it())
    from fmlab.backends import get_backend
    from fmlab.backends.xla_environment import configure

    configure(fast_compile=True, capture=capture)
    backend = get_backend("xla")  # before the first backward pass: autograd counts devices once
    print(backend.describe())


def how_to_get_it() -> str:
    """One line: why this kernel cannot run the chapter, and what to do."""
    if reason := _can_install():
        return f"This chapter runs on torch_xla, and {reason}. Its stored outputs show what it does."
    if _environment().exists():
        return f"This chapter runs on torch_xla: choose the kernel {TITLE!r} at the top right."
    return (
        "This chapter runs on torch_xla, which is not in this kernel. In a terminal: make lab-xla (7.6 GB, "
        f"some minutes), or here: need_xla(install=True). Then choose the kernel {TITLE!r} at the top right."
    )


def _can_install() -> str | None:
    """Why this machine cannot have it; None when it can."""
    here = f"{sys.platform}-{platform.machine()}"
    if here != MACHINE:
        return f"torch_xla exists for {MACHINE} only, while this is {here}"
    if not (_root() / "scripts" / "fm.py").is_file():
        return "fmlab is not installed from its repository here; in a clone: pip install '.[xla,kernel]'"
    return None


def _root() -> Path:
    try:
        return notebooks_folder().parent
    except FileNotFoundError:
        return Path.cwd()


def _environment() -> Path:
    return _root() / ".venv-xla" / "fmlab-stamp.json"


def _install() -> None:
    """Run the set-up with its messages in the page."""
    command = [sys.executable, str(_root() / "scripts" / "fm.py"), "lab-xla"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
    if process.returncode != 0:
        raise NeedsXLA("The set-up did not succeed; what it said stands above.")
