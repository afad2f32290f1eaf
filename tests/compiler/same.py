"""Outputs, loss and every gradient of two modules with the same parameters."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def gradients(
    run: Callable[..., tuple[Tensor, Tensor]], model: nn.Module, inputs: dict[str, Any]
) -> dict[str, Tensor | None]:
    """The loss, the output and each parameter's gradient."""
    model.zero_grad(set_to_none=True)
    loss, output = run(**inputs)
    loss.backward()
    found = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    return found | {"loss": loss.detach(), "output": output.detach()}


def assert_same(compiled: nn.Module, model: nn.Module, inputs: dict[str, Any], most: float = 1e-12) -> None:
    """Equal to `most` of the largest element of each tensor; a gradient may be missing only where it is 0."""
    want, got = gradients(model, model, inputs), gradients(compiled, model, inputs)
    assert any(x is not None and x.any() for x in want.values())
    for name, expected in want.items():
        found = got[name]
        expected = torch.zeros_like(found) if expected is None and found is not None else expected
        if expected is None:
            continue
        assert found is not None, name
        scale = max(float(expected.abs().max()), 1e-3)
        worst = float((found - expected).abs().max())
        assert worst <= most * scale, f"{name}: {worst:.2e} of {scale:.2e}"
