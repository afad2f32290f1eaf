"""Write a new project: the template under another name, and the launch files that its own plan makes."""

import keyword
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from fmlab.chips import chip as find_chip
from fmlab.parallel.values import one_of, whole
from fmlab.planner.emit import FORMS
from fmlab.planner.emit_checks import DEVICES
from fmlab.storage import atomic_directory

TEMPLATE = Path(__file__).parent / "template"
NAME, PACKAGE = "my-model", "my_model"  # as the template is called
LENGTH = 1024  # tokens of a row of the "full" model
_ROWS = 16  # of a rank, in the step that is planned first
_TOKENS = "7e9"  # 20 for each parameter of the "full" model (Hoffmann et al. 2022, arXiv:2203.15556)
_SECONDS = 300  # for the plan
_START = {
    "torchrun": "bash launch/launch.sh",
    "deepspeed": "bash launch/launch.sh",
    "slurm": "cd launch && sbatch job.sbatch",
    "kubernetes": "kubectl apply -f launch/pytorchjob.yaml",
}
_STATIC = ("trn", "inf", "tpu")  # chips whose compiler wants static shapes


@dataclass(frozen=True)
class Target:
    """What the project is to run on.

    chip: of each rank, as `fmlab chips list` names it; a chip that PyTorch sees as several devices stands for
        one of them (trn1: trn1-core).
    chips: ranks. host: how they are wired; default: a usual host with this chip.
    form: who starts a run: "torchrun", "deepspeed", "slurm", "kubernetes" (which needs `image`).

    Raises ValueError for what does not exist, or does not go together.
    """

    chip: str = "h100"
    chips: int = 8
    host: str | None = None
    form: str = "torchrun"
    image: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "chip", DEVICES.get(self.chip, self.chip))
        find_chip(self.chip)
        whole(self.chips, f"chips={self.chips!r}")
        one_of(self.form, tuple(FORMS), f"form={self.form!r}")
        if (self.form == "kubernetes") != (self.image is not None):
            raise ValueError(
                "an image, with the project installed, is for form 'kubernetes', which needs one"
            )

    @property
    def watched(self) -> str:
        """The chip whose rules the pre-flight tells: this one, or Trainium2 where it has none."""
        return re.sub("-(core|lnc2)$", "", self.chip) if self.chip.startswith(_STATIC) else "trn2"

    def plan(self, package: str) -> list[str]:
        """Arguments of python: the best layout for the chips, and the files that start it."""
        wanted = ["--chip", self.chip, "--chips", str(self.chips)]
        if self.host is not None:
            wanted += ["--host", self.host]
        wanted += ["--global-batch", str(_ROWS * self.chips), "--seq-len", str(LENGTH), "--states", "fp32-16"]
        wanted += ["--tokens", _TOKENS]
        files = ["--emit", "launch", "--form", self.form]
        if self.image is not None:
            files += ["--image", self.image]
        return ["-m", f"{package}.plan", "full", *wanted, "--search", *files]


def new_project(name: str, folder: str | Path | None = None, target: Target | None = None) -> Path:
    """Write a project called `name` and return its folder (default: `name`, here). Whole or not at all.

    The project plans its own model, so that its launch files exist only if the model builds, its shape is
    right and a layout fits the chips.

    Raises ValueError for a name that Python cannot import or that is taken, for a folder that exists, and
    with the plan's own words for a target that the model cannot be started on.
    """
    package = package_name(name)
    final = Path(name if folder is None else folder).expanduser()
    target = Target() if target is None else target
    with atomic_directory(final) as temporary:
        _write(temporary, name, package, target)
        _launch_files(temporary, target.plan(package))
    return final


def package_name(name: str) -> str:
    """What Python calls the project. Raises ValueError for a name that is not fit, or taken."""
    if not re.fullmatch("[A-Za-z][A-Za-z0-9_-]*[A-Za-z0-9]", name):
        raise ValueError(f"{name!r} is no name for a project: letters, digits, - and _, first a letter")
    package = name.lower().replace("-", "_")
    if keyword.iskeyword(package) or package in sys.stdlib_module_names or package == "tests":
        raise ValueError(f"Python has a use for {package!r} itself: choose another name")
    if find_spec(package) is not None:
        raise ValueError(f"a package {package!r} is installed already: choose another name")
    return package


def _write(folder: Path, name: str, package: str, target: Target) -> None:
    """The files of the template, with the names of this project in paths and texts."""
    words = {
        NAME: name,
        PACKAGE: package,
        "sim:CHIP": f"sim:{target.chip}",
        "CHIP": target.watched,
        "PLAN_COMMAND": " ".join(["python", *target.plan(package)]) + " --force",
        "LAUNCH_COMMAND": _START[target.form],
    }
    pattern = re.compile("|".join(map(re.escape, words)))
    for file in sorted(TEMPLATE.rglob("*")):
        if file.is_dir() or "__pycache__" in file.parts:
            continue
        path = folder / str(file.relative_to(TEMPLATE)).replace(PACKAGE, package).replace("dot-", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        text = pattern.sub(lambda found: words[found.group()], file.read_text(encoding="utf-8"))
        path.write_text(text, encoding="utf-8")


def _launch_files(folder: Path, arguments: list[str]) -> None:
    """Let the project make them. Raises ValueError with what it says where it does not."""
    env = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "NO_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=env, capture_output=True, text=True, timeout=_SECONDS
    )
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).removeprefix("fmlab: plan: ")
        raise ValueError(f"no project was written, since its model cannot be started so: {said}")
