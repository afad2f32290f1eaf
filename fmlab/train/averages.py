"""AdamW that also keeps a moving average of the weights, which draws better pictures than the last ones.

Ho et al. 2020, arXiv:2006.11239, appendix B, sample from an average with decay 0.9999. The average lives in
the optimizer's state beside the two moments: so each strategy divides it as it divides those, a checkpoint
holds it, and a step that is skipped leaves it alone.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from fmlab.train.optim import Named, adamw

AVERAGE = "average"


class AveragedAdamW(AdamW):
    """AdamW over parameter groups that carry its settings, and an average of that decay.

    After n steps the decay is at most (1 + n) / (10 + n), so that the average soon forgets the weights that
    training began with.
    """

    def __init__(self, groups: list[dict[str, Any]], decay: float) -> None:
        super().__init__(groups)
        self.decay = decay

    # region average
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            learned = [p for p in group["params"] if p.grad is not None]
            if not learned:
                continue
            steps = float(self.state[learned[0]]["step"])
            decay = min(self.decay, (1 + steps) / (10 + steps))
            for parameter in learned:
                state = self.state[parameter]
                if AVERAGE not in state:
                    state[AVERAGE] = parameter.detach().clone()
                state[AVERAGE].lerp_(parameter.detach(), 1 - decay)
        return loss

    # endregion


def averaged_adamw(decay: float, *args: Any, **settings: Any) -> Callable[[Named], Optimizer]:
    """As fmlab.train.adamw, with an average of that decay. Raises ValueError unless it is in (0, 1)."""
    if not 0 < decay < 1:
        raise ValueError(f"the decay of the average must be above 0 and below 1, got {decay}")
    plain = adamw(*args, **settings)
    return lambda named: AveragedAdamW(plain(named).param_groups, decay)


@torch.no_grad()
def take_averages(model: nn.Module, optimizer_state: dict[str, Tensor]) -> int:
    """Put the averages of an engine's `full_optimizer_state()` into a whole model; how many there were.

    Parameters that never had a gradient have none, and stay.
    """
    named = dict(model.named_parameters())
    found = {
        key.removesuffix(f"/{AVERAGE}"): value
        for key, value in optimizer_state.items()
        if key.endswith(f"/{AVERAGE}")
    }
    for name, value in found.items():
        named[name].copy_(value)
    return len(found)
