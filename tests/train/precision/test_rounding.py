"""Rounding: bit for bit torch's casts, the definition of each mode on every gap, and unbiased by chance."""

import pytest
import torch

from fmlab.train.precision import FORMATS, kahan_add, round_to, running_sum, tf32_matmul
from fmlab.train.precision.rounding import fit

SMALL = [one for one in FORMATS.values() if one.bits <= 8]
CASTS = ["bf16", "fp16", "fp8-e4m3", "fp8-e5m2"]


def every_kind_of_fp32(count: int = 400_000) -> torch.Tensor:
    """Random bit patterns (all exponents, inf, nan), and what lies in and next to the middle of gaps."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (count,), generator=generator).to(torch.int32)
    ties = (bits[: count // 2] & -65536) | 0x8000  # the middle of a bf16 gap
    near = torch.cat([ties, ties + 1, ties - 1])
    values = torch.cat([bits, near]).view(torch.float32)
    halves = torch.cat([FORMATS[name].values() for name in CASTS[1:]])
    middles = ((halves[1:] + halves[:-1]) / 2).float()
    edges = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 65504.0, 65520.0, 464.0, 465.0])
    return torch.cat([values, middles, middles.nextafter(torch.tensor(torch.inf)), edges])


@pytest.mark.parametrize("name", CASTS)
def test_nearest_is_the_cast_of_torch_bit_for_bit(name) -> None:
    x, fmt = every_kind_of_fp32(), FORMATS[name]
    cast = x.to(fmt.dtype)
    # Beyond 448 torch's E4M3 cast gives nan in torch 2.9 and 448 in torch 2.13: the standard has both.
    saturates = bool(torch.tensor(1e9).to(fmt.dtype).float() == fmt.max)
    ours = round_to(x, name, saturate=saturates).to(fmt.dtype)
    integer = torch.uint8 if fmt.bits == 8 else torch.int16
    same = (cast.view(integer) == ours.view(integer)) | (cast.float().isnan() & ours.float().isnan())
    assert same.all(), x[~same][:5]


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
def test_the_fast_way_is_the_same(fmt) -> None:
    x = every_kind_of_fp32(20_000)
    assert torch.equal(fit(x, fmt).nan_to_num(-1), round_to(x, fmt, saturate=True).float().nan_to_num(-1))


@pytest.mark.parametrize("fmt", SMALL, ids=str)
def test_every_gap_is_rounded_as_defined(fmt) -> None:
    """Between each two neighbours at quarters of the gap, from all numbers alone."""
    low, high = fmt.values()[:-1], fmt.values()[1:]
    below = low.abs() < high.abs()
    inner, outer = torch.where(below, low, high), torch.where(below, high, low)
    for part, nearest in ((0.25, low), (0.75, high)):
        x = low + part * (high - low)
        assert torch.equal(round_to(x, fmt), nearest)
        assert torch.equal(round_to(x, fmt, "zero"), inner)
        far = (x - inner).abs() / (outer - inner).abs()
        for draw, wanted in ((far - 1e-9, outer), (far, inner)):
            assert torch.equal(round_to(x, fmt, "stochastic", draws=draw), wanted)
    even = torch.arange(len(fmt.values())) - int((fmt.values() == 0).nonzero())  # codes count from zero
    middle = low + 0.5 * (high - low)
    assert torch.equal(round_to(middle, fmt), torch.where(even[:-1] % 2 == 0, low, high))


def test_by_chance_is_exactly_right_on_average() -> None:
    """Over all 2^16 draws that tell a fraction of fp32 in bf16, the mean is x itself."""
    draws = torch.arange(2**16, dtype=torch.float64) / 2**16
    for number in (1.0 + 2**-23, 0.1, -3.14159, 1e-39):
        x = torch.full((2**16,), number, dtype=torch.float32)
        assert round_to(x, "bf16", "stochastic", draws=draws).double().mean() == x[0].double()


def test_what_is_too_large() -> None:
    x = torch.tensor([1e9, -1e9, torch.inf, torch.nan])
    assert round_to(x, "fp8-e5m2").tolist()[:3] == [torch.inf, -torch.inf, torch.inf]
    assert round_to(x, "fp8-e4m3").isnan().all()  # it has no infinity
    assert round_to(x, "fp8-e4m3", saturate=True).tolist()[:3] == [448, -448, 448]
    assert round_to(x, "fp8-e5m2", "zero").tolist()[:3] == [57344, -57344, torch.inf]
    assert round_to(x, "fp4-e2m1").tolist()[:3] == [6, -6, 6]
    assert round_to(x, "int8").tolist()[:3] == [127, -128, 127]
    assert all(round_to(x, one)[3].isnan() for one in FORMATS)
    with pytest.raises(ValueError, match="must saturate"):
        round_to(x, "int8", saturate=False)
    with pytest.raises(ValueError, match="legal are nearest, zero, stochastic"):
        round_to(x, "bf16", "up")
    with pytest.raises(ValueError, match="draws have the shape"):
        round_to(x, "bf16", "stochastic", draws=torch.zeros(3))


def test_tf32_keeps_ten_bits_of_each_factor() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(64, 256), torch.randn(256, 32)
    exact = a.double() @ b.double()
    off = [(one.double() - exact).norm() / exact.norm() for one in (tf32_matmul(a, b), a @ b)]
    assert 1e-4 < off[0] < 2**-11
    assert off[1] < 1e-6
    assert round_to(torch.tensor(1 + 2**-11), "tf32") == 1


# ---- sums --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "step"), [("fp16", 1.0), ("bf16", 8.0)])
def test_the_published_sum(name, step) -> None:
    """AWS Neuron documentation, "Neuron Rounding Modes": 1024 + 2048 x 0.5 in fp16 stays at 1024 (nearest)
    and gave 2056 (stochastic). In bf16 too; the spread is that of 2048 draws."""
    numbers = torch.full((2048, 200), 0.5)
    assert (running_sum(numbers[:, :1], name, 1024.0) == 1024).all()
    assert (running_sum(numbers[:, :1], name, 1024.0, "kahan") == 2048).all()
    by_chance = running_sum(numbers, name, 1024.0, "stochastic", torch.Generator().manual_seed(1)).double()
    one = (2048 * (0.5 / step) * (1 - 0.5 / step)) ** 0.5 * step  # of one sum: below 2048 a gap is one step
    assert by_chance.std() == pytest.approx(one, rel=0.2)
    assert (by_chance.mean() - 2048).abs() < 4 * one / 200**0.5


def test_kahan_keeps_what_is_lost() -> None:
    torch.manual_seed(0)
    numbers = torch.rand(3000, 1)
    exact = numbers.double().sum()
    plain, kahan = (running_sum(numbers, "bf16", how=how).double() for how in ("nearest", "kahan"))
    assert (plain - exact).abs() > 0.5 * exact  # it stands still at 256
    assert (kahan - exact).abs() <= 2**-8 * exact  # half a gap of the result
    total, lost = kahan_add(torch.tensor(256.0), torch.tensor(0.0), torch.tensor(0.5), "bf16")
    assert (total, lost) == (256, 0.5)
    with pytest.raises(ValueError, match="legal are nearest, stochastic, zero, kahan"):
        running_sum(numbers, "bf16", how="exact")
