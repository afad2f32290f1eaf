"""Multi-head latent attention against DeepSeek's in transformers; absorbed, cached and plain are the same."""

from typing import Any

import pytest
import torch
from torch import nn

from fmlab.models.attention import AttentionMask
from fmlab.models.attention.latent import LatentAttention, LatentCache
from fmlab.models.attention.rotary import Rotary, YarnScaling
from fmlab.models.hf import Weight
from tests.models.reference import assert_same_gradients, copy_weights, roughen

D, H, C, N, R, V = 24, 3, 10, 6, 4, 5
YARN = YarnScaling(40.0, 32, mscale=1.0, mscale_all_dim=0.8)


def latent(query_rank: int | None = 8, scaling: YarnScaling | None = None) -> LatentAttention:
    torch.manual_seed(0)
    layer = LatentAttention(D, H, query_rank, C, N, R, V, Rotary(R, 10_000.0, scaling))
    for name, parameter in layer.named_parameters():
        nn.init.ones_(parameter) if "norm" in name else nn.init.normal_(parameter, 0, 0.3)
    roughen(layer)
    return layer


def weights(layer: LatentAttention) -> list[Weight]:
    names = {
        "latent_down": "kv_a_proj_with_mqa",
        "latent_norm": "kv_a_layernorm",
        "key_value": "kv_b_proj",
        "output": "o_proj",
        "query": "q_b_proj" if layer.low_rank_queries else "q_proj",
    }
    if layer.low_rank_queries:
        names |= {"query_down": "q_a_proj", "query_norm": "q_a_layernorm"}
    return [Weight(f"{ours}.weight", f"{theirs}.weight") for ours, theirs in names.items()]


def deepseek(version: str, layer: LatentAttention) -> tuple[nn.Module, nn.Module]:
    """transformers' attention with the weights of `layer`, and its rotary embedding."""
    modeling = pytest.importorskip(f"transformers.models.deepseek_{version}.modeling_deepseek_{version}")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10_000.0}
    if layer.rotary.scaling is not None:
        rope |= {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.8}
        rope |= {"original_max_position_embeddings": 32}
    config = getattr(modeling, f"Deepseek{version.upper()}Config")(
        hidden_size=D,
        num_attention_heads=H,
        num_key_value_heads=H,
        q_lora_rank=8 if layer.low_rank_queries else None,
        kv_lora_rank=C,
        qk_nope_head_dim=N,
        qk_rope_head_dim=R,
        v_head_dim=V,
        rope_parameters=rope,
        max_position_embeddings=64,
        attn_implementation="eager",
    )
    twin = getattr(modeling, f"Deepseek{version.upper()}Attention")(config, 0)
    copy_weights(layer, twin, weights(layer))
    return twin, getattr(modeling, f"Deepseek{version.upper()}RotaryEmbedding")(config)


@pytest.mark.parametrize("version", ["v2", "v3"])
@pytest.mark.parametrize("query_rank", [8, None])
@pytest.mark.parametrize("scaling", [None, YARN], ids=["plain", "yarn"])
@pytest.mark.parametrize("absorbed", [False, True])
def test_outputs_and_gradients_equal_deepseek(
    version: str, query_rank: int | None, scaling: YarnScaling | None, absorbed: bool
) -> None:
    layer = latent(query_rank, scaling)
    twin, rotary = deepseek(version, layer)
    x = torch.randn(2, 9, D, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    positions = torch.stack([torch.arange(9), torch.arange(9) + 30])
    mask = AttentionMask(True, 9, 9)
    got = layer(x, positions, mask, absorbed=absorbed)
    dense = mask.dense(torch.float32, x.device)
    expected = twin(y, attention_mask=dense, position_embeddings=rotary(y, positions))[0]
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    weight = torch.randn_like(got)
    (got * weight).sum().backward()
    (expected * weight).sum().backward()
    assert (x.grad - y.grad).norm() <= 1e-5 * y.grad.norm()
    assert_same_gradients(layer, twin, weights(layer))


@pytest.mark.parametrize("scaling", [None, YARN], ids=["plain", "yarn"])
def test_cached_pieces_in_both_forms_equal_the_whole(scaling: YarnScaling | None) -> None:
    layer = latent(scaling=scaling).double()
    x = torch.randn(2, 12, D, dtype=torch.float64)
    positions = torch.arange(12).expand(2, 12)
    real = torch.ones(2, 12, dtype=torch.bool)
    real[1, :3] = False
    whole = layer(x, positions, AttentionMask(True, 12, 12, real))
    for absorbed in (None, False, True):
        cache = LatentCache(1, 2, 12, C, R, torch.float64)
        pieces = []
        for start, end in ((0, 5), (5, 6), (6, 10), (10, 12)):
            cache.begin(end - start, real[:, start:end].long())
            mask = AttentionMask(True, end - start, end, cache.real[:, :end])
            with torch.no_grad():
                pieces.append(layer(x[:, start:end], positions[:, start:end], mask, cache, absorbed=absorbed))
            cache.finish(end - start)
        torch.testing.assert_close(torch.cat(pieces, 1)[real], whole[real], rtol=0, atol=1e-12)


def test_the_cache_keeps_the_latent_and_one_rotary_key_only() -> None:
    """DeepSeek-V2's shape: 576 numbers a token and layer, where 128 heads' keys and values are 40960."""
    cache = LatentCache(2, 3, 7, 512, 64)
    assert cache.nbytes == 4 * 2 * 3 * 7 * 576
    assert 128 * (128 + 64 + 128) / 576 > 71
    assert cache.value.data_ptr() == cache.key.data_ptr()
    cache.key.normal_()
    cache.length = 7
    cache.select(torch.tensor([2, 2]))
    assert cache.value.data_ptr() == cache.key.data_ptr()
    assert cache.batch == 2


def test_it_works_under_autocast_and_as_one_graph() -> None:
    layer = latent()
    x, positions, mask = torch.randn(2, 9, D), torch.arange(9).expand(2, 9), AttentionMask(True, 9, 9)
    exact = layer(x, positions, mask)
    for absorbed in (False, True):
        with torch.autocast("cpu", torch.bfloat16):
            rough = layer(x, positions, mask, absorbed=absorbed)
        assert (rough - exact).norm() < 0.02 * exact.norm()
    captured = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(captured(x, positions, mask), exact, rtol=0, atol=1e-6)


def test_a_rotary_of_another_width_is_refused() -> None:
    with pytest.raises(ValueError, match="a width of 8, but rope_size is 4"):
        LatentAttention(D, H, None, C, N, R, V, Rotary(8))
