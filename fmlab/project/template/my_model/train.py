"""Train the model: python -m my_model.train tiny; with ranks: torchrun --nproc-per-node 2 -m my_model.train.

All settings are those of `fmlab train --help`: corpus, steps, layout, checkpoints, resume.
"""

import sys

from fmlab.train.__main__ import run

from .model import MODELS

if __name__ == "__main__":
    sys.exit(run(MODELS))
