"""Counted work against formulas, rooflines of many operations, and the panel's words."""

import pytest
import torch
from torch.nn import functional

from fmlab.chips import Roofline, chip
from fmlab.lab.figures import caption
from fmlab.lab.roofline import (
    BATCHES,
    CHIPS,
    PANEL,
    OnRoofline,
    Operation,
    attention,
    linear,
    on_roofline,
    operations,
    pointwise,
    roofline_figure,
    roofline_panel,
)


def test_a_linear_layer_is_counted_as_the_formula_says() -> None:
    with torch.device("meta"):
        layer = torch.nn.Linear(256, 512, bias=False, dtype=torch.bfloat16)
        inputs = torch.empty(64, 256, dtype=torch.bfloat16)
    (one,) = operations(lambda: layer(inputs))
    assert (one.name, one.dtype) == ("mm", "bf16")
    assert (one.flops, one.bytes) == linear(64, 256, 512)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_attention_is_one_operator_or_many(device: str) -> None:
    q, k, v = torch.empty(3, 2, 4, 32, 128, device=device).unbind()
    call = lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=True)  # noqa: E731
    (fused,) = [one for one in operations(call) if one.name == "attention"]
    flops, nbytes = attention(64, 32, 512, 64, fused=True, itemsize=4)
    assert fused.flops == flops
    assert fused.bytes == pytest.approx(nbytes, rel=0.01)  # and a sum for each query
    if device == "meta":
        parts = operations(call, fused_attention=False)
        assert sum(one.flops for one in parts) == flops
        assert sum(one.bytes for one in parts) > nbytes
    q.requires_grad_(True)
    names = [one.name for one in operations(lambda: call().sum().backward())]
    assert names.count("attention_backward") == 1


def test_pointwise_functions_move_what_they_read_and_write() -> None:
    numbers = torch.empty(1000, dtype=torch.bfloat16, device="meta")
    (one,) = operations(lambda: functional.gelu(numbers))
    assert one.bytes == pointwise(1000, 5)[1]
    assert operations(lambda: numbers.view(10, 100)) == []


def test_times_add_up_and_the_mean_intensity_flatters() -> None:
    roof = Roofline(peak=100.0, bandwidth=1.0)
    work = [Operation("mm", 10_000, 10), Operation("gelu", 0, 90)]
    both = on_roofline(work, roof)
    assert both == OnRoofline(10_000, 100, 190.0, 100.0)
    assert both.intensity == roof.ridge
    assert both.rate < roof.attainable(both.intensity)
    with pytest.raises(ValueError, match="no operations"):
        on_roofline([], roof)


def test_the_figure_needs_a_roof_and_carries_its_numbers() -> None:
    with pytest.raises(ValueError, match="at least one roofline"):
        roofline_figure({})
    fig, ax = roofline_figure({"H100": chip("h100").roofline("bf16")}, {"op": [(1, 3e12), (10, 3e13)]})
    said = repr(caption(fig, kind="modelled", text="A sentence."))
    assert "295" in said
    assert "(10, 30)" in said
    assert ax.get_xscale() == ax.get_yscale() == "log"


def test_the_panel_says_what_bounds_an_operation() -> None:
    panel = roofline_panel()
    assert "62.1 FLOP/B, ridge 295: memory is the limit" in panel.summary
    panel.set(tokens=512)
    assert "computing is the limit" in panel.summary
    panel.set(operation="decoding attention", tokens=max(BATCHES))
    assert "memory is the limit" in panel.summary
    with pytest.raises(ValueError, match="legal are"):
        panel.set(on="tpu-v9")


@pytest.mark.parametrize("name", CHIPS)
def test_what_the_panel_promises_holds_on_every_chip(name: str) -> None:
    roof = chip(name).roofline("bf16")
    for never in ("LayerNorm", "GELU of 4d", "decoding attention"):
        assert {roof.bound(*PANEL[never](n, 4096)) for n in BATCHES} == {"memory"}
    assert roof.bound(*PANEL["attention, fused"](2048, 4096)) == "compute"
    assert roof.bound(*PANEL["attention, not fused"](2048, 4096)) == "memory"
    assert roof.bound(*PANEL["linear d to d"](int(1.5 * roof.ridge) + 1, 4096)) == "compute"
