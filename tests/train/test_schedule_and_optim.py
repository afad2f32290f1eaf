"""Learning rate and AdamW groups."""

import pytest
import torch
from torch import nn

from fmlab.models import GPT, GPTConfig
from fmlab.train import TrainConfig, adamw, warmup_cosine
from fmlab.train.optim import decay_groups


def test_the_schedule_rises_to_the_peak_and_ends_at_the_minimum_in_the_last_step():
    lrs = [warmup_cosine(step, 100, 10, 1.0, 0.1) for step in range(100)]
    assert lrs[:10] == pytest.approx([i / 10 for i in range(1, 11)])
    assert lrs[9] == max(lrs) == 1.0
    assert lrs[99] == 0.1
    assert lrs[98] > 0.1
    assert lrs[9:] == sorted(set(lrs[9:]), reverse=True)
    assert lrs[54] == pytest.approx(0.55)  # half of the descent: half of the way
    assert warmup_cosine(1000, 100, 10, 1.0, 0.1) == 0.1
    assert warmup_cosine(0, 100, 0, 1.0) == pytest.approx(1.0, abs=1e-3)
    for warmup in (100, -1):
        with pytest.raises(ValueError, match="less than the 100 steps"):
            warmup_cosine(0, 100, warmup, 1.0)


def test_the_default_rate_is_near_that_of_gpt3_at_every_size():
    published = {768: 6e-4, 1024: 3e-4, 1536: 2.5e-4, 2048: 2e-4, 4096: 1.2e-4, 5120: 1e-4, 12288: 0.6e-4}
    for width, lr in published.items():
        assert 1.0 < TrainConfig().lr_for(width) / lr < 2.5
    assert TrainConfig(lr=1e-5).lr_for(768) == 1e-5


def test_matrices_are_decayed_and_vectors_are_not():
    model = GPT(GPTConfig(11, 8, 2, 8, 2))
    names = {id(p): name for name, p in model.named_parameters()}
    decayed, kept = decay_groups(model.named_parameters())
    assert len(decayed) + len(kept) == len(names), "a tied weight must be in one group, once"
    assert all(names[id(p)].endswith(".weight") and "norm" not in names[id(p)] for p in decayed)
    assert all("norm" in names[id(p)] or names[id(p)].endswith(".bias") for p in kept)

    linear = nn.Linear(2, 2)
    before = {name: p.detach().clone() for name, p in linear.named_parameters()}
    optimizer = adamw(lr=0.1, weight_decay=0.5)(linear.named_parameters())
    for p in linear.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()  # with no gradient, only decay moves a weight
    torch.testing.assert_close(linear.weight, before["weight"] * (1 - 0.1 * 0.5))
    assert torch.equal(linear.bias, before["bias"])


def test_fused_where_there_is_a_kernel_and_equal_to_the_plain_one():
    results = []
    for fused in (None, False):
        torch.manual_seed(0)
        linear = nn.Linear(3, 3)
        optimizer = adamw(lr=0.1, fused=fused)(linear.named_parameters())
        assert optimizer.param_groups[0]["fused"] is (fused is None)
        for _ in range(3):
            optimizer.zero_grad()
            linear(torch.ones(1, 3)).square().sum().backward()
            optimizer.step()
        results.append(linear.weight.detach().clone())
    torch.testing.assert_close(*results)
    meta = nn.Linear(3, 3, device="meta")
    assert adamw()(meta.named_parameters()).param_groups[0]["fused"] is False


@pytest.mark.parametrize("bad", [{"lr": -1}, {"betas": (0.9, 1.0)}, {"weight_decay": -0.1}])
def test_values_out_of_range_are_refused(bad):
    with pytest.raises(ValueError, match="must be at least 0"):
        adamw(**bad)
