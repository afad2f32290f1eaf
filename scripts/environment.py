"""The environments: create one, install its tested set, and know in a moment whether that is done already.

There are three. torch_xla's last release needs an older PyTorch than the rest, so .venv-xla is for the
chapters and tests on XLA. TensorFlow and JAX, which one chapter compares with PyTorch, bring half a hundred
packages of their own: .venv-frontends. Everything else is in .venv. All hold the package by reference.
"""

import fcntl
import hashlib
import json
import os
import platform
import shutil
import sys
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import install
from install import SetupError, quiet, step

ROOT = Path(__file__).resolve().parent.parent
# OpenMP threads that wait by spinning slow a training step 6-fold once another program wants a core.
PASSIVE = ("OMP_WAIT_POLICY", "passive")
LAB_EXTRAS = ("lab", "hf", "data", "log", "deepspeed", "kernels")
TEST_EXTRAS = (*LAB_EXTRAS, "test")


@dataclass(frozen=True)
class Kernel:
    """How Jupyter lists the environment. `host`: the environment whose Jupyter shows it; None for its own."""

    name: str
    title: str
    host: str | None = None


@dataclass(frozen=True)
class Environment:
    """A virtual environment of this repository with the tested set of packages.

    folder:      its name under the root
    constraints: the file that pins its packages
    torch:       what pip is asked for first, since it decides the build of PyTorch; called `torch_title`, and
                 `torch_time` says how long it may take
    kernel:      its Jupyter kernel, once it has one of the extras `kernel_extras`
    disk:        GB that must be free to make it; `detail` says what for
    imports:     what must load in the end
    machine:     "" for all, else "sys.platform-machine"; newest: the last Python it has packages for
    """

    folder: str
    constraints: str
    torch: tuple[str, ...]
    torch_title: str
    torch_time: str
    kernel: Kernel
    kernel_extras: frozenset[str]
    disk: float
    detail: str
    imports: str
    machine: str = ""
    newest: tuple[int, int] = (3, 14)
    root: Path = ROOT

    @property
    def path(self) -> Path:
        return self.root / self.folder

    @property
    def python(self) -> Path:
        return self.path / "bin" / "python"

    @property
    def stamp(self) -> Path:
        return self.path / "fmlab-stamp.json"

    @property
    def kernel_file(self) -> Path:
        folder = self.kernel.host or self.folder
        return self.root / folder / "share" / "jupyter" / "kernels" / self.kernel.name / "kernel.json"

    def at(self, root: Path) -> "Environment":
        """The same environment of another clone."""
        return replace(self, root=root)

    def key(self, version: str = platform.python_version()) -> str:
        """A hash of all that an installation depends on, but for the extras chosen.

        The folder is part of it: a virtual environment holds absolute paths, so a moved clone needs a new
        one.
        """
        project = tomllib.loads((self.root / "pyproject.toml").read_text())
        hatch = project.get("tool", {}).get("hatch", {})
        facts = [project["project"], project["build-system"], hatch, version, str(self.root), "stamp 2"]
        text = json.dumps(facts, sort_keys=True) + (self.root / self.constraints).read_text()
        return hashlib.sha256(text.encode()).hexdigest()

    def why_not(self) -> str | None:
        """Why this machine cannot have it, as a sentence; None when it can."""
        here = f"{sys.platform}-{platform.machine()}"
        if self.machine and here != self.machine:
            return f"its packages are for {self.machine} only, and this is {here}"
        if sys.version_info[:2] > self.newest and not self.python.exists():
            newest = f"{self.newest[0]}.{self.newest[1]}"
            return (
                f"its packages are for Python up to {newest}, and this is {platform.python_version()}; "
                f"run: make lab{self.folder.removeprefix('.venv')} PYTHON=python{newest}"
            )
        return None

    def ensure(self, extras: Sequence[str], installer: str = "auto") -> Path:
        """The Python of a complete environment with these extras, made or completed where needed.

        Raises SetupError with the fix when that is not possible.
        """
        if reason := self.why_not():
            raise SetupError(f"{self.folder} cannot be made: {reason}")
        with _one_at_a_time(self.root):
            version = self._version()
            stamp = read_stamp(self.stamp)
            if not (version and complete(stamp, self.key(version), extras)):
                self._make(stamp, version, extras, installer)
            elif not self._registered([*extras, *stamp["extras"]]):
                self._register()
        return self.python

    def is_complete(self, extras: Sequence[str] = ()) -> bool:
        """Whether it is there, up to date, with these extras."""
        version = self._version()
        return version is not None and complete(read_stamp(self.stamp), self.key(version), extras)

    def _version(self) -> str | None:
        return quiet([str(self.python), "-c", "import platform; print(platform.python_version())"])

    def _make(self, stamp: dict, version: str | None, extras: Sequence[str], installer: str) -> None:
        moved = stamp.get("root") not in (None, str(self.root))
        if self.path.exists() and (version is None or moved or not _supported(version)):
            self.discard(f"{self.folder} {'was made elsewhere' if moved else 'does not run'}: making it anew")
            version = None
        wanted = sorted({*extras, *stamp.get("extras", [])})
        tools = install.Tools.find(installer)
        python = version or platform.python_version()
        print(f"Setting up fmlab in {self.path} with {tools.name} (Python {python}).", flush=True)
        self._check_disk(version is not None)
        self.stamp.unlink(missing_ok=True)  # until all is done, the next run must not take this for complete
        if not self.python.exists():
            with step("creating the virtual environment", "a few seconds"):
                install.create_venv(self.path, tools)
        install.packages(self, wanted, tools)
        if self.kernel_extras & set(wanted):
            self._register()
        with step(f"checking that {self.imports.replace(',', ' and')} load", "a few seconds"):
            install.run([str(self.python), "-c", f"import {self.imports}"], self.path)
        done = {"key": self.key(str(self._version())), "extras": wanted, "root": str(self.root)}
        self.stamp.write_text(json.dumps(done, indent=1) + "\n")

    def _registered(self, extras: Sequence[str]) -> bool:
        """Whether Jupyter lists it, where it should: that is lost when the lab's environment is remade."""
        host = self.root / (self.kernel.host or self.folder)
        return not (self.kernel_extras & set(extras)) or not host.exists() or self.kernel_file.exists()

    def _register(self) -> None:
        host = self.root / (self.kernel.host or self.folder)
        if not host.exists():
            return
        with step(f"registering the Jupyter kernel {self.kernel.title!r}", "a second"):
            command = [str(self.python), "-m", "ipykernel", "install", "--prefix", str(host)]
            command += ["--name", self.kernel.name, "--display-name", self.kernel.title]
            install.run([*command, "--env", *PASSIVE], self.path)

    def discard(self, why: str) -> None:
        """Delete it. Raises SetupError when the folder is no virtual environment."""
        if self.path.is_symlink() or (not (self.path / "pyvenv.cfg").exists() and any(self.path.iterdir())):
            raise SetupError(f"{self.path} is no virtual environment; move it away and run this again")
        print(why, flush=True)
        shutil.rmtree(self.path)

    def _check_disk(self, there: bool) -> None:
        """Raise SetupError unless there is room; an environment that is only completed has most of it."""
        free = shutil.disk_usage(self.root).free / 2**30
        needed = min(self.disk, 3) if there else self.disk
        if free < needed:
            raise SetupError(f"{free:.1f} GB are free under {self.root}; {self.folder} needs {self.detail}")

    def variables(self) -> dict[str, str]:
        """For programs of the environment: its bin folder first on PATH, as an activated one has it."""
        env = {PASSIVE[0]: PASSIVE[1], **os.environ, "VIRTUAL_ENV": str(self.path)}
        env["PATH"] = f"{self.path / 'bin'}{os.pathsep}{env.get('PATH', os.defpath)}"
        for name in ("PYTHONHOME", "MAKEFLAGS", "MFLAGS", "MAKELEVEL"):
            env.pop(name, None)  # a make inside must not see our options
        return env


MAIN = Environment(
    folder=".venv",
    constraints="constraints.txt",
    torch=("torch",),
    torch_title="PyTorch",
    torch_time="10 s to 3 minutes; CUDA builds are several GB",
    kernel=Kernel("python3", "Python 3 (ipykernel)"),
    kernel_extras=frozenset({"lab"}),
    disk=3,
    detail="3 GB (8 GB with CUDA)",
    imports="torch, fmlab.cli",
)
XLA = Environment(
    folder=".venv-xla",
    constraints="constraints-xla.txt",
    torch=("torch==2.9.1", "torch_xla==2.9.0"),
    torch_title="PyTorch 2.9 and torch_xla",
    torch_time="30 s to 4 minutes; several GB",
    kernel=Kernel("fmlab-xla", "fmlab (XLA)", host=MAIN.folder),
    kernel_extras=frozenset({"kernel"}),
    disk=9,
    detail="9 GB: torch_xla asks for a PyTorch with CUDA's libraries, which take 7.6 GB",
    imports="torch_xla, fmlab.cli",
    machine="linux-x86_64",
    newest=(3, 13),
)
FRONTENDS = Environment(
    folder=".venv-frontends",
    constraints="constraints-frontends.txt",
    torch=("torch",),
    torch_title="PyTorch",
    torch_time="10 s to 3 minutes; CUDA builds are several GB",
    kernel=Kernel("fmlab-frontends", "fmlab (front ends)"),
    kernel_extras=frozenset(),  # no chapter runs in it: chapter 1.12 starts processes of it
    disk=4,
    detail="4 GB",
    imports="tensorflow, jax, fmlab.cli",
    machine="linux-x86_64",
    newest=(3, 13),
)
FRONTENDS_EXTRAS = ("frontends",)
XLA_EXTRAS = ("xla", "kernel", "hf", "data", "log")
XLA_TEST_EXTRAS = (*XLA_EXTRAS, "unit")


def read_stamp(path: Path) -> dict:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def complete(stamp: dict, wanted: str, extras: Sequence[str]) -> bool:
    """Whether the environment that left `stamp` already is what is asked for."""
    return stamp.get("key") == wanted and set(extras) <= set(stamp.get("extras", []))


def _supported(version: str) -> bool:
    from fm import supported

    return supported(tuple(int(part) for part in version.split(".")[:2]))


@contextmanager
def _one_at_a_time(root: Path) -> Iterator[None]:
    """Two terminals may ask at once; the second waits for the first and finds the work done."""
    with open(root / ".venv.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("waiting for another set-up of this folder to finish ...", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    sys.exit("run 'make setup' instead")
