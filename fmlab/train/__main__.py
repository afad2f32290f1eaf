"""`fmlab train PRESET …`; `python -m fmlab.train PRESET …`; with several ranks
`torchrun --nproc-per-node 2 -m fmlab.train PRESET …`."""

import os
import sys

import tyro

from fmlab.train.config import TrainConfig
from fmlab.train.loop import train

_PROMPT = 'The "with" statement'


def main(argv: list[str] | None = None) -> int:
    """Train and show a sample; 0 when it worked, 1 and a line on standard error for wrong input."""
    first = os.environ.get("RANK", "0") == "0"
    try:
        config = tyro.cli(TrainConfig, args=argv, prog="fmlab train", description=TrainConfig.__doc__)
        result = train(config)
    except (ValueError, OSError, ImportError) as error:
        if first:
            print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    if first:
        text = result.generate(_PROMPT, max_new_tokens=80, temperature=0.7, top_p=0.9)
        print(f"\nA sample after {_PROMPT!r}:\n{_PROMPT}{text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
