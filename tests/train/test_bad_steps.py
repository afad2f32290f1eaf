"""Bad steps: spikes are found and noise is not; skip, stop and rollback do what they say, on all ranks."""

import hashlib
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from fmlab.data import WindowSampler
from fmlab.data.sampler import split_micro_batches
from fmlab.parallel import Layout
from fmlab.train import Callback, checkpoint, warmup_cosine
from fmlab.train.bad_steps import LEAST, BadStepError, spike_limit
from tests.train.tiny_run import tiny_config, tiny_engine, tiny_model, tiny_train


class Poison:
    """Multiplies what the second block's MLP gives by `factor`, in the training steps of some batches."""

    def __init__(self, batches: set[int], factor: float = math.nan, on_rank: int | None = None) -> None:
        self.batches, self.factor, self.on_rank, self.now = batches, factor, on_rank, -1
        self.model = tiny_model()
        self.name = [name for name, _ in self.model.named_modules() if name.endswith("mlp")][1]
        self.model.get_submodule(self.name).register_forward_hook(self._spoil)

    def _spoil(self, module: object, args: object, output: torch.Tensor) -> torch.Tensor | None:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        here = self.on_rank is None or self.on_rank == rank
        return output * self.factor if self.now in self.batches and here else None

    def train(self, **settings):
        """tiny_train, told which batch is read."""
        read = WindowSampler.batch

        def batch(sampler, step):
            self.now = step
            return read(sampler, step)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(WindowSampler, "batch", batch)
            return tiny_train(model=self.model, **settings)


def without(left_out: set[int], steps: int = 10) -> list[torch.Tensor]:
    """The weights of a run that never sees some batches: the engine driven by hand."""
    samplers = []
    load = WindowSampler.batch

    def note(sampler, step):
        samplers.append(sampler)
        return load(sampler, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WindowSampler, "batch", note)
        tiny_train(steps=3)
    engine, config = tiny_engine(), tiny_config(steps=steps)
    engine.max_grad_norm = config.clip
    for updates, number in enumerate(sorted(set(range(steps)) - left_out)):
        engine.set_lr(warmup_cosine(updates, steps, config.warmup_steps, config.lr, config.lr * 0.1))
        engine.step(split_micro_batches(load(samplers[0], number), 1))
    return [p.detach() for p in engine.model.parameters()]


def equal(model, weights) -> bool:
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), weights, strict=True))


def test_known_spikes_are_found_and_noise_is_not():
    for seed in range(5):
        noise = np.random.default_rng(seed).normal(0, 0.05, 600)
        series = 2 + 4 * np.exp(-np.arange(600) / 100) + noise
        spikes = {80, 81, 82, 300, 450, 599}
        series[list(spikes)] += 1.0  # 20 standard deviations, three of them in a row
        found = {i for i, loss in enumerate(series) if loss > spike_limit(series[:i].tolist(), 6.0)}
        assert found == spikes


def test_the_limit_needs_losses_and_bears_equal_and_missing_ones():
    assert spike_limit([1.0] * (LEAST - 1), 6.0) == math.inf
    assert spike_limit([1.0] * 100, 0.0) == math.inf
    assert spike_limit([math.nan] * 40 + [2.0] * LEAST, 6.0) == pytest.approx(2.12)
    assert spike_limit([1.0] * 60 + [9.0] * 7, 6.0) < 9.0
    assert spike_limit([1.0] * 60 + [9.0] * 9, 6.0) > 9.0  # another level is one no longer when it lasts


def test_a_skipped_batch_is_as_if_it_had_not_been_there():
    result = Poison({2, 5}).train()
    assert [step for step, _ in result.bad_steps] == [3, 6]
    assert all("the loss is nan" in wrong for _, wrong in result.bad_steps)
    assert "2 bad steps" in str(result)
    assert equal(result.model, without({2, 5}))


def test_a_spike_is_skipped_before_the_update():
    spoiled = Poison({40}, factor=200.0)
    result = spoiled.train(steps=44, spike_factor=6.0)
    assert [step for step, _ in result.bad_steps] == [41]
    assert "is a spike: above" in result.bad_steps[0][1]
    assert equal(result.model, without({40}, steps=44))


class Seen(Callback):
    def __init__(self):
        self.back, self.steps = [], []

    def on_step(self, metrics):
        self.steps.append(metrics.step)

    def on_rollback(self, step, to):
        self.back.append((step, to))


@pytest.mark.parametrize("beside", [False, True])
def test_a_rollback_ends_as_a_run_that_never_saw_the_batches(tmp_path, beside):
    """One bad step, and a second one behind it before the next checkpoint; none that is far back."""
    seen = Seen()
    settings = dict(on_bad_step="rollback", save_every=4, leave_out=2, async_save=beside)
    result = Poison({5, 7}).train(out=str(tmp_path), callbacks=(seen,), **settings)
    assert seen.back == result.rollbacks == [(6, 4), (8, 4)]
    assert seen.steps == [1, 2, 3, 4, 5, 6, 5, 6, 7, 8, 5, 6, 7, 8, 9, 10]
    assert len(result.losses) == 10
    assert [i for i, loss in enumerate(result.losses) if math.isnan(loss)] == [4, 5, 6, 7]
    assert equal(result.model, without({4, 5, 6, 7}))
    state = checkpoint.run_state(checkpoint.latest(tmp_path))
    assert (state.step, state.updates) == (10, 6)


def test_going_back_has_an_end(tmp_path):
    with pytest.raises(
        BadStepError, match=r"step 8: the loss is nan; first on rank 0.* back 1 times already"
    ):
        Poison({5, 7}).train(out=str(tmp_path), on_bad_step="rollback", save_every=4, max_bad_steps=1)
    with pytest.raises(BadStepError, match="no checkpoint yet to go back to"):
        Poison({2}).train(out=str(tmp_path / "other"), on_bad_step="rollback", save_every=4)
    with pytest.raises(BadStepError, match=r"step 6: .* these are 4 bad steps in a row"):
        Poison({2, 3, 4, 5, 6}).train(max_bad_steps=3)


def fingerprint(folder: Path) -> dict[str, str]:
    files = (p for p in folder.rglob("*") if p.is_file() and p.name != ".lock")
    return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def test_stop_says_where_it_began_and_leaves_the_checkpoints(tmp_path):
    spoiled = Poison({6})
    whole = {}

    class Note(Callback):
        def on_step(self, metrics):
            if metrics.step == 7:
                whole.update(fingerprint(tmp_path))

    with pytest.raises(BadStepError) as stopped:
        spoiled.train(out=str(tmp_path), on_bad_step="stop", save_every=2, callbacks=(Note(),))
    said = str(stopped.value)
    assert said.startswith(f"step 7: the loss is nan; first on rank 0: the output of {spoiled.name} is not")
    assert "--on-bad-step skip" in said
    assert fingerprint(tmp_path) == whole
    assert checkpoint.steps(tmp_path) == [4, 6]
    healthy = tiny_train(out=str(tmp_path), on_bad_step="stop", save_every=2, resume=True)
    assert equal(healthy.model, without(set()))


def test_a_gradient_and_a_weight_are_named_too():
    class Explodes(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * math.inf

    model = tiny_model()
    model.blocks[1].register_forward_pre_hook(
        lambda module, args: (args[0].updated(hidden=Explodes.apply(args[0].hidden)),)
    )
    with pytest.raises(
        BadStepError, match=r"step 1: the gradient is not finite; .* gradient of the output of"
    ):
        tiny_train(model=model, on_bad_step="stop")
    model = tiny_model()
    name, parameter = list(model.named_parameters())[-1]
    torch.nn.init.constant_(parameter, math.inf)
    with pytest.raises(BadStepError, match=f"first on rank 0: the weight {name} is not finite"):
        tiny_train(model=model, on_bad_step="stop")


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        (dict(on_bad_step="ignore"), "on_bad_step must be skip, stop, rollback"),
        (dict(on_bad_step="rollback"), "needs checkpoints to go back to: set out and save_every"),
        (dict(on_bad_step="rollback", out="run"), "needs checkpoints to go back to: set out and save_every"),
        (dict(leave_out=5), "leave_out is of on_bad_step='rollback'"),
        (dict(spike_factor=-1), "spike_factor must be at least 0"),
        (dict(max_bad_steps=-1), "max_bad_steps must be at least 0"),
        (dict(spike_factor=6, engine="deepspeed"), "cannot skip the update of a spike"),
    ],
)
def test_settings_that_cannot_be_followed_are_refused(settings, wanted):
    with pytest.raises(ValueError, match=wanted):
        tiny_config(**settings)


def on_rank(settings, batches, factor, on_rank):
    try:
        result = Poison(batches, factor, on_rank).train(**settings)
    except BadStepError as error:
        return str(error)
    return result.losses, result.bad_steps, [p.detach().clone() for p in result.model.parameters()]


@pytest.mark.multirank
@pytest.mark.parametrize("layout", [Layout(data=2), Layout(data=2, zero=3), Layout(pipeline=2)])
def test_two_ranks_decide_alike(ranks2, tmp_path, layout):
    """One rank's numbers are bad, and both skip, go back and name it; the weights are those of one."""
    settings = dict(steps=8, layout=layout)
    bad_rank = None if layout.pipeline > 1 else 1
    both = ranks2.run(on_rank, settings, {3}, math.nan, bad_rank)
    back = dict(on_bad_step="rollback", out=str(tmp_path / "back"), save_every=2)
    both += ranks2.run(on_rank, settings | back, {3}, math.nan, bad_rank)
    for losses, bad_steps, weights in both:
        assert next(step for step, _ in bad_steps) == 4
        assert [i for i, loss in enumerate(losses) if math.isnan(loss)] == [3]
        for ours, theirs in zip(weights, without({3}, steps=8), strict=True):
            torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)
    assert len({str(losses) for losses, _, _ in both}) == 1
    first, second = ranks2.run(on_rank, settings | {"on_bad_step": "stop"}, {3}, math.nan, bad_rank)
    assert first == second
    assert first.startswith("step 4: the loss is nan; first on rank 1: the output of ")
