"""Formats against torch.finfo, against all of their numbers, and against published tables."""

import pytest
import torch

from fmlab.train.precision import FORMATS, MX_FORMATS, bits_of, decode, encode, number_format

FLOATS = [one for one in FORMATS.values() if one.is_float]
IN_TORCH = [one for one in FLOATS if one.dtype is not None]
SMALL = [one for one in FORMATS.values() if one.bits <= 16]


@pytest.mark.parametrize("fmt", IN_TORCH, ids=str)
def test_limits_are_those_of_torch(fmt) -> None:
    info = torch.finfo(fmt.dtype)
    assert (fmt.max, fmt.min, fmt.epsilon) == (info.max, info.min, info.eps)
    assert fmt.smallest_normal == info.smallest_normal
    assert fmt.bits == info.bits


@pytest.mark.parametrize("fmt", SMALL, ids=str)
def test_limits_are_those_of_all_numbers(fmt) -> None:
    numbers = fmt.values()
    above = numbers[numbers > 0]
    assert (numbers.max(), numbers.min()) == (fmt.max, fmt.min)
    assert above[0] == fmt.smallest
    assert numbers[numbers > 1][0] - 1 == fmt.epsilon
    if fmt.is_float:  # from the smallest normal number on a step is epsilon of its power of two
        at = int((numbers == fmt.smallest_normal).nonzero())
        assert numbers[at + 1] - numbers[at] == fmt.smallest_normal * fmt.epsilon
        assert numbers[at] - numbers[at - 1] == fmt.smallest


@pytest.mark.parametrize("fmt", [one for one in SMALL if one.dtype and one.is_float], ids=str)
def test_codes_are_those_of_torch(fmt) -> None:
    codes = torch.arange(2**fmt.bits)
    raw = codes.to(torch.uint8) if fmt.bits == 8 else codes.to(torch.int16)
    wanted = raw.view(fmt.dtype).double()
    assert torch.equal(decode(codes, fmt).nan_to_num(1e9), wanted.nan_to_num(1e9))
    kept = ~wanted.isnan()  # not-a-number has many codes
    assert torch.equal(encode(wanted[kept], fmt), codes[kept])


def test_published_numbers() -> None:
    # OCP OFP8 v1.0 and MX v1.0, section 5.3; NVIDIA A100 whitepaper
    published = {"fp8-e4m3": 448, "fp8-e5m2": 57344, "fp6-e3m2": 28, "fp6-e2m3": 7.5, "fp4-e2m1": 6}
    assert {name: FORMATS[name].max for name in published} == published
    assert FORMATS["fp4-e2m1"].values().tolist()[7:] == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert not decode(torch.arange(256), FORMATS["fp8-e4m3"]).isinf().any()
    assert int(decode(torch.arange(256), FORMATS["fp8-e4m3"]).isnan().sum()) == 2
    tf32 = FORMATS["tf32"]
    assert (tf32.bits, tf32.stored, tf32.epsilon) == (19, 32, FORMATS["fp16"].epsilon)
    assert tf32.smallest_normal == FORMATS["fp32"].smallest_normal
    assert MX_FORMATS["mxfp8-e4m3"].bits == 8.25
    assert MX_FORMATS["mxfp4"].bits == 4.25
    assert MX_FORMATS["mxint8"].max == 1 + 63 / 64


def test_bits_spell_the_number() -> None:
    one = bits_of(0.15625, "fp32")  # the example of many a textbook: 1.25 / 8
    assert (one.sign, one.exponent, one.mantissa) == ("0", "01111100", "01" + "0" * 21)
    assert "1.25 x 2^-3 = 0.15625" in str(one)
    assert bits_of(-0.0, "fp8-e4m3").code == 128
    below = bits_of(3e-8, "fp16")
    assert (below.value, below.exponent) == (2**-24, "00000")
    assert "x 2^-14" in below.meaning
    assert bits_of(0.1, "bf16").error == pytest.approx(0.1 / 0.1 * (0.10009765625 / 0.1 - 1))
    assert bits_of(1000.0, "fp8-e5m2").value == 1024
    assert bits_of(-5.0, "int4").code == 11
    assert bits_of(float("inf"), "fp16").meaning == "inf"


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="legal are fp32, tf32"):
        number_format("fp7")
    with pytest.raises(ValueError, match="round it first"):
        encode(torch.tensor([0.1]), FORMATS["bf16"])
    with pytest.raises(ValueError, match="at most 16 bits"):
        FORMATS["fp32"].values()
    with pytest.raises(ValueError, match="no code for not-a-number"):
        bits_of(float("nan"), "fp4-e2m1")
    assert number_format(torch.bfloat16) is FORMATS["bf16"]
