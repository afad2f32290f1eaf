"""What `make` runs: fm.py COMMAND, of those in USAGE. Needs only a Python.

This file is kept readable for old Pythons, so that they can say what they lack.
"""

import os
import shutil
import subprocess
import sys

OLDEST, NEWEST = (3, 11), (3, 14)
USAGE = """\
make lab      set up .venv and open JupyterLab on the first notebook
make setup    set up .venv only
make lab-xla  set up .venv-xla too, for the chapters on XLA (Linux x86_64, 7.6 GB)
make lab-frontends  set up .venv-frontends too: TensorFlow and JAX, for chapter 1.12 (Linux x86_64, 3 GB)
make check    lint, types and the quick tests (under 3 minutes)
make test     every check there is, with one summary at the end
make soak     kill training runs at random moments, damage their files (bounded: ARGS="--minutes 10")
make parity   every cell of the parity matrix, into docs/parity.md (hours; ARGS="--minutes 10": a part)
make audit    what is installed against pins, licences and known vulnerabilities (asks the internet)
make bench    measure what fmlab promises
make clean    remove what builds and tests left; ARGS=--all removes .venv* too

Options of the command behind a target go in ARGS:  make lab ARGS="--no-browser --port 9000"
Another Python:                                     make lab PYTHON=python3.12"""


def supported(version):
    return OLDEST <= tuple(version[:2]) <= NEWEST


def find_python():
    """A Python of the supported range on this machine (uv may bring one of its own), or None."""
    for name in ("python3.12", "python3.13", "python3.11", "python3.14", "python3"):
        path = shutil.which(name)
        if path and runs_supported(path):
            return path
    uv = shutil.which("uv")
    if uv:
        find = [uv, "python", "find", f">={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}"]
        path = output(find)
        if path is None:
            subprocess.run([uv, "python", "install", "3.12"])
            path = output(find)
        if path and runs_supported(path):
            return path
    return None


def runs_supported(path):
    version = output([path, "-c", "import sys; print(*sys.version_info[:2])"])
    return version is not None and supported([int(part) for part in version.split()])


def output(command):
    """What the command printed, or None when it failed (a pyenv shim without its Python, say)."""
    answer = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return answer.stdout.decode().strip() if answer.returncode == 0 else None


def too_old():
    here = f"{sys.executable or 'python3'} is Python {sys.version_info[0]}.{sys.version_info[1]}"
    return (
        f"fmlab needs Python {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}, and {here}.\n"
        "Install one, then run the same command again:\n"
        "  Debian, Ubuntu   sudo apt install python3.12 python3.12-venv\n"
        "  Fedora           sudo dnf install python3.12\n"
        "  macOS            brew install python@3.12\n"
        "  anywhere         install uv (docs.astral.sh/uv): it brings a Python of its own"
    )


def main(argv):
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(USAGE)
        return 0
    if os.name == "nt":
        print("fmlab runs on Linux and macOS; on Windows, run it inside WSL (wsl --install)", file=sys.stderr)
        return 2
    if not supported(sys.version_info):
        better = find_python()
        if better is None:
            print(too_old(), file=sys.stderr)
            return 2
        os.execv(better, [better, os.path.abspath(__file__), *argv])
    import commands  # after the check: it needs a supported Python

    return commands.run(argv[0], argv[1:])


if __name__ == "__main__":
    try:
        code = main(sys.argv[1:])
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        code = 130
    sys.exit(code)
