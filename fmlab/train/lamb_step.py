"""LAMB: Adam's step, for each parameter made as long as a share of that parameter (You et al. 2019,
arXiv:1904.00962, algorithm 2). It keeps very large batches trainable: BERT in batches of 32,768 rows.

The share needs two norms of the WHOLE parameter, its own and that of the step. Where a rank holds a piece,
each norm is a sum over ranks: `measure` is what the engine's ledger makes of the pieces.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

#: (weights, steps), pieces by parameter -> their norms, of whole parameters
Measure = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], list[dict[str, Tensor]]]


class LAMB(Optimizer):
    """LAMB over (name, parameter) pairs; moments are fp32 (fp64 for fp64 weights).

    lr:           length of a step as a share of a parameter's norm, so that it suits any width; about ten
                  times that of AdamW where weights start with a standard deviation near 0.1
    weight_decay: of the parameters in `named`
    plain:        more pairs: not decayed, and moved by Adam's own step (norms and biases, as in the authors'
                  settings for BERT)

    A step holds the steps of all parameters at once, 4 bytes a parameter more than AdamW.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        plain: Iterable[tuple[str, nn.Parameter]] = (),
        lr: float = 1e-2,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        named, plain = list(named), list(plain)
        groups: list[dict[str, Any]] = [
            {"params": [p for _, p in named], "weight_decay": weight_decay, "scaled": True},
            {"params": [p for _, p in plain], "weight_decay": 0.0, "scaled": False},
        ]
        super().__init__([g for g in groups if g["params"]], dict(lr=lr, betas=betas, eps=eps))
        self.names: dict[nn.Parameter, str] = {p: name for name, p in (*named, *plain)}
        #: Set by the engine. Alone, every parameter is whole.
        self.measure: Measure = whole_norms

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Move all parameters that have a gradient. With divided parameters every rank calls it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        steps = {
            p: self._adam(p, group)
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None
        }
        scaled = {p for group in self.param_groups if group["scaled"] for p in group["params"]}
        pieces = {self.names[p]: p.detach() for p in steps if p in scaled}
        weights, lengths = self.measure(pieces, {self.names[p]: steps[p] for p in steps if p in scaled})
        for group in self.param_groups:
            for p in group["params"]:
                if p in steps:
                    share = self._share(weights, lengths, self.names[p]) if group["scaled"] else 1.0
                    p.add_((steps[p] * share).to(p.dtype), alpha=-group["lr"])
        return loss

    def _share(self, weights: Mapping[str, Tensor], steps: Mapping[str, Tensor], name: str) -> Tensor:
        return trust_ratio(weights, steps, name)

    # region adam
    def _adam(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        """Adam's step with the decay added, before learning rate and share; shape of p."""
        exact = torch.promote_types(p.dtype, torch.float32)
        gradient, (beta1, beta2) = p.grad.to(exact), group["betas"]  # type: ignore[union-attr]
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(p, dtype=exact)
            state["exp_avg_sq"] = torch.zeros_like(p, dtype=exact)
        state["step"] += 1
        step = float(state["step"])
        mean = state["exp_avg"].lerp_(gradient, 1 - beta1) / (1 - beta1**step)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        size = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
        return mean.div_(size).add_(p.to(exact), alpha=group["weight_decay"])

    # endregion


# region trust
def trust_ratio(weights: Mapping[str, Tensor], steps: Mapping[str, Tensor], name: str) -> Tensor:
    """‖weight‖ / ‖step‖ of a parameter, []; 1 where either is 0, as for a table that starts at 0."""
    weight, step = weights[name], steps[name]
    return torch.where((weight > 0) & (step > 0), weight / step, torch.ones_like(step))


# endregion


def whole_norms(*tables: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """The norm of each tensor of each table, for parameters that are not divided."""
    return [{name: torch.linalg.vector_norm(t) for name, t in table.items()} for table in tables]
