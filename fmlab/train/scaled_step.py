"""AdamW whose steps are as large as the weights that they move: the learning rate times the root mean square
of each parameter, as in Adafactor (Shazeer and Stern 2018, arXiv:1804.04235, section 8), which trained T5.

A T5 needs it: its embeddings start with a standard deviation of 1 and its queries with one of 1 / sqrt(width
x head size), so that no one rate suits both. Nawrot 2023 (nanoT5, arXiv:2309.02373) has the same change.
"""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from fmlab.train.lamb_step import LAMB

FLOOR = 1e-3  # Adafactor's epsilon 2: what starts at 0 moves, too


class ScaledAdamW(LAMB):
    """AdamW over (name, parameter) pairs, norms and biases too; moments and cost as LAMB's.

    lr: of a step of Adam, as a share of a parameter's root mean square. Unlike LAMB's, a step that moves few
    rows of a table stays as small as those rows ask for.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        lr: float = 1e-2,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        named = list(named)
        super().__init__(named, (), lr, betas, eps, weight_decay)
        #: Elements of whole parameters. Set by the engine, as `measure`.
        self.sizes: Mapping[str, int] = {name: p.numel() for name, p in named}

    def _share(self, weights: Mapping[str, Tensor], steps: Mapping[str, Tensor], name: str) -> Tensor:
        return torch.clamp(weights[name] / math.sqrt(self.sizes[name]), min=FLOOR)
