"""`fmlab preflight`: the pre-flight from the shell, for a preset or a program of yours."""

import importlib
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from torch import Tensor, nn

from fmlab.backends.preflight import Report, preflight
from fmlab.models.families import longest_row
from fmlab.objectives.terms import total_loss
from fmlab.parallel.parity_batches import random_batches
from fmlab.train.config import TrainConfig
from fmlab.train.recipes import recipe_for
from fmlab.train.setup import check_seq_len


@dataclass
class PreflightCommand:
    """Find what of a training program will hurt on a chip with a static-shape compiler, on any machine.

    Ends with 0 when nothing must or should be put right, else with 1.
    """

    model: tyro.conf.Positional[str] = "gpt2-tiny"
    """A preset (gpt2-tiny, llama-tiny, bert-tiny, gpt2, …), or "package.module:function"; the function gives
    (model, batches) or (model, batches, loss), with loss a function of (model, batch)."""
    chip: str = "trn2"
    """trn1, trn2, trn3, inf2, tpu-v5e, tpu-v5p, tpu-v6e, tpu-v7, …"""
    batch: int = 8
    """Rows of a batch (presets)."""
    seq_len: int = 128
    """Tokens of a row (presets)."""
    examples: int | None = None
    """Rows of the data set (presets); by default whole batches."""
    drop_last: bool = False
    """Leave out the last partial batch (presets)."""
    precision: Literal["bf16", "fp32"] = "bf16"
    cores: int | None = None
    """Logical cores that the job will use on one host."""
    logical_core: int | None = None
    """Physical cores in a logical one, 1 or 2 (trn2, trn3)."""


def main(argv: list[str]) -> int:
    """Run `fmlab preflight` with these arguments; returns the exit status.

    Raises ValueError for what the user can put right.
    """
    command = tyro.cli(PreflightCommand, args=argv, prog="fmlab preflight")
    report = check(command)
    print(report)
    return int(not report.ok)


def check(command: PreflightCommand) -> Report:
    """The report on what the command names."""
    model, batches, loss = _program(command) if ":" in command.model else _preset(command)
    return preflight(
        model,
        batches,
        loss,
        chip=command.chip,
        precision=command.precision,
        cores=command.cores,
        logical_core=command.logical_core,
        limit=None,
    )


def _preset(command: PreflightCommand) -> tuple[nn.Module, Iterable[Any], Any]:
    """The preset on the meta device, so that any size passes, with random tokens."""
    recipe = recipe_for(TrainConfig(model=command.model))
    check_seq_len(command.seq_len, longest_row(recipe.shape))
    with torch.device("meta"):
        model = recipe.family(recipe.shape)
    (row,) = random_batches(model, 1, 1, seed=0)  # which tensors this family takes
    examples = 4 * command.batch if command.examples is None else command.examples

    def loss(of: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        # A count of the global batch comes from the host, as the engine has it.
        return total_loss(recipe.objective(of, batch), recipe.objective.counts(batch))

    return model, _rows(row, examples, command), loss


def _rows(row: dict[str, Tensor], examples: int, command: PreflightCommand) -> Iterator[dict[str, Tensor]]:
    """Batches of the data set, as a loader would cut them."""
    for start in range(0, examples, command.batch):
        rows = min(command.batch, examples - start)
        if rows == command.batch or not command.drop_last:
            yield {
                name: torch.ones((rows, *((command.seq_len,) if value.dim() > 1 else ())), dtype=value.dtype)
                for name, value in row.items()
            }


def _program(command: PreflightCommand) -> tuple[nn.Module, Iterable[Any], Any]:
    """What the user's function gives. Raises ValueError where it gives something else."""
    sys.path.insert(0, str(Path.cwd()))
    module, _, function = command.model.partition(":")
    given = getattr(importlib.import_module(module), function)()
    if not isinstance(given, tuple) or len(given) not in (2, 3) or not isinstance(given[0], nn.Module):
        raise ValueError(f"{command.model} must give (model, batches) or (model, batches, loss)")
    model, batches, *rest = given
    return model, batches, rest[0] if rest else None
