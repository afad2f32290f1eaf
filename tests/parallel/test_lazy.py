"""A step on a lazy device: the device decides what elsewhere the host does. Here on a CPU that pretends."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from fmlab.backends.cpu import CPU
from fmlab.models import GPT
from fmlab.objectives import CausalLM
from fmlab.parallel import Layout
from fmlab.parallel.single import SingleDevice


class LazyCPU(CPU):
    lazy = True


def engine(model: nn.Module, backend: CPU, optimizer: Any) -> SingleDevice:
    return SingleDevice(model, Layout(), CausalLM(), optimizer, backend, max_grad_norm=1.0)


OPTIMIZERS = {
    "adamw": lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-2, foreach=False, fused=False),
    "momentum": lambda named: torch.optim.SGD([p for _, p in named], lr=1e-1, momentum=0.9),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("bad_step", [None, 0, 1])
@pytest.mark.parametrize("still_step", [None, 2])
def test_the_same_weights_state_and_report(name: str, bad_step: int | None, still_step: int | None) -> None:
    """Step for step, with a gradient that is not finite, and with a learning rate of 0."""
    torch.manual_seed(0)
    model = GPT.from_preset("gpt2-tiny", num_layers=1, hidden_size=16, num_heads=2, vocab_size=50)
    twin = copy.deepcopy(model)
    engines = [engine(model, CPU(), OPTIMIZERS[name]), engine(twin, LazyCPU(), OPTIMIZERS[name])]
    for step in range(4):
        tokens = torch.randint(50, (4, 9))
        batch = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}
        results = []
        for one in engines:
            one.set_lr(0.0 if step == still_step else 1e-2)
            scale = float("inf") if step == bad_step else 1.0
            hook = next(one.model.parameters()).register_hook(lambda gradient, by=scale: gradient * by)
            results.append(one.step([{key: rows[:2] for key, rows in batch.items()}, batch]))
            hook.remove()
        eager, lazy = results
        assert lazy.skipped == eager.skipped == (step == bad_step)
        assert lazy.loss == eager.loss
    for key, value in engines[0].full_params().items():
        assert torch.equal(value, engines[1].full_params()[key]), key
    states = [one.full_optimizer_state() for one in engines]
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())
