"""`fmlab train PRESET …`; `python -m fmlab.train PRESET …`; with several ranks
`torchrun --nproc-per-node 2 -m fmlab.train PRESET …`."""

import os
import sys

import tyro

from fmlab.train.config import TrainConfig
from fmlab.train.loop import train
from fmlab.train.samples import sample_of


def main(argv: list[str] | None = None) -> int:
    """Train and show a sample. Raises ValueError, OSError or ImportError for what the user can put right."""
    config = tyro.cli(TrainConfig, args=argv, prog="fmlab train", description=TrainConfig.__doc__)
    result = train(config)
    if _is_first():
        print(f"\n{sample_of(result.objective, result.model, result.tokenizer)}")
    return 0


def _is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _run() -> int:
    """`main` as the command `fmlab` runs it, told once by the first of several ranks: 2 for wrong input."""
    try:
        return main()
    except (ValueError, OSError, ImportError) as error:
        if _is_first():
            print(f"fmlab: train: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(_run())
