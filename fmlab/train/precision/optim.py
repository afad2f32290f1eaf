"""AdamW for weights of 16 bits: four ways not to lose an update that is smaller than the gap it falls into.

"nearest"     the new weight is rounded to the nearest number: an update below half a gap does nothing
"stochastic"  it is rounded by chance: right on average (Zamirai et al. 2020, arXiv:2010.06192, section 3)
"kahan"       what rounding lost is kept in a second 16-bit number, and added next time (the same)
"master"      the weight itself is kept in fp32, and its rounded copy computes (arXiv:1710.03740, section 3.1)

Moments are fp32 in all four.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fmlab.train.optim import Named, decay_groups
from fmlab.train.precision.formats import number_format
from fmlab.train.precision.rounding import round_to
from fmlab.train.precision.sums import kahan_add

UPDATES = ("nearest", "stochastic", "kahan", "master")
_MORE = {"kahan": {"lost"}, "master": {"master"}}  # what a weight keeps beside its moments


class RoundedAdamW(Optimizer):
    """AdamW in fp32 arithmetic whose weights may have 16 bits.

    update: one of UPDATES. Bytes of state a parameter, beside weight and gradient: 8, with "kahan" 10, with
    "master" 12.

    Raises ValueError for another update, and for settings out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        update: str = "nearest",
    ) -> None:
        if update not in UPDATES:
            raise ValueError(f"there is no update {update!r}; legal are {', '.join(UPDATES)}")
        for name, value, high in (
            ("lr", lr, float("inf")),
            ("beta1", betas[0], 1),
            ("beta2", betas[1], 1),
            ("eps", eps, float("inf")),
            ("weight_decay", weight_decay, float("inf")),
        ):
            if not 0 <= value < high:
                raise ValueError(f"{name} must be at least 0 and below {high}, got {value}")
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        self.update = update

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As of every optimizer, but moments, masters and what was lost keep their types: torch would bring
        all of them to the weights' 16 bits. Raises ValueError, before it loads, for another update's state.
        """
        wanted = {"step", "exp_avg", "exp_avg_sq"} | _MORE.get(self.update, set())
        for state in state_dict["state"].values():
            if set(state) != wanted:
                raise ValueError(
                    f"the state has {', '.join(sorted(state))}; update={self.update!r} needs "
                    f"{', '.join(sorted(wanted))}: load it with the update that it was made by"
                )
        super().load_state_dict(state_dict)
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        held = [p for group in self.param_groups for p in group["params"]]
        for number, p in zip(saved, held, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                where = value.device if name == "step" else p.device
                self.state[p][name] = value.detach().clone().to(where)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._move(p, group, self._state(p))
        return loss

    def _state(self, p: Tensor) -> dict[str, Tensor]:
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(p, dtype=torch.float32)
            state["exp_avg_sq"] = torch.zeros_like(p, dtype=torch.float32)
            if self.update == "kahan":
                state["lost"] = torch.zeros_like(p)
            if self.update == "master":
                state["master"] = p.float().clone()
        return state

    # region update
    def _move(self, p: Tensor, group: dict[str, Any], state: dict[str, Tensor]) -> None:
        (beta1, beta2), lr, gradient = group["betas"], group["lr"], p.grad.float()  # type: ignore[union-attr]
        state["step"] += 1
        step = float(state["step"])
        mean = state["exp_avg"].lerp_(gradient, 1 - beta1)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        size = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
        weight = state["master"] if self.update == "master" else p.float()
        change = mean / size * (-lr / (1 - beta1**step)) - lr * group["weight_decay"] * weight

        if self.update == "nearest":
            p.copy_(weight + change)
        elif self.update == "stochastic":
            p.copy_(round_to(weight + change, number_format(p.dtype), "stochastic"))
        elif self.update == "master":
            p.copy_(weight.add_(change))
        else:
            new, lost = kahan_add(weight, state["lost"].float(), change, number_format(p.dtype))
            p.copy_(new)
            state["lost"].copy_(lost)

    # endregion


def rounded_adamw(
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.95),
    weight_decay: float = 0.1,
    eps: float = 1e-8,
    update: str = "nearest",
) -> Callable[[Named], Optimizer]:
    """What `parallelize` wants as its optimizer: a function from (name, parameter) pairs to a RoundedAdamW.

    Matrices are decayed, norms and biases are not, as in fmlab.train.adamw.
    """
    if update not in UPDATES:
        raise ValueError(f"there is no update {update!r}; legal are {', '.join(UPDATES)}")

    def make(named: Named) -> Optimizer:
        decayed, kept = decay_groups(named)
        groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]
        return RoundedAdamW([g for g in groups if g["params"]], lr, betas, eps, 0.0, update)

    return make
