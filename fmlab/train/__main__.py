"""`fmlab train PRESET …`; `python -m fmlab.train PRESET …`; with several ranks
`torchrun --nproc-per-node 2 -m fmlab.train PRESET …`."""

import os
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import tyro

from fmlab.backends import get_backend
from fmlab.train.config import TrainConfig
from fmlab.train.loop import train
from fmlab.train.samples import sample_of

_FIRST_SPEAKS = 2.0  # seconds


def main(argv: list[str] | None = None) -> int:
    """Train and show a sample. Raises ValueError, OSError or ImportError for what the user can put right."""
    config = tyro.cli(TrainConfig, args=argv, prog="fmlab train", description=TrainConfig.__doc__)
    try:
        result = train(config)
    except torch.OutOfMemoryError as error:  # of a GPU or a simulated chip: something to be put right
        raise ValueError(str(error)) from error
    if _is_first():
        if get_backend(config.backend).lazy:
            # Each token that is written makes the text one longer: a program of its own on such a device.
            get_backend("cpu").to_device(result.model)
        with _precision_of(config, bool(result.modelled_seconds)):
            print(f"\n{sample_of(result.objective, result.model, result.tokenizer)}")
    return 0


def _precision_of(config: TrainConfig, simulated: bool) -> AbstractContextManager[Any]:
    """A simulated chip may have no rate for fp32: there the sample is made in the precision of training."""
    if not simulated:
        return nullcontext()
    precision: Any = config.layout.precision
    return get_backend(config.backend).autocast(precision)


def _is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _run() -> int:
    """`main` as the command `fmlab` runs it, told once by the first of several ranks that agree: 2 for wrong
    input."""
    try:
        return main()
    except (ValueError, OSError, ImportError) as error:
        who = ""
        if not _is_first():
            # What all ranks met the first has told by now, and the launcher has ended the others.
            time.sleep(_FIRST_SPEAKS)
            who = f"rank {os.environ['RANK']}: "
        print(f"fmlab: train: {who}{' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(_run())
