"""TrainConfig(numbers=…): what each way does to weights, products and updates in the real loop; the pains."""

import math

import pytest
import torch
from torch.nn import functional as F

from fmlab.models.cross_entropy import linear_cross_entropy
from fmlab.objectives import CausalLM
from fmlab.parallel import Layout, parallelize
from fmlab.train.precision import (
    NUMBERS,
    FewBits,
    LossScaler,
    QuantisedLinear,
    RoundedLinear,
    numbers_called,
    quantise_weights,
)
from tests.train.tiny_run import tiny_config, tiny_model, tiny_train


@pytest.mark.parametrize("name", NUMBERS)
def test_every_way_runs_in_the_loop_and_leaves_a_plain_model(name) -> None:
    result = tiny_train(numbers=name, steps=4)
    assert all(math.isfinite(loss) for loss in result.losses)
    assert result.losses[-1] < result.losses[0] - 0.5
    assert {p.dtype for p in result.model.parameters()} == {torch.float32}
    assert not any(isinstance(m, RoundedLinear) for m in result.model.modules())
    if name == "fp32":
        assert result.losses == tiny_train(steps=4).losses


@pytest.mark.parametrize(
    "name", ["bf16-stochastic", "bf16-kahan", "bf16-master", "fp8-delayed", "fp16-scaled"]
)
def test_resume_is_bitwise(name, tmp_path) -> None:
    straight = tiny_train(numbers=name, steps=6, out=str(tmp_path / "a"))
    tiny_train(numbers=name, steps=6, out=str(tmp_path / "b"), save_every=3)
    for left in (tmp_path / "b" / "steps").glob("000006"):
        left.rename(tmp_path / "gone")
    (tmp_path / "b" / "latest").write_text("000003")
    resumed = tiny_train(numbers=name, steps=6, out=str(tmp_path / "b"), resume=True)
    assert resumed.losses == straight.losses
    for ours, theirs in zip(resumed.model.parameters(), straight.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(ValueError, match=r"numbers: .* in the checkpoint, None now"):
        tiny_train(steps=8, out=str(tmp_path / "b"), resume=True)


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(ValueError, match="legal are fp32, tf32, bf16-autocast"):
        tiny_config(numbers="bf8")
    with pytest.raises(ValueError, match="leave one of them out"):
        tiny_config(numbers="bf16-kahan", layout=Layout(precision="bf16"))
    with pytest.raises(ValueError, match="plain steps on one device"):
        tiny_train(numbers="mxfp8", layout=Layout(recompute="full"))
    with pytest.raises(ValueError, match="backends cpu and cuda"):
        tiny_train(numbers="mxfp8", backend="sim:trn2")


def few_bits(name: str, scaler: LossScaler | None = None) -> FewBits:
    numbers, model = numbers_called(name), tiny_model()
    factory = numbers.optimizer(1e-2, (0.9, 0.95), 0.0)
    make = lambda *args: FewBits(*args, numbers=numbers, scaler=scaler)  # noqa: E731
    engine = parallelize(numbers.prepare(model), Layout(), CausalLM(), factory, make)
    assert isinstance(engine, FewBits)
    return engine


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 300, (8, 17), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


def test_an_overflow_is_skipped_and_the_next_step_has_a_smaller_scale() -> None:
    engine = few_bits("fp16-scaled", LossScaler(2.0**40))
    before = {name: p.clone() for name, p in engine.full_params().items()}
    assert engine.step([batch()]).skipped
    assert engine.scaler is not None
    assert engine.scaler.scale == 2.0**39
    assert all(torch.equal(p, before[name]) for name, p in engine.full_params().items())
    assert not engine.optimizer.state, "moments must not see an overflow"
    while engine.step([batch()]).skipped:
        pass
    assert engine.scaler.scale < 2.0**30


def test_gradients_are_those_of_the_loss_whatever_the_scale() -> None:
    """Norm and clipping see unscaled gradients; a scale saves what fp16 rounds to zero."""
    runs = {}
    for name, scaler in (("fp32", None), ("fp16-unscaled", None), ("fp16-scaled", LossScaler(2.0**12))):
        engine = few_bits(name, scaler)
        runs[name] = (engine.step([batch()]).grad_norm, engine.full_grads())
    exact = runs["fp32"]
    for name in ("fp16-unscaled", "fp16-scaled"):
        assert runs[name][0] == pytest.approx(exact[0], rel=5e-3)
    off = {
        name: max(float((g - exact[1][k]).norm() / exact[1][k].norm()) for k, g in runs[name][1].items())
        for name in ("fp16-unscaled", "fp16-scaled")
    }
    assert off["fp16-scaled"] < off["fp16-unscaled"]
    assert off["fp16-scaled"] < 0.01


# ---- what others have stumbled over ------------------------------------------------------------------------


def test_the_loss_of_bf16_logits_is_not_in_steps() -> None:
    """A loss near 36 in bf16 moves in steps of 0.25; ours is summed from fp32 logits."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(40, 64).bfloat16(), torch.randn(500, 64).bfloat16()
    labels = torch.randint(0, 500, (40,))
    exact = F.cross_entropy(hidden.double() @ weight.double().T, labels, reduction="none")
    rows = [slice(i, i + 1) for i in range(40)]
    each = torch.stack([linear_cross_entropy(hidden[i], weight, labels[i]) for i in rows])
    in_bf16 = F.cross_entropy(hidden @ weight.T, labels, reduction="none")
    assert each.dtype == torch.float32
    assert (each - exact).abs().max() < 0.15  # the product of bf16 factors, itself rounded to bf16
    assert (in_bf16.float() * 16 % 1 == 0).float().mean() > 0.9
    assert (each * 16 % 1 == 0).float().mean() < 0.2


def test_weights_of_16_bits_are_not_taken_in_silence() -> None:
    """torch's AdamW copies their type for its moments; whoever asks for nothing is told."""
    with pytest.warns(UserWarning, match="bfloat16: AdamW keeps its moments in that type"):
        tiny_train(model=tiny_model().bfloat16(), steps=1, warmup=0)


def test_losses_add_up_in_fp32_when_the_weights_are_bf16() -> None:
    """Summed over many micro-batches in bf16, the loss would stop growing."""
    engine = few_bits("bf16-master")
    parts = [{k: v[i : i + 1] for k, v in batch().items()} for i in range(8)]
    split = engine.step(parts * 12)
    whole = few_bits("bf16-master").step([batch()])
    assert split.loss == pytest.approx(whole.loss, rel=2e-3)


def test_a_mask_in_few_bits_still_masks() -> None:
    """Causal and padding masks under 16-bit weights: later tokens change nothing, and nothing is nan."""
    for dtype in (torch.bfloat16, torch.float16):
        model = tiny_model().to(dtype).eval()
        ids = torch.randint(0, 300, (2, 12), generator=torch.Generator().manual_seed(0))
        changed = ids.clone()
        changed[:, 6:] = 1
        first, second = (model(x).logits[:, :6] for x in (ids, changed))
        assert first.isfinite().all()
        assert torch.equal(first, second)


def test_a_quantised_model_writes_as_before() -> None:
    result = tiny_train(steps=60)
    text = result.generate("item 3", max_new_tokens=8, greedy=True)
    quantise_weights(result.model, 8)
    assert any(isinstance(m, QuantisedLinear) for m in result.model.modules())
    assert result.generate("item 3", max_new_tokens=8, greedy=True) == text
