"""`fmlab aot`: compile a training step for real TPUs on a machine without one, and read the HBM it takes."""

import csv
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn

from fmlab.backends.tpu_aot import TARGETS, TPUOutOfMemoryError, compile_for, trace_step
from fmlab.backends.tpu_aot.compile import check_licence, versions
from fmlab.backends.tpu_aot.lowering import load_jax
from fmlab.models.families import longest_row
from fmlab.objectives.terms import total_loss
from fmlab.storage import check_writable
from fmlab.train.config import TrainConfig
from fmlab.train.recipes import recipe_for
from fmlab.train.setup import check_seq_len


@dataclass
class AotCommand:
    """Compile the training step of a model for TPUs, with none at hand: HBM use, or the compiler's refusal.

    Needs the extra tpu-aot in an environment of its own: pip install '.[tpu-aot]' in fmlab's folder (500 MB).
    Ends with 0 when every target takes the step, else with 1.
    """

    model: tyro.conf.Positional[str] = "gpt2-tiny"
    """Preset: gpt2-tiny, gpt2, llama-tiny, bert-tiny, …"""
    targets: tuple[str, ...] = field(default_factory=lambda: TARGETS)
    """Generation and topology of the slice: v4:2x2x1, v5e:2x2, v5p:2x2x1, v6e:2x2, and larger ones. The step
    is compiled for one device of it."""
    batch: int = 8
    """Rows of the batch."""
    seq_len: int = 128
    """Tokens of a row."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """bf16: forward pass under autocast, weights in fp32."""
    out: Path | None = None
    """Also add the results to this CSV file."""
    accept_libtpu_licence: bool = False
    """You have read and accept libtpu's licence, the Google Cloud Platform Terms of Service (the file LICENSE
    in its folder)."""


def main(argv: list[str]) -> int:
    """Run `fmlab aot` with these arguments; returns the exit status.

    Raises ValueError, ImportError or OSError for what the user can put right.
    """
    command = tyro.cli(AotCommand, args=argv, prog="fmlab aot")
    check_licence(command.accept_libtpu_licence)
    load_jax()  # a missing extra is told before the step is traced
    if command.out is not None:
        check_writable(command.out.parent)
    refused = 0
    for row in compile_all(command):
        refused += row["outcome"] != "compiled"
        if command.out is not None:
            write(command.out, row)
    return int(refused > 0)


def compile_all(command: AotCommand) -> Iterator[dict[str, Any]]:
    """One row for each target, printed as it comes."""
    step = trace_step(*model_and_batch(command), precision=command.precision)
    print(
        f"{command.model}: {step.parameters / 1e6:,.1f} million parameters, {step.operators:,} operators a "
        f"step, {step.state_bytes / 2**20:,.1f} MiB of weights and optimizer state",
        flush=True,
    )
    for target in command.targets:
        shared = {
            "model": command.model, "batch": command.batch, "seq_len": command.seq_len,
            "precision": command.precision, "target": target, "date": date.today().isoformat(),
        }  # fmt: skip
        try:
            compiled = compile_for(step, target, accept_libtpu_licence=command.accept_libtpu_licence)
        except TPUOutOfMemoryError as error:
            print(f"{target}: the compiler refuses: {headline(error)}", flush=True)
            yield {**shared, "outcome": headline(error), "versions": versions()}
        else:
            print(compiled, flush=True)
            yield {**shared, "outcome": "compiled", "hbm_bytes": compiled.hbm_bytes, **asdict(compiled)}


def model_and_batch(command: AotCommand) -> tuple[nn.Module, dict[str, Tensor], Any]:
    """The model and its batch on meta, and the loss: the mean over all targets."""
    recipe = recipe_for(TrainConfig(model=command.model))
    if recipe.name not in ("causal", "masked"):
        raise ValueError(
            f"fmlab aot compiles causal and masked language models, not objective {recipe.name!r}"
        )
    check_seq_len(command.seq_len, longest_row(recipe.shape))
    with torch.device("meta"):
        model = recipe.family(recipe.shape)
        ids = torch.zeros(command.batch, command.seq_len, dtype=torch.int64)
    batch = {"input_ids": ids} | ({"labels": ids} if recipe.name == "masked" else {})
    for module in model.modules():
        if hasattr(module, "cross_entropy"):
            module.cross_entropy = whole_cross_entropy  # type: ignore[assignment]

    def loss(of: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        counts = recipe.objective.counts(inputs)
        return total_loss(recipe.objective(of, inputs), counts)

    return model, batch, loss


def whole_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None) -> Tensor:
    """The loss from logits held in full. Our own runs through pieces of rows, which suits a CPU and gives a
    compiler thousands of operators more.
    """
    return F.cross_entropy(F.linear(hidden, weight, bias).float(), labels, reduction="sum")


def headline(error: Exception) -> str:
    """The sentence of the compiler's report that says how much it wanted."""
    text = " ".join(str(error).split())
    wanted = re.search(
        r"[^:]*out of memory.*?\(.*?exceeds.*?\)|Ran out of memory.*?capacity by \S+?G", text, re.I
    )
    return (wanted[0] if wanted else text[:200]).strip()


def write(path: Path, row: dict[str, Any]) -> None:
    """Add a row to a CSV file with the columns below, with the command that made it."""
    columns = [
        "model", "batch", "seq_len", "precision", "target", "device", "outcome", "hbm_bytes", "arguments",
        "outputs", "aliased", "temporaries", "code", "operators", "seconds", "date", "versions", "command",
    ]  # fmt: skip
    new = not path.exists()
    words = sys.argv[1:]
    if "--out" in words:  # where the table lies is no part of the result
        del words[words.index("--out") : words.index("--out") + 2]
    command = "fmlab " + " ".join(words)
    with path.open("a", newline="") as file:
        table = csv.DictWriter(file, columns, extrasaction="ignore", restval="")
        if new:
            table.writeheader()
        seconds = {"seconds": round(row["seconds"])} if "seconds" in row else {}
        table.writerow({**row, **seconds, "command": command})
