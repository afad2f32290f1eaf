"""Weights in 8 and 4 bits: exact codes, memory as counted, errors as the steps allow."""

import copy

import pytest
import torch

from fmlab.models import GPT, GPTConfig
from fmlab.models.layers import Linear
from fmlab.train.precision import QuantisedLinear, model_bytes, quantise, quantise_weights
from fmlab.train.precision.quantised import pack_nibbles, unpack_nibbles


def base(outputs: int = 48, inputs: int = 64) -> Linear:
    torch.manual_seed(0)
    layer = Linear(inputs, outputs)
    torch.nn.init.normal_(layer.weight)
    torch.nn.init.normal_(layer.bias)
    return layer


@pytest.mark.parametrize(("bits", "group"), [(8, 64), (4, 64), (4, 16)])
def test_each_weight_is_within_half_a_step(bits, group) -> None:
    weight = base().weight.detach()
    codes, scales = quantise(weight, bits, group)
    groups = weight.unflatten(1, (-1, group))
    largest = groups.abs().amax(-1)
    torch.testing.assert_close(scales, largest / (127 if bits == 8 else 7))
    off = (codes.unflatten(1, (-1, group)) * scales[..., None] - groups).abs()
    assert (off <= 0.5001 * scales[..., None]).all()
    zero, one = quantise(torch.zeros(2, 64), bits, group)
    assert (zero == 0).all()
    assert (one == 1).all()


def test_two_numbers_of_four_bits_share_a_byte() -> None:
    codes = torch.arange(-8, 8, dtype=torch.int8).view(2, 8)
    packed = pack_nibbles(codes)
    assert (packed.dtype, packed.shape) == (torch.uint8, (2, 4))
    assert packed[0, 0] == 8 + 9 * 16  # -8 is 1000, -7 is 1001
    assert torch.equal(unpack_nibbles(packed), codes)


@pytest.mark.parametrize(("bits", "group", "most"), [(8, None, 0.012), (4, None, 0.2), (4, 16, 0.13)])
def test_the_layer_computes_with_what_it_holds(bits, group, most) -> None:
    layer, x = base(), torch.randn(5, 64)
    small = QuantisedLinear(layer, bits, group)
    exact = torch.nn.functional.linear(x, small.dequantised(), layer.bias)
    torch.testing.assert_close(small(x), exact)
    torch.testing.assert_close(small.product(x), exact - layer.bias)
    off = (small.dequantised() - layer.weight).norm() / layer.weight.norm()
    assert most / 3 < off < most
    codes, scales = 48 * 64 * bits // 8, 4 * 48 * (64 // (group or 64))
    assert small.codes.nbytes + small.scales.nbytes == codes + scales


def test_a_model_shrinks_as_counted_and_still_writes() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(64, 32, 2, 64, 4))
    ids = torch.randint(0, 64, (2, 32))
    exact = model(ids).logits.detach()
    sizes, off = {}, {}
    for bits, group in ((8, None), (4, 32)):
        small = copy.deepcopy(model)
        report = quantise_weights(small, bits, group)
        matrices = 2 * 12 * 64 * 64
        outputs = 2 * (3 + 1 + 4 + 1) * 64
        groups = outputs if bits == 8 else matrices // 32
        assert report.before - report.after == matrices * 4 - (matrices * bits // 8 + 4 * groups)
        assert (report.after, len(report.layers)) == (model_bytes(small), 8)
        sizes[bits], off[bits] = report.after, float((small(ids).logits - exact).norm() / exact.norm())
        assert not any(p.requires_grad for p in small.parameters())
        assert "8 matrices" in str(report)
    assert sizes[4] < sizes[8]
    assert off[8] < 0.01 < off[4] < 0.2


def test_what_cannot_be_is_refused_and_changes_nothing() -> None:
    model = GPT(GPTConfig(64, 32, 1, 32, 2))
    for settings, match in (
        ({"bits": 3}, "legal are 8, 4"),
        ({"bits": 4, "group": 48}, "divides the 32 inputs"),
        ({"bits": 4, "group": 1}, "even number"),
    ):
        with pytest.raises(ValueError, match=match):
            quantise_weights(model, **settings)
        assert not any(isinstance(m, QuantisedLinear) for m in model.modules())
    quantise_weights(model)
    with pytest.raises(ValueError, match="no linear layer"):
        quantise_weights(model)


def test_numbers_that_no_code_stands_for_are_refused() -> None:
    weight = base(2, 8).weight.detach()
    for bits, group, message in (
        (16, 8, "bits=16"),
        (8, 3, "group=3"),
        (4, -2, "group=-2"),
        (8, 0, "group=0"),
    ):
        with pytest.raises(ValueError, match=message):
            quantise(weight, bits, group)
    for number in (float("nan"), float("inf")):
        spoiled = base(2, 8)
        spoiled.weight.data[0, 0] = number
        with pytest.raises(ValueError, match="infinities or NaN"):
            QuantisedLinear(spoiled)
