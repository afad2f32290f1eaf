"""Convolutions over few pixels and many channels, as the small images deep inside a UNet have them.

There the kernel's weights, not the pixels, are what takes time: libraries reorder them before every product,
and their gradients after it. Kept in `channels_last` memory, a 3x3 kernel [o,c,3,3] already is the matrix
[o,9c] of a product with the pixels' 3x3 patches, and nothing is reordered: on a CPU 2 to 6 times as fast.

Shapes: b batch, c and o channels in and out, h height, w width, n = b * h * w pixels.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fmlab.models.functions import compute_dtype, linear, without_autocast


def pixels_to_tokens(x_bchw: Tensor) -> Tensor:
    """[b,c,h,w] -> [b,h*w,c]; a view in channels_last memory."""
    return x_bchw.permute(0, 2, 3, 1).flatten(1, 2)


def tokens_to_pixels(x_blc: Tensor, height: int, width: int) -> Tensor:
    """[b,h*w,c] -> [b,c,h,w] in channels_last memory; a view."""
    return x_blc.unflatten(1, (height, width)).permute(0, 3, 1, 2)


class Conv2d(nn.Conv2d):
    """nn.Conv2d in channels_last memory, initialised by the model that owns it."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, padding: int = 0):
        super().__init__(inputs, outputs, kernel, stride=stride, padding=padding)
        self.weight = nn.Parameter(self.weight.detach().contiguous(memory_format=torch.channels_last))

    def reset_parameters(self) -> None:
        """Left to the model."""

    def forward(self, x_bchw: Tensor, with_bias: bool = True) -> Tensor:
        bias = self.bias if with_bias else None
        if self.kernel_size == (1, 1) and self.stride == (1, 1):
            y_blo = linear(pixels_to_tokens(x_bchw), self.weight.flatten(1), bias)
        elif self._few_pixels(x_bchw):
            return _PatchProduct.apply(x_bchw, self.weight, bias)
        else:
            return self._conv_forward(x_bchw, self.weight, bias)
        return tokens_to_pixels(y_blo, *x_bchw.shape[2:])

    def _few_pixels(self, x_bchw: Tensor) -> bool:
        batch, _, height, width = x_bchw.shape
        plain = self.kernel_size == (3, 3) and self.stride == (1, 1) and self.padding == (1, 1)
        few = batch * height * width <= self.weight.shape[0]
        return plain and few and x_bchw.device.type == "cpu" and not torch.compiler.is_compiling()


class _PatchProduct(torch.autograd.Function):
    """Forward: patches times the kernel. Backward: two products and a sum; the patches are cut out again.

    Kept, the patches would be nine times the pixels.
    """

    @staticmethod
    def forward(ctx: Any, x_bchw: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x [b,c,h,w], weight [o,c,3,3], bias [o] -> [b,o,h,w], in autocast's dtype where autocast is on."""
        dtype = compute_dtype(x_bchw)
        ctx.dtypes = (x_bchw.dtype, weight.dtype, None if bias is None else bias.dtype)
        with without_autocast(x_bchw):
            x_bchw, weight = x_bchw.to(dtype), weight.to(dtype)
            patches_nx, matrix_ox = _patches(x_bchw), weight.permute(0, 2, 3, 1).flatten(1)
            if bias is None:
                y_no = patches_nx @ matrix_ox.T
            else:
                y_no = torch.addmm(bias.to(dtype), patches_nx, matrix_ox.T)
        ctx.save_for_backward(x_bchw, weight)
        return tokens_to_pixels(y_no.view(len(x_bchw), -1, len(weight)), *x_bchw.shape[2:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        x_bchw, weight = ctx.saved_tensors
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        need_x, need_weight, need_bias = ctx.needs_input_grad
        d_x = d_weight = d_bias = None
        with without_autocast(d_y):
            d_y_no = pixels_to_tokens(d_y).flatten(0, 1)
            if need_x:
                matrix_ox = weight.permute(0, 2, 3, 1).flatten(1)
                d_x = _added_patches(d_y_no @ matrix_ox, x_bchw.shape).to(x_dtype)
            if need_weight:
                d_matrix_ox = d_y_no.T @ _patches(x_bchw)
                d_weight = d_matrix_ox.view(len(weight), 3, 3, -1).permute(0, 3, 1, 2).to(weight_dtype)
            if need_bias:
                d_bias = d_y_no.sum(0).to(bias_dtype)
        return d_x, d_weight, d_bias


def _patches(x_bchw: Tensor) -> Tensor:
    """[b,c,h,w] -> [n,9c]: the 3x3 patch around each pixel, zeros outside; order row, column, channel."""
    batch, channels, height, width = x_bchw.shape
    padded_bhwc = x_bchw.new_zeros(batch, height + 2, width + 2, channels)
    padded_bhwc[:, 1:-1, 1:-1] = x_bchw.permute(0, 2, 3, 1)
    images, rows, columns, _ = padded_bhwc.stride()
    shape = (batch, height, width, 3, 3 * channels)  # three pixels of a row lie side by side
    return padded_bhwc.as_strided(shape, (images, rows, columns, rows, 1)).reshape(-1, 9 * channels)


def _added_patches(patches_nx: Tensor, shape: torch.Size) -> Tensor:
    """[n,9c] -> [b,c,h,w]: what the patches have for each pixel, added up; the transpose of _patches."""
    batch, channels, height, width = shape
    parts = patches_nx.view(batch, height, width, 3, 3, channels)
    padded_bhwc = patches_nx.new_zeros(batch, height + 2, width + 2, channels)
    for row in range(3):
        for column in range(3):
            shifted = padded_bhwc[:, row : row + height, column : column + width]
            shifted.add_(parts[:, :, :, row, column])
    return padded_bhwc[:, 1:-1, 1:-1].permute(0, 3, 1, 2)
