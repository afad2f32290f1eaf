import pytest
import torch
from model import Reconstruct, batch, build

from fmlab import Ranks
from fmlab.parallel import Layout, parity
from fmlab.parallel.ddp import DataParallel

BATCHES = [batch(8, seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def ranks():
    with Ranks(2) as pool:
        yield pool


@pytest.mark.parametrize(
    "layout",
    [
        Layout(data=2),
        Layout(data=2, micro_batches=2),
        Layout(data=2, zero=1),
        Layout(data=2, zero=2, offload="optimizer"),
        Layout(data=2, zero=3),
        Layout(data=2, fsdp=True),
    ],
    ids=str,
)
def test_a_layout_equals_one_device(ranks, layout):
    settings = dict(batches=BATCHES, objective=Reconstruct(), ranks=ranks, max_grad_norm=0.5)
    parity(build, layout, precision="fp64", **settings).raise_if_different()


class SumsTwice(DataParallel):
    """A bug to be found: one gradient is summed over the ranks a second time."""

    def _accumulate(self, micro_batches, counts):
        sums = super()._accumulate(micro_batches, counts)
        torch.distributed.all_reduce(self.model.norm.weight.grad)
        return sums


def test_a_bug_is_found_by_name_and_factor(ranks):
    report = parity(build, Layout(data=2), SumsTwice, BATCHES, objective=Reconstruct(), ranks=ranks)
    assert [row.name for row in report.different] == ["norm.weight"]
    assert report.first.gradient.factor == pytest.approx(2.0)


def test_what_needs_a_plan_says_so_before_anything_starts():
    with pytest.raises(ValueError, match="Autoencoder has none"):
        parity(build, Layout(tensor=2), batches=BATCHES, objective=Reconstruct())
