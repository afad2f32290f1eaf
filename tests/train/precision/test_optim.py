"""AdamW for 16-bit weights, and dynamic loss scaling, each against torch's own."""

import pytest
import torch
from torch import nn

from fmlab.train.precision import UPDATES, LossScaler, RoundedAdamW, numbers_called

SETTINGS = dict(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


def descend(update: str, dtype: torch.dtype, steps: int = 30) -> tuple[torch.Tensor, torch.optim.Optimizer]:
    torch.manual_seed(0)
    target, weight = torch.randn(40, 50), nn.Parameter(torch.randn(40, 50).to(dtype))
    made = torch.optim.AdamW if update == "torch" else RoundedAdamW
    optimizer = made([weight], **SETTINGS, **({} if update == "torch" else {"update": update}))
    for _ in range(steps):
        weight.grad = (weight.detach().float() - target).to(dtype)
        optimizer.step()
    return weight.detach().float(), optimizer


@pytest.mark.parametrize("update", UPDATES)
def test_on_fp32_weights_every_way_is_torch_adamw(update) -> None:
    ours, torchs = descend(update, torch.float32)[0], descend("torch", torch.float32)[0]
    close = 1e-4 if update == "kahan" else 1e-6  # fp32 rounds differently
    torch.testing.assert_close(ours, torchs, rtol=close, atol=close)


def test_a_weight_that_stands_still() -> None:
    """100 steps of 0.001 down from 1: below 1 the numbers of bf16 are 2^-8 apart, so nearest never moves."""
    ends, states = {}, {}
    for name in ("fp32", "bf16-pure", "bf16-nearest", "bf16-stochastic", "bf16-kahan", "bf16-master"):
        numbers = numbers_called(name)
        torch.manual_seed(0)
        weights = nn.Parameter(torch.ones(2000, 1).to(numbers.weights))
        optimizer = numbers.optimizer(1e-3, (0.9, 0.95), 0.0)([("w", weights)])
        for _ in range(100):
            weights.grad = torch.ones_like(weights)
            optimizer.step()
        ends[name], states[name] = weights.detach().double(), optimizer.state[weights]
    assert (ends["bf16-pure"] == 1).all()
    assert (ends["bf16-nearest"] == 1).all()
    assert ends["fp32"].mean() == pytest.approx(0.9, abs=1e-5)
    assert ends["bf16-stochastic"].mean() == pytest.approx(0.9, abs=2e-3)
    assert ends["bf16-stochastic"].std() > 0.01, "each weight has its own luck"
    for name in ("bf16-kahan", "bf16-master"):
        assert (ends[name] - 0.9).abs().max() <= 2**-9, "half a gap"
    moments = {name: (s["exp_avg"].dtype, s["exp_avg_sq"].dtype) for name, s in states.items()}
    assert moments.pop("bf16-pure") == (torch.bfloat16, torch.bfloat16)  # what torch does with bf16 weights
    assert set(moments.values()) == {(torch.float32, torch.float32)}
    assert (states["bf16-master"]["master"].dtype, states["bf16-kahan"]["lost"].dtype) == (
        torch.float32,
        torch.bfloat16,
    )


@pytest.mark.parametrize("name", ["fp32", "bf16-pure", "bf16-stochastic", "bf16-kahan", "bf16-master"])
def test_bytes_a_parameter_are_those_in_memory(name) -> None:
    numbers = numbers_called(name)
    weight = nn.Parameter(torch.ones(64, 64).to(numbers.weights))
    optimizer = numbers.optimizer(1e-3, (0.9, 0.95), 0.1)([("w", weight)])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    state = [value for value in optimizer.state[weight].values() if value.numel() > 1]
    assert sum(t.nbytes for t in (weight.data, weight.grad, *state)) == 4096 * numbers.bytes_per_parameter()


def test_an_unknown_update_is_refused() -> None:
    with pytest.raises(ValueError, match="legal are nearest, stochastic, kahan, master"):
        RoundedAdamW([nn.Parameter(torch.ones(1))], update="up")


# ---- loss scaling ------------------------------------------------------------------------------------------


def test_the_scale_moves_as_that_of_torch() -> None:
    """The same overflows, the same scales, the same weights, over growth and two kinds of skipped steps."""
    bad = {3: torch.inf, 4: torch.nan, 11: torch.inf}
    settings = (2.0**10, 2.0, 0.5, 3)
    theirs = torch.amp.GradScaler("cpu", *settings)
    ours = LossScaler(*settings)
    weights = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizers = [torch.optim.SGD([w], 0.1) for w in weights]
    for step in range(20):
        factor = bad.get(step, 1.0)
        for w, optimizer in zip(weights, optimizers, strict=True):
            optimizer.zero_grad()
            loss = (w * w).sum() * factor
            if w is weights[0]:
                theirs.scale(loss).backward()
                theirs.step(optimizer)
                theirs.update()
            else:
                ours.scaled(loss).backward()
                finite = ours.unscale_([w.grad])
                assert finite is (step not in bad)
                if finite:
                    optimizer.step()
                ours.update(finite)
        assert theirs.get_scale() == ours.scale, f"step {step}"
        assert theirs._get_growth_tracker() == ours.good
    assert torch.equal(*weights)
    assert weights[0].isfinite().all()


def test_a_growth_step_divides_by_the_scale_of_its_backward_pass() -> None:
    scaler = LossScaler(8.0, interval=1)
    for _ in range(3):  # every step grows; a true gradient of 1 stays 1
        w = nn.Parameter(torch.ones(()))
        scaler.scaled(w).backward()
        assert scaler.unscale_([w.grad])
        scaler.update(True)
        assert w.grad == 1
    assert scaler.scale == 64
    largest = LossScaler(2.0**127, interval=1)
    largest.update(True)
    assert largest.scale == 2.0**127, "the scale stays a number of fp32"


@pytest.mark.parametrize("bad", [{"scale": 0}, {"growth": 1.0}, {"backoff": 1.0}, {"interval": 0}])
def test_scales_that_would_not_move_are_refused(bad) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(bad))} must be"):
        LossScaler(**bad)


@pytest.mark.parametrize("update", UPDATES)
def test_a_saved_state_goes_on_as_if_nothing_had_happened(update: str) -> None:
    """torch would bring fp32 moments and masters to the weights' 16 bits when it loads them."""
    weights = [nn.Parameter(torch.ones(40, dtype=torch.bfloat16)) for _ in range(2)]
    first, second = (RoundedAdamW([weight], **SETTINGS, update=update) for weight in weights)
    torch.manual_seed(0)
    gradients = torch.randn(6, 40).bfloat16()
    for gradient in gradients[:3]:
        weights[0].grad = gradient
        first.step()
    weights[1].data.copy_(weights[0])
    second.load_state_dict(first.state_dict())
    assert {k: x.dtype for k, x in second.state[weights[1]].items()} == {
        k: x.dtype for k, x in first.state[weights[0]].items()
    }
    for gradient in gradients[3:]:
        for weight, optimizer in zip(weights, (first, second), strict=True):
            torch.manual_seed(1)
            weight.grad = gradient
            optimizer.step()
    assert torch.equal(*weights)
    other = RoundedAdamW([weights[1]], update="kahan" if update != "kahan" else "master")
    with pytest.raises(ValueError, match="load it with the update that it was made by"):
        other.load_state_dict(first.state_dict())


def test_settings_that_mean_nothing_are_refused() -> None:
    weight = nn.Parameter(torch.ones(2))
    for wrong in (dict(lr=-1.0), dict(lr=float("nan")), dict(betas=(1.0, 0.9)), dict(eps=-1.0)):
        with pytest.raises(ValueError, match="at least 0 and below"):
            RoundedAdamW([weight], **wrong)
    for scale in (float("inf"), float("nan"), 0.0):
        with pytest.raises(ValueError, match="above 0 and finite"):
            LossScaler(scale)
