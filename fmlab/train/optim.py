"""The optimizers of a run, with weight decay where it belongs: AdamW (Loshchilov and Hutter 2019,
arXiv:1711.05101), LAMB for very large batches, and AdamW in proportion to the weights, for T5."""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from fmlab.train.lamb_step import LAMB
from fmlab.train.scaled_step import ScaledAdamW

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
    _check(lr, betas, weight_decay)

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


def lamb(
    lr: float = 1e-2,
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 0.01,
    eps: float = 1e-6,
) -> Callable[[Named], Optimizer]:
    """What `parallelize` wants as its optimizer: a function from (name, parameter) pairs to a LAMB.

    Matrices are decayed and move by a share of their norm; norms and biases move as with Adam.
    Raises ValueError for values out of range.
    """
    _check(lr, betas, weight_decay)

    def make(named: Named) -> Optimizer:
        pairs = list(named)
        matrices = [(name, p) for name, p in pairs if p.dim() >= 2]
        vectors = [(name, p) for name, p in pairs if p.dim() < 2]
        return LAMB(matrices, vectors, lr, betas, eps, weight_decay)

    return make


def scaled_adamw(
    lr: float = 1e-2,
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 0.0,
    eps: float = 1e-8,
) -> Callable[[Named], Optimizer]:
    """What `parallelize` wants as its optimizer: a function from (name, parameter) pairs to a ScaledAdamW.

    Raises ValueError for values out of range.
    """
    _check(lr, betas, weight_decay)
    return lambda named: ScaledAdamW(named, lr, betas, eps, weight_decay)


#: name -> (lr, betas, weight_decay) -> what `parallelize` wants as its optimizer
OPTIMIZERS: Mapping[str, Callable[..., Callable[[Named], Optimizer]]] = {
    "adamw": adamw,
    "lamb": lamb,
    "scaled-adamw": scaled_adamw,
}


def _check(lr: float, betas: tuple[float, float], weight_decay: float) -> None:
    for name, value, low, high in (
        ("lr", lr, 0, float("inf")),
        ("beta1", betas[0], 0, 1),
        ("beta2", betas[1], 0, 1),
        ("weight_decay", weight_decay, 0, float("inf")),
    ):
        if not low <= value < high:
            raise ValueError(f"{name} must be at least {low} and below {high}, got {value}")
