"""`fmlab new`: a project of your own, from the shell."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from fmlab.project.create import Target, new_project


@dataclass
class NewCommand:
    """Write a project around a model of your own: parity, pre-flight, plan and launch files.

    It runs as it is written; put your model in the place of its own, step by step. README.md in the new
    folder leads through it.

    For example: fmlab new my-model --chip trn2 --chips 64 --form slurm
    """

    name: tyro.conf.Positional[str]
    """Of the project; letters, digits, - and _."""
    folder: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Where it is written; default: NAME, here."""
    chip: str = "h100"
    """Of each rank: h100, trn1, trn2, tpu-v5e, … (`fmlab chips list` names all)."""
    chips: Annotated[int, tyro.conf.arg(metavar="N")] = 8
    """How many ranks the run is planned for."""
    host: str | None = None
    """How chips are wired: p5.48xlarge, trn2.48xlarge, …; default: a usual one with this chip."""
    form: Literal["torchrun", "deepspeed", "slurm", "kubernetes"] = "torchrun"
    """Who starts a run."""
    image: str | None = None
    """With --form kubernetes: the container's image, with the project installed."""


def main(argv: list[str]) -> int:
    """Run `fmlab new` with these arguments; returns the exit status.

    Raises ValueError or OSError for what the user can put right.
    """
    command = tyro.cli(NewCommand, args=argv, prog="fmlab new")
    target = Target(command.chip, command.chips, command.host, command.form, command.image)
    folder = new_project(command.name, command.folder, target)
    print(f"wrote {folder}: start with its README.md\n  cd {folder}\n  pip install -e '.[test]'\n  pytest")
    return 0
