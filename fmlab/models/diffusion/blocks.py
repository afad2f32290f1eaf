"""Convolutional parts that the UNet and the autoencoder share.

All are written for `channels_last` memory, in which a pixel's channels lie side by side: convolutions are
faster there on CPUs and GPUs alike, and an image is a sequence of tokens without a copy.

Shapes: b batch, c channels, h height, w width, t width of the time embedding.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmlab.models.diffusion.convolution import Conv2d
from fmlab.models.dropout import drop_out
from fmlab.models.layers import Linear
from fmlab.models.plan import Rule


class GroupNorm(nn.Module):
    """Norm over the channels of a group and all pixels (Wu and He 2018, arXiv:1803.08494).

    The number of groups is read from the weight, which may be a rank's share of whole groups.
    """

    def __init__(self, channels: int, groups: int, eps: float):
        super().__init__()
        self.group_size, self.eps = channels // groups, eps
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x_bchw: Tensor) -> Tensor:
        groups = self.weight.numel() // self.group_size
        return F.group_norm(x_bchw, groups, self.weight, self.bias, self.eps)


class ResNetBlock(nn.Module):
    """x + conv(silu(norm(conv(silu(norm(x))) + time))): the residual block of DDPM's UNet.

    He et al. 2016 (arXiv:1603.05027) with group norm; the time embedding shifts the middle (Ho et al. 2020,
    arXiv:2006.11239, appendix B). A 1x1 convolution carries x past it where the widths differ.

    Args:
        time_size: width t of the time embedding; None for none (autoencoders).
    """

    def __init__(
        self, inputs: int, outputs: int, groups: int, eps: float, time_size: int | None, dropout: float = 0.0
    ):
        super().__init__()
        self.dropout = dropout
        self.norm1 = GroupNorm(inputs, groups, eps)
        self.conv1 = Conv2d(inputs, outputs, 3, padding=1)
        self.time = None if time_size is None else Linear(time_size, outputs)
        self.norm2 = GroupNorm(outputs, groups, eps)
        self.conv2 = Conv2d(outputs, outputs, 3, padding=1)
        self.shortcut = None if inputs == outputs else Conv2d(inputs, outputs, 1)

    def forward(self, x_bchw: Tensor, time_bt: Tensor | None = None) -> Tensor:
        """x [b,inputs,h,w], time [b,t] after its SiLU -> [b,outputs,h,w]."""
        hidden = F.silu(self.norm1(x_bchw))
        if self.time is None:
            hidden = self.conv1(hidden)
        else:
            assert time_bt is not None
            assert self.conv1.bias is not None
            shift_bc = self.time(time_bt) + self.conv1.bias  # one pass over the pixels for both
            hidden = self.conv1(hidden, with_bias=False)
            hidden = hidden + shift_bc[:, :, None, None].to(hidden.dtype)
        hidden = drop_out(F.silu(self.norm2(hidden)), self.dropout, self.training, "bfyx")
        # conv2 may be row-sharded: its partial sums are added up before the bias, which joins the other path.
        update = self.conv2(hidden, with_bias=False)
        assert self.conv2.bias is not None
        if self.shortcut is None:
            return (x_bchw + update).add_(self.conv2.bias[:, None, None])
        assert self.shortcut.bias is not None
        bias = self.shortcut.bias + self.conv2.bias
        past = self.shortcut(x_bchw, with_bias=False)
        return (past + update).add_(bias[:, None, None])

    def rules(self, name: str) -> tuple[Rule, ...]:
        """How the weights of this block, called `name`, may be divided: the middle by whole groups."""
        unit = self.norm2.group_size
        middle = "(conv1|norm2)" if self.time is None else "(conv1|time|norm2)"
        rules = [
            Rule(rf"{name}\.norm1\.(weight|bias)", "replicate"),
            Rule(rf"{name}\.{middle}\.(weight|bias)", "column", unit=unit),
            Rule(rf"{name}\.conv2\.weight", "row", unit=unit),
            Rule(rf"{name}\.conv2\.bias", "replicate"),
        ]
        if self.shortcut is not None:
            rules.append(Rule(rf"{name}\.shortcut\.(weight|bias)", "replicate"))
        return tuple(rules)


class Downsample(nn.Module):
    """Half the height and width, by a 3x3 convolution of stride 2.

    Args:
        asymmetric: pad right and bottom only, as the autoencoder does; the UNet pads all sides.
    """

    def __init__(self, channels: int, asymmetric: bool = False):
        super().__init__()
        self.asymmetric = asymmetric
        self.conv = Conv2d(channels, channels, 3, stride=2, padding=0 if asymmetric else 1)

    def forward(self, x_bchw: Tensor) -> Tensor:
        return self.conv(F.pad(x_bchw, (0, 1, 0, 1)) if self.asymmetric else x_bchw)


class Upsample(nn.Module):
    """Twice the height and width: each pixel four times, then a 3x3 convolution."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv = Conv2d(channels, channels, 3, padding=1)

    def forward(self, x_bchw: Tensor) -> Tensor:
        return self.conv(F.interpolate(x_bchw, scale_factor=2.0, mode="nearest"))


@torch.no_grad()
def reset_like_torch(module: nn.Module) -> None:
    """Uniform within 1 / sqrt(inputs of a unit) for matrices, kernels and their biases; norms 1 and 0.

    What torch.nn does by default, which the code of the latent diffusion paper keeps.
    """
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Conv2d):
            bound = part.weight[0].numel() ** -0.5
            for parameter in part.parameters(recurse=False):
                parameter.uniform_(-bound, bound)
        elif isinstance(part, GroupNorm | nn.LayerNorm) and part.weight is not None:
            part.weight.fill_(1.0)
            part.bias.zero_()


def check_image(name: str, image: Any, channels: int, multiple: int, why: str) -> None:
    """Raise ValueError unless `image` is [b,channels,h,w] with sides divisible by `multiple`, for `why`."""
    if not isinstance(image, Tensor) or image.dim() != 4 or not image.numel():
        shape = list(image.shape) if isinstance(image, Tensor) else type(image).__name__
        raise ValueError(f"{name} must be [batch, channels, height, width] and not empty, got {shape}")
    if not image.is_floating_point():
        raise ValueError(f"{name} must be of a floating-point dtype, got {image.dtype}")
    if image.shape[1] != channels:
        raise ValueError(f"{name} must have {channels} channels, got shape {list(image.shape)}")
    for side, size in zip(("height", "width"), image.shape[2:], strict=True):
        if size % multiple:
            low = size // multiple * multiple
            legal = [n for n in (low, low + multiple) if n]
            raise ValueError(
                f"the {side} of {name} must be divisible by {multiple} ({why}), got {size}; "
                f"nearest: {' or '.join(map(str, legal))}"
            )
