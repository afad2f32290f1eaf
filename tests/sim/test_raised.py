"""What is raised inside a backward pass on a simulated chip reaches the caller, and the process lives on."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fmlab import Ranks
from fmlab.sim.device import is_possible

pytestmark = pytest.mark.skipif(not is_possible(), reason="this torch makes no device in Python")


def fails(grad: Tensor) -> Tensor:
    raise ValueError("said by a hook")


class Bad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise KeyError("said by a Function")


def _leaf() -> Tensor:
    from fmlab.sim import simulate

    simulate("trn2")
    return torch.ones(4, 4, device="sim", requires_grad=True)


def _full() -> None:
    from fmlab.sim import SimOutOfMemory, simulate

    simulate("h100", dry=True)
    x = torch.randn(36_000, 64, device="sim", requires_grad=True)
    w = torch.randn(248_320, 64, device="sim", requires_grad=True)
    loss = torch.nn.functional.cross_entropy(x @ w.t(), torch.zeros(36_000, dtype=torch.long, device="sim"))
    with pytest.raises(SimOutOfMemory, match="_log_softmax_backward_data tried to allocate"):
        loss.backward()


def _hooks_and_functions() -> None:
    x = _leaf()
    y = x * 2
    y.register_hook(fails)
    with pytest.raises(ValueError, match="said by a hook") as raised:
        y.sin().sum().backward()
    assert any(entry.name == "fails" for entry in raised.traceback)
    with pytest.raises(KeyError, match="said by a Function"):
        torch.autograd.grad(Bad.apply(x).sum(), x)


def _recomputed() -> None:
    x = _leaf()
    y = checkpoint(lambda x: Bad.apply(x.sin()).cos(), x, use_reentrant=True)
    with pytest.raises(KeyError, match="said by a Function"):
        y.sum().backward()


def _afterwards() -> None:
    x = _leaf()
    with pytest.raises(KeyError):
        Bad.apply(x).sum().backward()
    (x * 3).sum().backward()
    assert x.grad is not None
    assert x.grad.cpu().eq(3).all()
    host = torch.ones(2, requires_grad=True)
    with pytest.raises(KeyError, match="said by a Function"):
        Bad.apply(host).sum().backward()


def test_a_chip_that_is_full_in_a_backward_pass_says_so(aside: Ranks) -> None:
    aside.run(_full)


def test_errors_of_hooks_and_functions_come_as_they_were_raised(aside: Ranks) -> None:
    aside.run(_hooks_and_functions)


def test_an_error_in_a_recomputed_part_comes_out_of_both_backward_passes(aside: Ranks) -> None:
    aside.run(_recomputed)


def test_the_next_backward_pass_is_as_ever(aside: Ranks) -> None:
    aside.run(_afterwards)
