"""The products of a generation's few rows: the numbers of F.linear, and the same count of operations."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from fmlab.models import functions
from fmlab.models.functions import linear


@pytest.mark.parametrize("onednn", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
def test_few_rows_give_the_numbers_and_counts_of_many(
    onednn: bool, with_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(functions, "_ONEDNN", onednn and functions._ONEDNN)
    weight = torch.nn.Parameter(torch.randn(1100, 1000))
    bias = torch.randn(1100) if with_bias else None
    for shape in ((8, 1), (2, 4), (3,)):
        x = torch.randn(*shape, 1000)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            got = linear(x, weight, bias)
        assert got.is_contiguous()
        torch.testing.assert_close(got, F.linear(x, weight, bias).detach(), rtol=0, atol=2e-4)
        assert counter.get_total_flops() == 2 * x[..., 0].numel() * 1100 * 1000


def test_they_are_for_plain_fp32_weights_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: torch.Tensor) -> torch.Tensor:
        raise AssertionError("few rows")

    monkeypatch.setattr(functions, "_few_rows", refuse)
    weight, x = torch.nn.Parameter(torch.randn(1100, 1000)), torch.randn(8, 1000)
    linear(x, weight).sum().backward()
    assert weight.grad is not None
    with torch.no_grad():
        linear(x.double(), weight.double())
        with torch.autocast("cpu", torch.bfloat16):
            linear(x, weight)
        linear(x[:, :10], torch.randn(20, 10))
        with pytest.raises(AssertionError, match="few rows"):
            linear(x, weight)
