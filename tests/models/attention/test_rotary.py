"""RoPE against its definition with complex numbers, and every scaling against transformers' formulas."""

import dataclasses

import pytest
import torch

from fmlab.models.attention.rotary import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    Rotary,
    YarnScaling,
    rotate,
)

SCALINGS = {
    "linear": LinearScaling(4.0),
    "dynamic": DynamicNTKScaling(2.0, 64),
    "llama3": Llama3Scaling(8.0, 64, 1.0, 4.0),
    "yarn": YarnScaling(16.0, 64),
    "yarn, DeepSeek": YarnScaling(40.0, 64, mscale=1.0, mscale_all_dim=0.707),
    "yarn, all given": YarnScaling(4.0, 64, 16.0, 2.0, given_attention_factor=1.3, truncate=False),
}


def transformers_parameters(rotary: Rotary) -> tuple[object, str]:
    """A LlamaConfig with this scaling, and the scaling's name there."""
    transformers = pytest.importorskip("transformers")
    kind = {LinearScaling: "linear", DynamicNTKScaling: "dynamic", Llama3Scaling: "llama3"}.get(
        type(rotary.scaling), "yarn"
    )
    names = {
        "original_max_positions": "original_max_position_embeddings",
        "given_attention_factor": "attention_factor",
    }
    fields = {names.get(k, k): v for k, v in dataclasses.asdict(rotary.scaling).items() if v is not None}
    if kind == "dynamic":
        del fields["original_max_position_embeddings"]  # it is max_position_embeddings there
    parameters = {"rope_type": kind, "rope_theta": rotary.theta, **fields}
    config = transformers.LlamaConfig(
        hidden_size=4 * rotary.head_size,
        num_attention_heads=4,
        max_position_embeddings=64,
        rope_parameters=parameters,
    )
    return config, kind


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("head_size", [16, 64])
def test_every_scaling_equals_transformers(name: str, head_size: int) -> None:
    rotary = Rotary(head_size, 10_000.0, SCALINGS[name])
    config, kind = transformers_parameters(rotary)
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for length in (None, 10, 64, 100, 1000):
        expected, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=length)
        assert torch.equal(rotary.frequencies(length=length), expected)
        assert rotary.scaling is not None
        assert rotary.scaling.attention_factor == factor


@pytest.mark.parametrize("name", [None, *SCALINGS])
def test_turned_queries_and_keys_equal_transformers(name: str | None) -> None:
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    rotary = Rotary(16, 500_000.0, SCALINGS[name] if name else None)
    if name:
        config = transformers_parameters(rotary)[0]
    else:
        config = modeling.LlamaConfig(
            hidden_size=64, num_attention_heads=4, rope_parameters={"rope_theta": 500_000.0}
        )
    position_ids = torch.tensor([[0, 1, 2, 90], [5, 6, 0, 1]])
    x = torch.randn(2, 3, 4, 16)
    cos, sin = modeling.LlamaRotaryEmbedding(config)(x, position_ids)
    expected = modeling.apply_rotary_pos_emb(x, x, cos, sin)[0]
    torch.testing.assert_close(rotate(x, *rotary(position_ids)), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("interleaved", [True, False])
def test_a_pair_is_a_complex_number_that_is_turned(interleaved: bool) -> None:
    x = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    positions = torch.tensor([[0, 1, 2, 3, 40], [0, 1, 0, 1, 2]])
    pairs = x.unflatten(-1, (4, 2)) if interleaved else x.unflatten(-1, (2, 4)).mT
    angles = positions[:, None, :, None] * 10_000.0 ** (-torch.arange(0, 8, 2).double() / 8)
    turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angles), angles)
    expected = torch.cat([turned.real, turned.imag], -1)
    got = rotate(x, *Rotary(8)(positions), interleaved=interleaved)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


def test_products_depend_on_the_distance_alone() -> None:
    query, key = torch.randn(1, 1, 1, 32), torch.randn(1, 1, 1, 32)

    def product(q: int, k: int) -> torch.Tensor:
        rotary = Rotary(32)
        turned = [rotate(x, *rotary(torch.tensor([[p]]))) for x, p in ((query, q), (key, k))]
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(product(7, 3), product(107, 103), rtol=0, atol=1e-4)
    assert abs(product(7, 3) - product(7, 4)) > 1e-2


def test_angles_stay_exact_where_bf16_cannot_count() -> None:
    positions = torch.tensor([[256, 257]])  # one and the same number in bf16
    cos, sin = Rotary(8)(positions)
    assert cos.dtype == torch.float32
    x = torch.ones(1, 1, 2, 8, dtype=torch.bfloat16)
    turned = rotate(x, cos, sin)
    assert turned.dtype == torch.bfloat16
    torch.testing.assert_close(turned.float(), rotate(x.float(), cos, sin), rtol=0, atol=2**-8)
    assert not torch.equal(turned[:, :, 0], turned[:, :, 1])


BAD = {
    "odd": (lambda: Rotary(7), "even head width, got 7"),
    "theta": (lambda: Rotary(8, 1.0), "theta must be above 1"),
    "factor": (lambda: LinearScaling(0.5), "at least 1, got 0.5"),
    "ramp": (lambda: YarnScaling(2.0, 64, 1.0, 32.0), "beta_slow must be above 0 and below beta_fast"),
    "band": (lambda: Llama3Scaling(8.0, 64, 4.0, 1.0), "below high_freq_factor, got 4.0 and 1.0"),
    "length": (lambda: DynamicNTKScaling(2.0, 0), "original_max_positions must be at least 1"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_values_are_refused_with_the_reason(case: str) -> None:
    call, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        call()
