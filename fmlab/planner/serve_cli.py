"""`fmlab plan serve`: what answering with a decoder needs, and how fast it is, from the shell."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from fmlab.planner.calibration import Calibration
from fmlab.planner.serve_words import batches_up_to, curve
from fmlab.planner.serving import ServePlan, serve_plan


@dataclass
class ServeCommand:
    """Plan serving a decoder: memory with the cache, time to the first token and of each further one, and
    latency against throughput over the batches that fit. Everything is modelled.

    Ends with 0 when it fits the chips' memory, with 1 when it does not (then it says what would), with 2 for
    what cannot be.

    For example: fmlab plan serve llama3.1-70b --chip h100 --tensor 8 --batch 16 --prompt 1024 --generated 256
    """

    model: tyro.conf.Positional[str]
    """A preset of a decoder: llama3.1-8b, mixtral-8x7b, gpt3-175b, …"""
    prompt: Annotated[int, tyro.conf.arg(metavar="N")]
    """Tokens of each prompt."""
    generated: Annotated[int, tyro.conf.arg(metavar="N")]
    """Tokens that each sequence is continued by."""
    chip: str | None = None
    """Of each rank: a100-80gb, h100, tpu-v5e, inf2, … (`fmlab chips list` names all)."""
    host: str | None = None
    """How chips are wired; default: a usual one with this chip."""
    tensor: Annotated[int, tyro.conf.arg(metavar="N")] = 1
    """Chips that divide every matrix."""
    batch: Annotated[int, tyro.conf.arg(metavar="N")] = 1
    """Sequences at a time."""
    batches: str | None = None
    """Of the table of latency against throughput: 1,8,64; default: up to the largest that fits."""
    weights: Literal["bf16", "fp8", "int8", "int4"] = "bf16"
    """How weights are kept; products are in bf16."""
    cache: Literal["bf16", "fp8"] = "bf16"
    """How keys and values are kept."""
    network_bandwidth: Annotated[float | None, tyro.conf.arg(metavar="B/S")] = None
    """Bytes a second of a host, one way, instead of the published figure."""
    calibration: Path | None = None
    """A TOML file with a table [calibration]; default: what was fitted to published training runs."""


def main(argv: list[str]) -> int:
    """Run `fmlab plan serve` with these arguments; returns the exit status.

    Raises ValueError or OSError for what the user can put right.
    """
    command = tyro.cli(ServeCommand, args=argv, prog="fmlab plan serve")
    made = serve_plan(
        command.model,
        chip=command.chip,
        tensor=command.tensor,
        batch=command.batch,
        prompt=command.prompt,
        generated=command.generated,
        weights=command.weights,
        cache=command.cache,
        host=command.host,
        network_bandwidth=command.network_bandwidth,
        calibration=None if command.calibration is None else Calibration.read(command.calibration),
    )
    others = made.over(_batches(command.batches, made))
    print(made)
    if others:
        print(f"\n{curve(others)}")
    return 1 if made.fits is False else 0


def _batches(given: str | None, made: ServePlan) -> tuple[int, ...]:
    if given is not None:
        try:
            return tuple(int(one) for one in given.split(","))
        except ValueError:
            raise ValueError(f"--batches {given}: give whole numbers with commas, such as 1,8,64") from None
    if made.machine.capacity is None:
        return (1, 4, 16, 64)
    return batches_up_to(made.largest_batch) if made.largest_batch else ()
