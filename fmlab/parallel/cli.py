"""`fmlab parity`: prove a layout from the shell."""

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from torch import nn

from fmlab.models.families import FAMILIES, family_of
from fmlab.parallel.layout import Layout
from fmlab.parallel.parity_batches import stir
from fmlab.parallel.parity_legal import check_model_function
from fmlab.parallel.parity_run import parity
from fmlab.ranks import RankError
from fmlab.storage import check_writable


@dataclass(frozen=True)
class _Spread(Layout):
    __doc__ = Layout.__doc__  # what its fields mean, for --help

    precision: tyro.conf.Suppress[str] = "fp32"  # the command has its own, with fp64

    def __post_init__(self) -> None:
        """Checked when it becomes a Layout, so that what is wrong is said in a line."""


@dataclass
class ParityCommand:
    """Compare a layout with one device: loss, gradient norm, every gradient and every updated weight.

    Starts its own ranks. Ends with 0 when all agree, with 1 when something differs, and with 2, before any
    rank is started, when the layout is not legal.
    """

    model: str = "gpt2-tiny"
    """A preset (gpt2-tiny, llama-tiny, bert-tiny, t5-tiny, mixtral-tiny, clip-tiny, unet-tiny, …), or
    "package.module:function" that builds a model."""
    batches: str | None = None
    """ "package.module:function" that gives the global batch of each step, a list; default: random tokens."""
    objective: str | None = None
    """ "package.module:name" of the loss: an objective, or a class or function that makes one; default: what
    the model's family was made with."""
    layout: tyro.conf.OmitArgPrefixes[_Spread] = field(default_factory=_Spread)
    """How a step is spread. One without ranks or micro-batches to divide a batch among gets data=2."""
    engine: str = "fmlab"
    """Who runs the layout: by hand (fmlab) or a production engine."""
    precision: Literal["fp32", "fp64", "bf16"] = "fp32"
    optimizer: Literal["sgd", "adamw"] = "sgd"
    max_grad_norm: float | None = None
    """Clip the gradient to this norm; default: no clipping."""
    steps: Annotated[int, tyro.conf.arg(metavar="N")] = 2
    seed: int = 0
    backend: str = "auto"
    """On what the layout runs: auto, cpu, cuda, sim:h100, …"""
    html: Path | None = None
    """Also write the report to this file, as a page."""


def main(argv: list[str]) -> int:
    """Run `fmlab parity` with these arguments; returns the exit status.

    Raises ValueError or OSError for what the user can put right.
    """
    command = tyro.cli(ParityCommand, args=argv, prog="fmlab parity")
    if command.html is not None:
        if command.html.is_dir():
            raise ValueError(f"--html {command.html} is a folder; name a file in it")
        check_writable(command.html.parent)
    layout = Layout(**{f.name: getattr(command.layout, f.name) for f in fields(Layout)})
    if layout.world_size * layout.micro_batches == 1:  # nothing to divide: one device beside itself
        layout = replace(layout, data=2)
    try:
        report = parity(
            model_function(command.model),
            layout,
            engine=command.engine,
            batches=_call(command.batches),
            objective=_objective(command.objective),
            precision=command.precision,
            steps=command.steps,
            optimizer=command.optimizer,
            max_grad_norm=command.max_grad_norm,
            seed=command.seed,
            backend=command.backend,
        )
    except RankError as error:  # the model's own error, with the line that raised it
        print(f"fmlab: parity: {error}", file=sys.stderr)
        return 2
    print(report)
    if command.html is not None:
        page = f"<!doctype html><meta charset='utf-8'><title>parity</title>{report._repr_html_()}"
        command.html.write_text(page)
    return 0 if report.ok else 1


def model_function(name: str) -> Callable[[], nn.Module]:
    """What builds the model called `name`: a preset, or "module:function".

    Raises ValueError when there is no such preset, module or function.
    """
    if ":" not in name:
        try:
            family = family_of(name, FAMILIES)
        except ValueError as error:
            raise ValueError(f"{error}; or give module:function") from error
        return lambda: stir(family.from_preset(name))
    found: Callable[[], nn.Module] = _load(name)
    check_model_function(found)
    return found


def _call(name: str | None) -> Any:
    """What the function called `name` gives."""
    if name is None:
        return None
    found = _load(name)
    if not callable(found):
        raise ValueError(f"{name!r} must be a function, got {type(found).__name__}")
    try:
        return found()
    except Exception as error:  # whatever the function does, and that it may want arguments
        raise ValueError(f"{name!r} is called without arguments, and raised {error!r}") from error


def _objective(name: str | None) -> Any:
    """The objective called `name`, made if it is a class or a function without arguments."""
    found = None if name is None else _load(name)
    return found if found is None or hasattr(type(found), "counts") else _call(name)


def _load(name: str) -> Any:
    """What stands under "module:name". Raises ValueError when nothing does."""
    module, _, function = name.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        return getattr(importlib.import_module(module), function)
    except Exception as error:  # whatever the module does when it is imported
        why = error if isinstance(error, ModuleNotFoundError | AttributeError) else repr(error)
        raise ValueError(f"cannot load {name!r} (looked in the current folder too): {why}") from error
    finally:
        sys.path.pop(0)
