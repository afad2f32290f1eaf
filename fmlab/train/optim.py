"""AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) with weight decay where it belongs."""

from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

Named = Iterable[tuple[str, nn.Parameter]]
_FUSED_DEVICES = {"cpu", "cuda", "sim"}


def decay_groups(named: Named) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(decayed, not decayed): matrices are, embeddings too; norms, biases and other vectors are not."""
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    for _, parameter in named:
        (decayed if parameter.dim() >= 2 else kept).append(parameter)
    return decayed, kept


def adamw(
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.95),
    weight_decay: float = 0.1,
    eps: float = 1e-8,
    fused: bool | None = None,
) -> Callable[[Named], Optimizer]:
    """What `parallelize` wants as its optimizer: a function from (name, parameter) pairs to an AdamW.

    fused: one kernel for all parameters; by default where torch has one (floating point on cpu, cuda, sim).
    Raises ValueError for values out of range.
    """
    for name, value, low, high in (
        ("lr", lr, 0, float("inf")),
        ("beta1", betas[0], 0, 1),
        ("beta2", betas[1], 0, 1),
        ("weight_decay", weight_decay, 0, float("inf")),
    ):
        if not low <= value < high:
            raise ValueError(f"{name} must be at least {low} and below {high}, got {value}")

    def make(named: Named) -> Optimizer:
        decayed, kept = decay_groups(named)
        groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]
        can_fuse = all(p.device.type in _FUSED_DEVICES and torch.is_floating_point(p) for p in decayed + kept)
        return AdamW(
            [group for group in groups if group["params"]],
            lr=lr,
            betas=betas,
            eps=eps,
            fused=can_fuse if fused is None else fused,
        )

    return make
