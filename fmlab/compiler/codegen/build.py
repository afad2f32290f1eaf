"""Generated C++ to a function: the system's compiler, a folder of results, ctypes."""

import ctypes
import hashlib
import os
import platform
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


def compiler() -> str:
    """Path of the C++ compiler: $CXX, else c++, g++ or clang++. Raises NoCompiler if there is none."""
    asked = os.environ.get("CXX")
    names = [asked] if asked else ["c++", "g++", "clang++"]
    for name in names:
        if found := shutil.which(name):
            return found
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

    Raises NoCompiler if there is no compiler or it fails; its own message is in the error.
    """
    cxx = compiler()
    folder = cache_folder() if folder is None else folder
    key = "\0".join([source, cxx, _version(cxx), *FLAGS, platform.machine(), _processor()])
    library = folder / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as here:
            text, made = Path(here) / "kernels.cpp", Path(here) / "kernels.so"
            text.write_text(source)
            command = [cxx, *FLAGS, str(text), "-o", str(made)]
            try:
                subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIME_LIMIT)
            except subprocess.CalledProcessError as error:
                raise NoCompiler(f"{cxx} failed: {error.stderr.strip()[:2000]}") from error
            except (OSError, subprocess.TimeoutExpired) as error:
                raise NoCompiler(f"{cxx} failed: {error}") from error
            os.replace(made, library)  # whole or not at all, if two processes build at once
    return ctypes.CDLL(str(library))


def _version(cxx: str) -> str:
    answer = subprocess.run(
        [cxx, "--version"], capture_output=True, text=True, timeout=TIME_LIMIT, check=False
    )
    return answer.stdout.split("\n")[0]


def _processor() -> str:
    """What -march=native depends on: a home folder may be shared by machines of several kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
