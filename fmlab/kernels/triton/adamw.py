"""One AdamW step of one tensor, in place and in one pass (Loshchilov and Hutter 2019, arXiv:1711.05101).

As separate operations the step reads and writes its four tensors about a dozen times. Fused, weight,
gradient and both moments are loaded once, and all but the gradient stored once: 28 bytes a parameter in fp32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fmlab.kernels.triton import checks
from fmlab.kernels.triton.launch import kernel

BLOCK = 1024  # parameters of a program


@kernel
def adamw_kernel(
    weight_ptr, grad_ptr, mean_ptr, square_ptr, COUNT, lr, beta1, beta2, new1, new2, eps, decay,
    correction1, correction2, BLOCK: tl.constexpr,
):  # fmt: skip
    # region adamw
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < COUNT
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
    mean = tl.load(mean_ptr + at, mask=inside, other=0.0)
    square = tl.load(square_ptr + at, mask=inside, other=0.0)
    mean = beta1 * mean + new1 * grad
    square = beta2 * square + new2 * grad * grad
    step = (mean / correction1) / (tl.sqrt(square / correction2) + eps)
    tl.store(weight_ptr + at, weight * (1 - lr * decay) - lr * step, mask=inside)
    tl.store(mean_ptr + at, mean, mask=inside)
    tl.store(square_ptr + at, square, mask=inside)
    # endregion


@torch.no_grad()
def adamw_step(
    weight: Tensor,
    grad: Tensor,
    mean: Tensor,
    square: Tensor,
    step: int,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> None:
    """Update `weight` and its moments `mean` and `square` (fp32) in place; `step` counts from 1.

    A weight in bf16 is rounded back to bf16 each step, which can swallow the step: keep masters in fp32.

    Raises ValueError for tensors of different shapes, moments not in fp32, tensors that are not contiguous
    (an update in place would go astray), and settings out of range.
    """
    checks.same_kind(weight=weight, grad=grad)
    for name, tensor in {"grad": grad, "mean": mean, "square": square}.items():
        checks.shape(name, tensor, weight.shape, "the shape of weight")
        if tensor.device != weight.device:
            raise ValueError(f"{name} is on {tensor.device}, weight on {weight.device}; give one device")
    for name, tensor in {"mean": mean, "square": square}.items():
        if tensor.dtype != torch.float32:
            raise ValueError(f"{name} is {tensor.dtype}; moments are kept in fp32")
    for name, tensor in {"weight": weight, "grad": grad, "mean": mean, "square": square}.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} is not contiguous; give {name}.contiguous(), or its parameter")
    beta1, beta2 = betas
    if step < 1 or not (0 <= beta1 < 1 and 0 <= beta2 < 1) or lr < 0 or eps < 0 or weight_decay < 0:
        raise ValueError(
            f"step={step}, lr={lr}, betas={betas}, eps={eps}, weight_decay={weight_decay}: steps count "
            "from 1, betas lie in [0, 1), the others are not below 0"
        )
    if weight.numel():
        # 1 - beta is taken here, in fp64: of a beta of 0.999 in fp32 it would be off in the fifth digit
        adamw_kernel[(triton.cdiv(weight.numel(), BLOCK),)](
            weight, grad, mean, square, weight.numel(), lr, beta1, beta2, 1 - beta1, 1 - beta2, eps,
            weight_decay, 1 - beta1**step, 1 - beta2**step, BLOCK,
        )  # fmt: skip
