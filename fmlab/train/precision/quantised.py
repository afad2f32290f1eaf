"""Weights in 8 or 4 bits, for inference: rounded once after training, scaled back in every product.

Weight-only quantisation: a decoding step reads every weight once and computes little, so that bytes are time.
int8 has a scale for each row (output channel); int4 has one for each group of a row, since 15 steps must
cover the largest number of what shares a scale (Frantar et al. 2022, arXiv:2210.17323, section 4, and AWQ,
arXiv:2306.00978, use groups of 128).

Shapes: o outputs, i inputs, g numbers of a group.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fmlab.models.functions import linear
from fmlab.train.lora import replace
from fmlab.train.precision.layers import layer_matrices

BITS = (8, 4)


class QuantisedLinear(nn.Module):
    """A linear layer that holds whole numbers and scales, and gives y = x (codes * scales).T + bias.

    codes:  int8 [o,i], or uint8 [o,i/2] with two numbers of 4 bits each (the first in the low half)
    scales: [o,i/g] in the weight's type

    Nothing of it learns. Raises ValueError for other bits, for a group that does not divide the inputs, and
    for a weight with an infinity or NaN.
    """

    codes: Tensor
    scales: Tensor
    bias: Tensor | None

    def __init__(self, base: nn.Linear, bits: int = 8, group: int | None = None):
        super().__init__()
        self.in_features, self.out_features, self.bits = base.in_features, base.out_features, bits
        self.group = base.in_features if group is None else group
        codes, scales = quantise(base.weight.detach(), bits, self.group)
        self.register_buffer("codes", pack_nibbles(codes) if bits == 4 else codes)
        self.register_buffer("scales", scales.to(base.weight.dtype))
        self.register_buffer("bias", None if base.bias is None else base.bias.detach().clone())

    # region forward
    def dequantised(self) -> Tensor:
        """The weight [o,i] that the layer computes with."""
        codes = unpack_nibbles(self.codes) if self.bits == 4 else self.codes
        groups = codes.view(self.out_features, -1, self.group)
        return (groups * self.scales[..., None]).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.dequantised().to(x.dtype), self.bias)

    def product(self, x: Tensor) -> Tensor:
        """x @ weight.T, for a layer that adds the bias itself."""
        return linear(x, self.dequantised().to(x.dtype))

    # endregion

    @property
    def weight(self) -> nn.Parameter:
        """`dequantised`, made anew at each call: for models that read shape and type from it."""
        return nn.Parameter(self.dequantised(), requires_grad=False)


# region quantise
def quantise(weight: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
    """Whole numbers int8 [o,i] and scales [o,i/g] (fp32), such that codes * scales is close to weight [o,i].

    Symmetric: 0 stays 0, and the largest of a group becomes 127 or 7. ValueError for what cannot be.
    """
    _check(weight, bits, group)
    groups = weight.float().unflatten(1, (-1, group))
    largest = 2 ** (bits - 1) - 1
    scales = groups.abs().amax(-1) / largest
    scales = scales.where(scales > 0, 1.0)
    codes = (groups / scales[..., None]).round().clamp(-largest, largest)
    return codes.flatten(1).to(torch.int8), scales


# endregion


def _check(weight: Tensor, bits: int, group: int) -> None:
    if bits not in BITS:
        raise ValueError(f"bits={bits}: legal are {', '.join(map(str, BITS))}")
    if type(group) is not int or group < 1 or weight.shape[1] % group or group % 2:
        raise ValueError(f"group={group}: give an even number that divides the {weight.shape[1]} inputs")
    if not bool(weight.isfinite().all()):
        raise ValueError("the weight holds infinities or NaN, which whole numbers cannot stand for")


def pack_nibbles(codes: Tensor) -> Tensor:
    """Two numbers from -8 to 7 in each byte: int8 [o,i] -> uint8 [o,i/2]."""
    low, high = (codes & 15).to(torch.uint8).unflatten(1, (-1, 2)).unbind(-1)
    return low | (high << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """uint8 [o,i/2] -> int8 [o,i]."""
    both = torch.stack([packed & 15, packed >> 4], -1).flatten(1).to(torch.int8)
    return torch.where(both > 7, both - 16, both)


@dataclass(frozen=True)
class Quantised:
    """What quantise_weights did. layers: by name; before, after: bytes of the whole model; error: of the
    weights, ||difference|| / ||weights||."""

    layers: tuple[str, ...]
    before: int
    after: int
    error: float

    def __str__(self) -> str:
        return (
            f"{len(self.layers)} matrices; {self.before:,} -> {self.after:,} bytes "
            f"(x{self.after / self.before:.2f}); weights off by {self.error:.2%}"
        )


@torch.no_grad()
def quantise_weights(model: nn.Module, bits: int = 8, group: int | None = None) -> Quantised:
    """Bring the matrices of a model's layers to `bits` bits, in place; the model then only computes.

    group: numbers of a row that share a scale; by default the whole row. Embeddings, head, norms and biases
    stay as they are.

    Raises ValueError as QuantisedLinear and layer_matrices do; the model is then unchanged.
    """
    before, off, whole = model_bytes(model), 0.0, 0.0
    made: dict[str, QuantisedLinear] = {}
    for name, layer in layer_matrices(model).items():
        made[name] = QuantisedLinear(layer, bits, group)
        off += float((made[name].dequantised().float() - layer.weight.float()).square().sum())
        whole += float(layer.weight.float().square().sum())
    for name, quantised in made.items():
        replace(model, name, quantised)
    model.eval().requires_grad_(False)
    return Quantised(tuple(made), before, model_bytes(model), (off / whole) ** 0.5 if whole else 0.0)


def model_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers; what is tied counts once."""
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return sum(t.numel() * t.element_size() for t in tensors.values())
