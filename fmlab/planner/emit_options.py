"""`fmlab plan … --emit FOLDER`: the options, and what is said of the files."""

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

import tyro

from fmlab.planner.emit import emit
from fmlab.planner.own import OwnModels
from fmlab.planner.plan import Plan


@dataclass
class EmitOptions:
    """Files that start the planned run."""

    emit: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Write run.toml, which `fmlab train --config` reads, and what starts it on the plan's hosts."""
    form: Literal["torchrun", "deepspeed", "slurm", "kubernetes"] = "torchrun"
    """With --emit: who starts it. With --tokens the run has as many steps as they take."""
    engine: Literal["fmlab", "torch", "deepspeed"] | None = None
    """With --emit: who runs the layout; default: deepspeed with --form deepspeed, else fmlab."""
    image: str | None = None
    """With --emit and --form kubernetes: the container's image, with fmlab installed."""
    force: bool = False
    """With --emit: replace what an earlier one wrote into the folder."""


def write(options: EmitOptions, plan: Plan, tokens: float | None, own: OwnModels | None = None) -> str:
    """Write the files, if they were asked for; what was written, as text. Raises ValueError like `emit`."""
    if options.emit is None:
        given = [f"--{one.name}" for one in fields(options) if getattr(options, one.name) != one.default]
        if given:
            raise ValueError(f"{', '.join(given)}: give --emit FOLDER too")
        return ""
    paths = emit(
        plan,
        options.emit,
        options.form,
        steps=None if tokens is None else math.ceil(tokens / plan.tokens_per_step),
        engine=options.engine,
        image=options.image,
        force=options.force,
        own=own,
    )
    return "wrote " + ", ".join(map(str, paths))
