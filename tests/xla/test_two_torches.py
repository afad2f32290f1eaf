"""What chapter 2.9 shows of torch 2.9 to readers who do not have it is what torch 2.9 does."""

import sys
from pathlib import Path

import torch

from fmlab.lab import two_torches


def test_the_committed_outcomes_are_those_of_torch_2_9() -> None:
    assert torch.__version__.startswith("2.9.1")
    assert two_torches.run(Path(sys.executable)) == two_torches.COMMITTED
