"""Generated C++ to a function: the system's compiler, a folder of results, ctypes."""

import atexit
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

# Not -ffast-math: masks hold -inf, and a NaN must stay one. The two -fno flags change no result.
FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-shared",
    "-fPIC",
    # compilers use half of a 512-bit register unless told; it is 1.1 times as fast for GELU and norms
    *(["-mprefer-vector-width=512"] if platform.machine() in ("x86_64", "AMD64") else []),
)
TIME_LIMIT = 120  # seconds for one file


class NoCompiler(RuntimeError):
    """There is no C++ compiler here, or it cannot build what was generated; says which and why."""


def compiler() -> list[str]:
    """The C++ compiler: $CXX, which may have arguments ("ccache g++"), else c++, g++ or clang++.

    Raises NoCompiler if there is none.
    """
    asked = os.environ.get("CXX", "")
    names = [asked] if asked.strip() else ["c++", "g++", "clang++"]
    for name in names:
        first, *rest = shlex.split(name)
        if found := shutil.which(first):
            return [found, *rest]
    raise NoCompiler(
        f"no C++ compiler on this machine (looked for {', '.join(names)}); install g++ or clang++, or set "
        "CXX. Fused groups run torch's operators one after another instead"
    )


def cache_folder() -> Path:
    """Where built files are kept: fmlab/compiler below the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fmlab" / "compiler"


def build(source: str, folder: Path | None = None) -> ctypes.CDLL:
    """Compile C++ `source` to a library and load it; the same source on the same machine is built once.

    A folder that cannot be written to, or is full, is replaced by one of this process. Raises NoCompiler if
    there is no compiler or it fails; its own message is in the error.
    """
    cxx = compiler()
    folder = cache_folder() if folder is None else folder
    key = "\0".join([source, *cxx, _version(cxx), *FLAGS, platform.machine(), _processor()])
    name = f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.so"
    try:
        return _built(source, cxx, folder / name)
    except OSError:  # no room, no permission, no such place, or a file there that is no library
        try:
            return _built(source, cxx, _own_folder() / name)
        except OSError as error:
            raise NoCompiler(
                f"{' '.join(cxx)}: nowhere to build, or what it built cannot be loaded: {error}"
            ) from error


@functools.cache
def _own_folder() -> Path:
    """A folder that goes when this process ends."""
    folder = tempfile.TemporaryDirectory(prefix="fmlab-compiler-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


def _built(source: str, cxx: list[str], library: Path) -> ctypes.CDLL:
    """The library at that place, made if it is not there."""
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as here:
            text, made = Path(here) / "kernels.cpp", Path(here) / "kernels.so"
            text.write_text(source)
            _compile([*cxx, *FLAGS, str(text), "-o", str(made)])
            os.replace(made, library)  # whole or not at all, if two processes build at once
    return ctypes.CDLL(str(library))


def _compile(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIME_LIMIT)
    except subprocess.CalledProcessError as error:
        raise NoCompiler(f"{command[0]} failed: {error.stderr.strip()[:2000]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoCompiler(f"{command[0]} failed: {error}") from error


def _version(cxx: list[str]) -> str:
    try:
        answer = subprocess.run(
            [*cxx, "--version"], capture_output=True, text=True, timeout=TIME_LIMIT, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoCompiler(f"{cxx[0]} failed: {error}") from error
    return answer.stdout.split("\n")[0]


def _processor() -> str:
    """What -march=native depends on: a home folder may be shared by machines of several kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
