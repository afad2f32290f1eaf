"""An autoencoder for rows of numbers, as somebody has it who knows no fmlab."""

from typing import Any

import torch
from torch import Tensor, nn

from fmlab.objectives import Term


class Autoencoder(nn.Module):
    """[b,features] -> [b,features], through a narrow layer; the first and the last matrix are one."""

    def __init__(self, features: int = 13, width: int = 32, code: int = 4) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(width, features) / features**0.5)
        self.norm = nn.LayerNorm(width)
        self.encode, self.decode = nn.Linear(width, code), nn.Linear(code, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x @ self.table.T).relu()
        return self.decode(self.encode(hidden).tanh()) @ self.table


class Reconstruct:
    """The squared error, summed over the rows that have a weight; the engine divides once, by all of them."""

    def __call__(self, model: Any, batch: dict[str, Tensor]) -> dict[str, Term]:
        error_b = (model(batch["x"]) - batch["x"]).square().mean(1)
        return {"error": Term(sum=(error_b * batch["real"]).sum(), count=self.counts(batch)["error"])}

    def counts(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Known before the forward pass, from the batch alone."""
        return {"error": batch["real"].sum().long()}


def build() -> nn.Module:
    return Autoencoder()


def batch(rows: int, seed: int) -> dict[str, Tensor]:
    """Rows of which the last third are padding, so that ranks hold different numbers of real ones."""
    generator = torch.Generator().manual_seed(seed)
    real = (torch.arange(rows) < rows - rows // 3).float()
    return {"x": torch.randn(rows, 13, generator=generator), "real": real}
