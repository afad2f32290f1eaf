"""What must hold before a run: the plan is proven, layouts equal one device, a shape is of its model.

Run it in your CI: two ranks on two cores are enough.
"""

import pytest
import torch
from my_model.model import SIZES, build
from my_model.plan import OWN
from my_model.preflight import program

from fmlab import Ranks
from fmlab.backends.preflight import preflight
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
        Layout(data=2, zero=1),
        Layout(data=2, fsdp=True, recompute="full"),
        Layout(tensor=2, sequence_parallel=True),
        Layout(pipeline=2, micro_batches=2),
    ],
    ids=str,
)
def test_a_layout_equals_one_device(ranks, layout):
    """Loss, norm, every gradient, every updated weight, in float64."""
    parity(build, layout, precision="fp64", ranks=ranks, max_grad_norm=0.1).raise_if_different()


@pytest.mark.parametrize("size", SIZES)
def test_a_plan_is_of_this_model(size):
    assert OWN.shape(size).parameters == sum(p.numel() for p in OWN.on_meta(size).parameters())


@pytest.mark.parametrize("chip", ["trn2", "tpu-v5e"])
def test_nothing_hurts_on_a_static_shape_chip(chip):
    model, batches, loss = program()
    report = preflight(model, batches, loss, chip=chip)
    assert report.ok, str(report)
