"""The command `fmlab`: a table of commands, each loaded only when it is asked for.

A command is `main(argv) -> exit code`. What it raises as ValueError, ImportError or OSError is the user's to
put right: it is printed in one line, and the exit code is 2; `fmlab --debug COMMAND ...` shows the traceback.
"""

import os
import sys
from collections.abc import Callable
from importlib import import_module

from fmlab import __version__

#: command -> (module:function, what it does)
COMMANDS: dict[str, tuple[str, str]] = {
    "doctor": ("fmlab.doctor:main", "what this machine has, and which notebooks it can run"),
    "lab": ("fmlab.lab.launch:main", "open JupyterLab on the first notebook"),
    "train": ("fmlab.train.__main__:main", "train a model: fmlab train gpt2-tiny --steps 200"),
    "checkpoints": ("fmlab.train.checkpoints:main", "list what a run has saved, and verify every file of it"),
    "flight": ("fmlab.train.flight_command:main", "why a run hung: who did not come, in which call, where"),
    "serve": ("fmlab.train.serve.__main__:main", "serve a trained model on this machine: fmlab serve FOLDER"),
    "ranks": ("fmlab._ranks.command:main", "let this host run ranks of a notebook or script elsewhere"),
    "parity": ("fmlab.parallel.cli:main", "prove that a layout computes what one device computes"),
    "preflight": (
        "fmlab.train.preflight:main",
        "find what of a training program will hurt on a TPU or Trainium",
    ),
    "aot": ("fmlab.train.aot:main", "compile a training step for TPUs on a machine without one"),
    "plan": ("fmlab.planner.cli:main", "plan a training step on any chips: memory, time, what bounds it"),
    "dry-run": ("fmlab.sim.cli:main", "model a training step on any number of chips, on shapes alone"),
    "bench": ("fmlab.bench:main", "measure what fmlab promises"),
    "data": ("fmlab.data.cli:main", "list and look into the corpora"),
    "chips": ("fmlab.chips.cli:main", "list, show and compare chips and hosts, with their sources"),
    "graph": ("fmlab.lab.graph_command:main", "show what a front end makes of a model, as text and picture"),
    "new": ("fmlab.project.cli:main", "a project around a model of yours: proof, plan, launch files"),
    "export": ("fmlab.lab.export:main", "copy the notebooks, clean, into a folder of yours"),
    "notebooks": ("fmlab.lab.builder:main", "build the notebooks from their sources (for authors)"),
}


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name.ljust(width)}  {what}" for name, (_, what) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: fmlab [--debug] COMMAND [OPTIONS]",
            "",
            *lines,
            "",
            "fmlab COMMAND --help   the options of a command",
            "fmlab --version        the version",
            "fmlab --debug ...      show where an error comes from",
        ]
    )


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 the answer is no, 2 to be put right by the user."""
    # OpenMP threads that wait for each other by spinning slow training 6-fold as soon as another program
    # wants a core. Sleeping threads do not; it must be said before torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    argv = list(sys.argv[1:] if argv is None else argv)
    debug = argv[:1] == ["--debug"]
    if debug:
        del argv[0]
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if argv[0] in ("-V", "--version"):
        print(f"fmlab {__version__}")
        return 0
    name, rest = argv[0], argv[1:]
    if name not in COMMANDS:
        return _say(f"there is no command {name!r}; the commands are: {', '.join(COMMANDS)}")
    return guarded(name, lambda: _load(name)(rest), debug)


def guarded(name: str, command: Callable[[], int], debug: bool = False) -> int:
    """Run a command as `fmlab` does: what the user can put right is printed in one line. Returns its exit
    code, 2 after such a line."""
    try:
        return command()
    except KeyboardInterrupt:
        return _say("stopped", 130)
    except BrokenPipeError:  # fmlab ... | head
        sys.stderr.close()
        return 0
    except (ValueError, ImportError, OSError) as error:
        if debug:
            raise
        return _say(f"{name}: {' '.join(str(error).split())}")


def _load(name: str) -> Callable[[list[str]], int]:
    module, function = COMMANDS[name][0].split(":")
    command: Callable[[list[str]], int] = getattr(import_module(module), function)
    return command


def _say(message: str, code: int = 2) -> int:
    print(f"fmlab: {message}" if code == 2 else message, file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
