"""Matrix products in few bits, emulated: their factors are rounded, the sums run in fp32.

A linear layer has three products: y = x w in the forward pass, d_x = d_y w and d_w = d_y x in the backward
pass. What goes in is rounded each time; weights, gradients of weights and sums are fp32. Memory and speed are
those of fp32: what is shown here is the numbers alone.

Shapes: n rows (tokens), i inputs, o outputs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fmlab.models.layers import Linear
from fmlab.train.lora import replace
from fmlab.train.precision.layers import layer_matrices
from fmlab.train.precision.scaling import Scaling


@dataclass(frozen=True)
class Products:
    """How the factors of a layer's three products are rounded: a new Scaling for each."""

    inputs: Callable[[], Scaling]
    weights: Callable[[], Scaling]
    gradients: Callable[[], Scaling]


class RoundedLinear(Linear):
    """A linear layer whose products see rounded factors. `weight` and `bias` are those that it replaces."""

    def __init__(self, base: Linear, products: Products):
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        self.inputs, self.weights, self.gradients = (
            products.inputs(),
            products.weights(),
            products.gradients(),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.product(x)
        return y if self.bias is None else y + self.bias

    def product(self, x: Tensor) -> Tensor:
        if not x.numel():  # an expert without tokens: there is no largest number to scale by
            return x @ self.weight.T
        y: Tensor = _RoundedProduct.apply(x.flatten(0, -2), self.weight, self)
        return y.view(*x.shape[:-1], -1)


# region products
class _RoundedProduct(torch.autograd.Function):
    """Forward: rounded x [n,i] times rounded w [o,i]. Backward: two products with the rounded d_y [n,o]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: RoundedLinear) -> Tensor:
        rounded_x, rounded_w = layer.inputs(x, 1), layer.weights(weight, 1)
        again = layer.inputs.by_dim or layer.weights.by_dim  # backward sums over other dims: rounds anew
        ctx.save_for_backward(*((x, weight) if again else (rounded_x, rounded_w)))
        ctx.layer, ctx.again = layer, again
        return rounded_x @ rounded_w.T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        layer = ctx.layer
        if not ctx.again:
            rounded = layer.gradients(d_y, 1)
            return rounded @ weight, rounded.T @ x, None
        d_x = layer.gradients(d_y, 1) @ layer.weights(weight, 0)
        d_w = layer.gradients(d_y, 0).T @ layer.inputs(x, 0)
        return d_x, d_w, None


# endregion


def round_products(model: nn.Module, products: Products) -> list[str]:
    """Give the linear layers of a model rounded products, in place; their names. ValueError as
    layer_matrices."""
    found = layer_matrices(model)
    for name, layer in found.items():
        replace(model, name, RoundedLinear(layer, products).train(layer.training))
    return list(found)


def restore_products(model: nn.Module) -> None:
    """Put plain layers back, with the weights as they are."""
    for name, layer in [(n, m) for n, m in model.named_modules() if isinstance(m, RoundedLinear)]:
        plain = Linear.__new__(Linear)
        nn.Module.__init__(plain)
        plain.in_features, plain.out_features = layer.in_features, layer.out_features
        plain.weight, plain.bias = layer.weight, layer.bias
        replace(model, name, plain.train(layer.training))
