"""16-bit attention on the CPU that is worked out in fp32 and keeps 16-bit tensors only."""

import pytest
import torch
import torch.nn.functional as F

from fmlab.meter import saved_activations
from fmlab.models.attention import AttentionMask, sdpa_core
from fmlab.models.attention.wide import wide_attention
from fmlab.models.layers import Linear


@pytest.mark.parametrize(("causal", "keys"), [(False, 7), (True, 5)])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_it_is_fp32_attention_of_the_16_bit_inputs(causal: bool, keys: int, scale: float | None) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, n, 3, 16, generator=generator).bfloat16().transpose(1, 2).requires_grad_()
        for n in (5, keys, keys)
    )
    exact = tuple(x.detach().float().requires_grad_() for x in (query, key, value))
    got = wide_attention(query, key, value, causal, scale)
    want = F.scaled_dot_product_attention(*exact, is_causal=causal, scale=scale)
    d_out = torch.randn(want.shape, generator=generator).bfloat16()
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, want.bfloat16())  # rounded once, at the end
    gradients = torch.autograd.grad(got, (query, key, value), d_out)
    for gradient, reference in zip(gradients, torch.autograd.grad(want, exact, d_out.float()), strict=True):
        assert (gradient - reference).norm() < 0.005 * reference.norm()  # bfloat16: half a unit is 0.2 %


def test_attention_under_autocast_keeps_no_fp32_copies() -> None:
    class Attend(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = Linear(32, 96)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            query, key, value = self.qkv(x).view(2, 16, 3, 2, 16).permute(2, 0, 3, 1, 4)
            return sdpa_core(query, key, value, AttentionMask(False, 16, 16))

    attend = Attend()
    with torch.autocast("cpu", torch.bfloat16), saved_activations(attend) as saved:
        attend(torch.randn(2, 16, 32))
    assert saved.by_dtype["float32"] == 4 * 2 * 2 * 16  # a log-sum-exp for each query of each head
    assert saved.by_dtype["bfloat16"] > 0
