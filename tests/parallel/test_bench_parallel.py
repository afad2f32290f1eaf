"""The contests of `fmlab bench parallel` are legal, and theirs is the same work as ours."""

import pytest
import torch

from fmlab.bench.parallel import QUICK, contests
from fmlab.models import GPT, GPTConfig
from fmlab.parallel.engines.refusals import refusals


@pytest.mark.parametrize("ranks", [2, 4])
def test_both_sides_can_run_what_is_compared(ranks: int) -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig(**QUICK))
    for contest in contests(ranks):
        assert refusals(contest.engine, contest.theirs, model) == {}, contest.name
        assert contest.layout.world_size == contest.theirs.world_size == ranks
        if contest.theory is not None:
            assert contest.theory(model, contest.layout) > 0
