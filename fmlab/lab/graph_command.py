"""`fmlab graph`: what a front end makes of a model, as text, and as a picture in a file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from torch import nn

from fmlab.compiler import capture
from fmlab.lab.front_ends import see
from fmlab.lab.graph_view import MOST, GraphView, view
from fmlab.parallel.cli import model_function
from fmlab.parallel.parity_batches import random_batches

BLOCK = "block"
#: of the block that all five front ends capture (fmlab.frontends), by their short names
NAMES = {
    "fx": "torch.fx",
    "export": "torch.export",
    "xla": "xla",
    "tensorflow": "tensorflow",
    "jax": "jax",
}


@dataclass
class GraphCommand:
    """Show what a front end makes of a model: the graph as text, and with --svg as a picture."""

    model: tyro.conf.Positional[str] = BLOCK
    """block: the GPT block that every front end captures. Else a preset (gpt2-tiny, bert-tiny, …), or
    module:function, which builds a model: for fx, export and compiler. Or a file of HLO, StableHLO, a lazy
    XLA graph or a jaxpr."""
    front_end: Literal["fx", "export", "compiler", "xla", "tensorflow", "jax"] = "export"
    """xla, tensorflow and jax run in environments of their own (make lab-xla, make lab-frontends); without
    them their stored captures are shown. compiler: fmlab.compiler's graphs, forward and backward."""
    svg: Path | None = None
    """Write the picture to this file."""
    most: int = MOST
    """Boxes of the picture."""
    collapse: bool = True
    """Draw a chain of operations as one box."""


def main(argv: list[str]) -> int:
    """Run `fmlab graph` with these arguments; returns the exit status.

    Raises ValueError or OSError for what the user can put right.
    """
    command = tyro.cli(GraphCommand, args=argv, prog="fmlab graph")
    shown = graph_of(command)
    print(f"{shown.title}: {shown.summary}\n\n{shown.text}")
    if command.svg is not None:
        command.svg.write_text(shown.svg, encoding="utf-8")
        print(f"\nwrote {command.svg}")
    return 0


def graph_of(command: GraphCommand) -> GraphView:
    """The graph that a command asks for. Raises ValueError for what its front end cannot capture."""
    how: dict[str, Any] = {"most": command.most, "collapse": command.collapse}
    if Path(command.model).is_file():
        return view(Path(command.model).read_text(encoding="utf-8"), command.model, **how)
    if command.model == BLOCK and command.front_end != "compiler":
        name = NAMES[command.front_end]
        seen = see((name,))[name]
        made = f"{', '.join(f'{key} {value}' for key, value in seen.versions.items())}; {seen.source}"
        return view(seen, f"{BLOCK} in {name} ({made})", **how)
    thing = _captured(command)
    return view(thing, f"{command.model} in {NAMES.get(command.front_end, 'fmlab.compiler')}", **how)


def _captured(command: GraphCommand) -> Any:
    if command.front_end not in ("fx", "export", "compiler"):
        raise ValueError(
            f"{command.front_end} captures {BLOCK!r} alone: {command.model!r} is a PyTorch model; choose "
            "--front-end fx, export or compiler"
        )
    if command.model == BLOCK:
        from fmlab.frontends.in_torch import plain_block
        from fmlab.frontends.spec import batch

        return capture(plain_block(), torch.from_numpy(batch()[0]))
    model = model_function(command.model)().eval()
    (inputs,) = random_batches(model, rows=2, steps=1, seed=0)
    if command.front_end == "compiler":
        return capture(model, kwargs=inputs)
    return _traced(model, inputs, command.front_end)


def _traced(model: nn.Module, inputs: dict[str, torch.Tensor], front_end: str) -> Any:
    try:
        if front_end == "fx":
            return torch.fx.symbolic_trace(model)
        return torch.export.export(model, (), dict(inputs), strict=False)
    except Exception as error:  # whatever the model does while it is traced
        first = (str(error).strip() or repr(error)).splitlines()[0]
        other = "export" if front_end == "fx" else "compiler"
        raise ValueError(
            f"{NAMES[front_end]} cannot capture this model called with {', '.join(inputs)}: "
            f"{type(error).__name__}: {first}; try --front-end {other}"
        ) from error
