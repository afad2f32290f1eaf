"""MX formats by the specification, scales by Transformer Engine's rules, and rounded products."""

import pytest
import torch

from fmlab.models import GPT, GPTConfig
from fmlab.models.layers import Linear
from fmlab.train.precision import (
    MX_FORMATS,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    MXScaling,
    NoScaling,
    Products,
    RoundedLinear,
    mx_round,
    mx_scales,
    numbers_called,
    restore_products,
    round_products,
    round_to,
)


@pytest.mark.parametrize("name", MX_FORMATS)
def test_mx_is_the_specification_number_by_number(name) -> None:
    """Section 6.3, written out for each block in plain Python."""
    import math

    fmt = MX_FORMATS[name]
    torch.manual_seed(0)
    x = torch.randn(3, 64) * torch.logspace(-6, 6, 6).repeat_interleave(32).view(3, 64)
    x[0, :32] = 0
    wanted = x.clone()
    values = fmt.element.values() * 2.0**fmt.shift
    for row in wanted:
        for at in (0, 32):
            block = row[at : at + 32]
            largest = float(block.abs().max())
            if largest == 0:
                continue
            scale = 2.0 ** (math.floor(math.log2(largest)) - fmt.max_exponent)
            gaps = (block.double()[:, None] / scale - values).abs()
            block.copy_(values[gaps.argmin(-1)] * scale)
    torch.testing.assert_close(mx_round(x, name), wanted, rtol=0, atol=0)
    assert torch.equal(mx_round(x.T, name, 0), wanted.T)
    assert torch.equal(mx_round(mx_round(x, name), name), mx_round(x, name))  # once more changes nothing


def test_mx_scales_fit_eight_bits_and_say_what_is_no_number() -> None:
    blocks = torch.randn(4, 32) * torch.tensor([[1e-38], [1.0], [1e38], [torch.inf]])
    scales = mx_scales(blocks, "mxfp8-e4m3")
    e8m0 = scales[:3].float().to(torch.float8_e8m0fnu)
    assert torch.equal(e8m0.double(), scales[:3])
    assert mx_round(blocks, "mxfp4")[3].isnan().all()
    odd = torch.randn(5)
    assert torch.equal(mx_round(odd, "mxfp4"), mx_round(torch.cat([odd, torch.zeros(27)]), "mxfp4")[:5])
    with pytest.raises(ValueError, match="legal are mxfp8-e4m3"):
        mx_round(odd, "mxfp5")


def test_a_scale_rounded_up_saturates_nothing_and_is_the_smallest_such() -> None:
    torch.manual_seed(0)
    blocks = torch.randn(500, 32)
    for name in ("mxfp8-e4m3", "mxfp4", "mxint8"):
        fmt = MX_FORMATS[name]
        up, down = mx_scales(blocks, name, up=True), mx_scales(blocks, name)
        largest = blocks.abs().amax(-1, keepdim=True)
        assert (largest / up <= fmt.max).all()
        assert (largest / (up / 2) > fmt.max).all()
        assert ((up == down) | (up == 2 * down)).all()
        assert (up != down).any()


def test_delayed_scaling_uses_the_scale_of_before() -> None:
    """Transformer Engine's rule on a sequence: 448 / max of the history; 0, inf and nan leave it alone."""
    scaling = DelayedScaling("fp8-e4m3", length=3)
    seen = []
    for amax in (2.0, 8.0, 0.0, torch.inf, 1.0, 1.0, 1.0):
        x = torch.tensor([[amax, 0.0]])
        before = float(scaling.scale)
        got = scaling(x, 1)
        expected = round_to(x * before, "fp8-e4m3", saturate=True) / before
        assert torch.equal(got, expected)
        seen.append(float(scaling.scale))
    assert seen == [224, 56, 56, 56, 56, 56, 448]
    recent = DelayedScaling("fp8-e4m3", algorithm="most_recent", margin=1)
    for amax in (2.0, 8.0, 1.0):
        recent(torch.tensor([[amax]]), 1)
    assert float(recent.scale) == 224
    recent.eval()(torch.tensor([[9.0]]), 1)
    assert float(recent.scale) == 224, "measuring must not move it"
    for bad in ({"length": 0}, {"algorithm": "mean"}):
        with pytest.raises(ValueError, match=r"at least 1|legal are max"):
            DelayedScaling("fp8-e4m3", **bad)


def test_one_outlier_costs_its_own_block_only() -> None:
    torch.manual_seed(0)
    x = torch.randn(256, 256) * 0.01
    x[3, 7] = 3000.0  # with one scale for all, most others fall below the smallest number
    kept = torch.ones_like(x, dtype=torch.bool)
    kept[3, 7] = False
    off = {}
    for name, scaling in {
        "tensor": CurrentScaling("fp8-e4m3"),
        "tile": BlockScaling("fp8-e4m3", (128, 128)),
        "strip": BlockScaling("fp8-e4m3"),
        "mx": MXScaling("mxfp8-e4m3"),
    }.items():
        rounded = scaling(x, 1)
        assert rounded[3, 7] == pytest.approx(3000, rel=0.07)
        off[name] = float((rounded - x)[kept].norm() / x[kept].norm())
    assert off["tensor"] > 0.3
    assert off["tensor"] > off["tile"] > off["strip"]
    assert max(off["strip"], off["mx"]) < 0.06
    assert BlockScaling("fp8-e4m3")(x[:, :200], 0).shape == (256, 200)
    with pytest.raises(ValueError, match="at least one number"):
        BlockScaling("fp8-e4m3", (0, 1))


# ---- products ----------------------------------------------------------------------------------------------


def layer(products: Products) -> tuple[RoundedLinear, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    base = Linear(64, 96)
    torch.nn.init.normal_(base.weight, std=0.2)
    torch.nn.init.normal_(base.bias)
    return RoundedLinear(base, products), torch.randn(2, 40, 64, requires_grad=True), torch.randn(2, 40, 96)


def test_fp8_products_are_those_of_the_rounded_factors() -> None:
    """E4M3 forward, E5M2 for gradients: each product put together by hand from torch's casts."""
    rounded, x, d_y = layer(numbers_called("fp8-current").products)
    y = rounded(x)
    y.backward(d_y)

    def cast(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        scale = torch.finfo(dtype).max / t.abs().max()
        return (t * scale).to(dtype).float() / scale

    q_x = cast(x.detach().flatten(0, 1), torch.float8_e4m3fn)
    q_w, q_g = cast(rounded.weight.detach(), torch.float8_e4m3fn), cast(d_y.flatten(0, 1), torch.float8_e5m2)
    torch.testing.assert_close(y.detach().flatten(0, 1), q_x @ q_w.T + rounded.bias)
    torch.testing.assert_close(x.grad.flatten(0, 1), q_g @ q_w)
    torch.testing.assert_close(rounded.weight.grad, q_g.T @ q_x)
    torch.testing.assert_close(rounded.bias.grad, d_y.flatten(0, 1).sum(0))


@pytest.mark.parametrize(("name", "most"), [("mxfp8", 0.06), ("mxint8", 0.02), ("mxfp4", 0.25),
                                            ("fp8-block", 0.06), ("tf32", 1e-3)])  # fmt: skip
def test_blocks_lie_along_what_is_summed(name, most) -> None:
    """A large row costs the others nothing in any of the three products, if no block holds two rows."""
    products = numbers_called(name).products
    for large, product in (("x", "y"), ("d_y", "d_x"), ("d_y of an output", "d_w")):
        rounded, x, d_y = layer(products)
        with torch.no_grad():
            {"x": x[0, 3], "d_y": d_y[0, 3], "d_y of an output": d_y[..., 5]}[large].mul_(300)
        plain = x.detach().clone().requires_grad_()
        weight = rounded.weight.detach().clone().requires_grad_()
        y = torch.nn.functional.linear(plain, weight, rounded.bias)
        y.backward(d_y)
        ours = rounded(x)
        ours.backward(d_y)
        pairs = {"y": (ours, y), "d_x": (x.grad, plain.grad), "d_w": (rounded.weight.grad, weight.grad)}
        found, exact = pairs[product]
        off = (found - exact).norm(dim=-1) / exact.norm(dim=-1)  # of each row, so that large hide no small
        assert most / 20 < off.median()
        assert off.max() < most * 1.5


def test_a_model_gets_rounded_products_and_gives_them_back() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(50, 16, 2, 32, 2))
    ids = torch.randint(0, 50, (2, 16))
    before = model(ids).logits.detach()
    names = round_products(model, numbers_called("fp8-current").products)
    assert len(names) == 8  # four in each layer; not the output matrix, which is the embedding
    assert 1e-4 < float((model(ids).logits.detach() - before).norm() / before.norm()) < 0.1
    assert len(list(model.parameters())) == len(list(GPT(GPTConfig(50, 16, 2, 32, 2)).parameters()))
    restore_products(model)
    assert torch.equal(model(ids).logits, before)
    with pytest.raises(ValueError, match="no linear layer"):
        round_products(torch.nn.Linear(3, 3), numbers_called("mxfp8").products)
    assert NoScaling("fp8-e4m3")(torch.tensor([[1e-4]]), 1) == 0  # what a scale is for


@pytest.mark.parametrize("name", ["tf32", "fp8-current", "fp8-delayed", "fp8-block", "mxfp4"])
def test_a_layer_without_tokens_has_no_largest_number_and_runs(name) -> None:
    model = torch.nn.Sequential(Linear(5, 3))
    round_products(model, numbers_called(name).products)
    x = torch.randn(0, 5, requires_grad=True)
    model(x).sum().backward()
    assert x.grad.shape == (0, 5)
    assert not model[0].weight.grad.any()
    with pytest.raises(ValueError, match="two numbers"):
        round_to(torch.ones(2, dtype=torch.complex64), "bf16")
