"""Ways to train in few bits, by name: what the weights are, what products see, how an update is written back.

    train(TrainConfig(numbers="bf16-kahan"))          fmlab train gpt2-tiny --numbers bf16-kahan

All run on one device, on the CPU too. Sums of losses, norms of gradients and moments (but those of the two
"pure" ways) are fp32 in all of them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from fmlab.parallel.engine import OptimizerFactory
from fmlab.train.optim import adamw
from fmlab.train.precision.optim import UPDATES, rounded_adamw
from fmlab.train.precision.products import Products, restore_products, round_products
from fmlab.train.precision.scaling import (
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    MXScaling,
    NoScaling,
    Scaling,
)

E4M3, E5M2 = "fp8-e4m3", "fp8-e5m2"


@dataclass(frozen=True)
class Numbers:
    """One way to train in few bits.

    weights:  element type of weights and gradients
    update:   "adamw": torch's AdamW on those weights, its moments in their type; or one of UPDATES
    autocast: element type of matrix products, where it is not that of the weights
    scaled:   the loss is scaled (fp16)
    products: how the factors of the layers' products are rounded
    """

    name: str
    about: str
    weights: torch.dtype = torch.float32
    update: str = "adamw"
    autocast: torch.dtype | None = None
    scaled: bool = False
    products: Products | None = None

    def bytes_per_parameter(self) -> int:
        """Of weight, gradient and optimizer state in memory, master and what Kahan keeps included."""
        size = self.weights.itemsize
        if self.update == "adamw":
            return 4 * size
        return 2 * size + 8 + {"kahan": size, "master": 4}.get(self.update, 0)

    def prepare(self, model: nn.Module) -> nn.Module:
        """Change the model in place, before its optimizer is made. ValueError as layer_matrices."""
        if self.products is not None:
            round_products(model, self.products)
        return model.to(self.weights)

    def finish(self, model: nn.Module) -> nn.Module:
        """A plain model in fp32 again, in place."""
        restore_products(model)
        return model.float()

    def optimizer(self, lr: float, betas: tuple[float, float], weight_decay: float) -> OptimizerFactory:
        """What `parallelize` wants as its optimizer."""
        if self.update in UPDATES:
            return rounded_adamw(lr, betas, weight_decay, update=self.update)
        return adamw(lr, betas, weight_decay)


def _alike(scaling: Callable[[], Scaling]) -> Products:
    return Products(scaling, scaling, scaling)


def _hybrid(scaling: Callable[[str], Scaling]) -> Products:
    """E4M3 forward; gradients need more range and less precision: E5M2 (arXiv:2209.05433, section 3)."""
    forward = partial(scaling, E4M3)
    return Products(forward, forward, partial(scaling, E5M2))


def _tiles() -> Products:
    strips = partial(BlockScaling, E4M3)
    return Products(strips, partial(BlockScaling, E4M3, (128, 128)), strips)


_BF16, _FP16 = torch.bfloat16, torch.float16
_ALL = (
    Numbers("fp32", "everything in fp32"),
    Numbers("tf32", "products of the layers see TF32 factors", products=_alike(partial(NoScaling, "tf32"))),
    Numbers("bf16-autocast", "fp32 weights, products in bf16", autocast=_BF16),
    Numbers("bf16-pure", "weights, gradients and moments in bf16: torch's AdamW on model.bfloat16()", _BF16),
    Numbers("bf16-nearest", "weights in bf16, moments in fp32, new weights rounded", _BF16, "nearest"),
    Numbers("bf16-stochastic", "the same, rounded by chance", _BF16, "stochastic"),
    Numbers("bf16-kahan", "the same, what rounding loses kept in a second bf16 number", _BF16, "kahan"),
    Numbers("bf16-master", "the same, with fp32 master weights", _BF16, "master"),
    Numbers("fp16-pure", "weights, gradients and moments in fp16", _FP16),
    Numbers("fp16-unscaled", "fp32 weights, products in fp16", autocast=_FP16),
    Numbers("fp16-scaled", "the same with dynamic loss scaling", autocast=_FP16, scaled=True),
    Numbers(
        "fp8-unscaled",
        "layers in E4M3, gradients in E5M2, no scale",
        products=_hybrid(partial(NoScaling, saturate=True)),
    ),
    Numbers("fp8-current", "the same, scaled by each tensor's largest", products=_hybrid(CurrentScaling)),
    Numbers("fp8-delayed", "the same, by the largest of earlier steps", products=_hybrid(DelayedScaling)),
    Numbers("fp8-block", "all in E4M3: strips of 128, weights in tiles of 128 x 128", products=_tiles()),
    Numbers("mxfp8", "MXFP8 (E4M3)", products=_alike(partial(MXScaling, "mxfp8-e4m3"))),
    Numbers("mxfp6", "MXFP6 (E2M3)", products=_alike(partial(MXScaling, "mxfp6-e2m3"))),
    Numbers("mxfp4", "MXFP4 (E2M1)", products=_alike(partial(MXScaling, "mxfp4"))),
    Numbers("mxint8", "MXINT8", products=_alike(partial(MXScaling, "mxint8"))),
)
#: name -> way to train
NUMBERS: Mapping[str, Numbers] = {one.name: one for one in _ALL}


def numbers_called(name: str) -> Numbers:
    """The way to train of that name. Raises ValueError with the legal names."""
    if name not in NUMBERS:
        raise ValueError(f"there are no numbers called {name!r}; legal are {', '.join(NUMBERS)}")
    return NUMBERS[name]
