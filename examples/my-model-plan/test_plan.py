import subprocess
import sys
from pathlib import Path

import pytest
import torch
from model import build

from fmlab import Ranks
from fmlab.models import check_plan
from fmlab.parallel import Layout, parity


@pytest.fixture(scope="module")
def ranks():
    with Ranks(2) as pool:
        yield pool


def test_the_plan_is_proven():
    check_plan(build(), {"input_ids": torch.arange(20).view(2, 10)})


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tensor=2),
        Layout(tensor=2, sequence_parallel=True),
        Layout(pipeline=2, micro_batches=2),
        Layout(pipeline=2, micro_batches=2, schedule="zb-h1"),
        Layout(data=2, zero=3),
        Layout(recompute="full", data=2, fsdp=True),
    ],
    ids=str,
)
def test_a_layout_equals_one_device(ranks, layout):
    parity(build, layout, precision="fp64", ranks=ranks, max_grad_norm=0.1).raise_if_different()


def test_two_by_two_ranks():
    layout = Layout(data=2, tensor=2, zero=1, micro_batches=2)
    parity(build, layout, precision="fp64").raise_if_different()


def test_what_is_illegal_is_refused_with_what_is_legal():
    with pytest.raises(ValueError, match=r"\(4 heads\).*legal are 1, 2, 4"):
        Layout(tensor=3).validate(3, model=build())
    with pytest.raises(ValueError, match="SideBySide can be cut into 5 at most"):
        Layout(pipeline=6).validate(6, model=build())


def test_the_draft_recognises_what_structure_tells():
    here = Path(__file__).parent
    said = subprocess.run([sys.executable, "draft.py"], cwd=here, capture_output=True, text=True, check=True)
    assert r'Rule(r"blocks\.\d+\.up\.weight", "column"' in said.stdout
    # who reads whom among matrices of one size side by side is not in the structure
    assert "not recognised, so replicated: blocks.1.q.weight" in said.stdout
