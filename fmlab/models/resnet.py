"""ResNet (He et al. 2015, arXiv:1512.03385) with batch or group norm, in the form that every library ships.

That form ("v1.5") has the stride of a bottleneck in its 3x3 convolution; the paper had it in the first 1x1.

Shapes: b batch, c channels, y x height and width, k classes.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmlab.models.base import Model, check_sizes
from fmlab.models.cross_entropy import class_cross_entropy
from fmlab.models.hf import HFFormat
from fmlab.models.inputs import check_values
from fmlab.models.plan import ParallelPlan, Rule
from fmlab.models.state import Block, State

NORMS = ("batch", "group")
LAYERS = {"basic": 1, "bottleneck": 4}  # channels out / channels inside


@dataclass(frozen=True)
class ResNetConfig:
    """Shape of a ResNet. Raises ValueError for shapes that cannot be.

    widths, depths: channels and layers of each stage. groups: of group norm; batch norm has none.
    """

    widths: tuple[int, ...] = (256, 512, 1024, 2048)
    depths: tuple[int, ...] = (3, 4, 6, 3)
    layer: str = "bottleneck"
    num_labels: int = 1000
    stem_width: int = 64
    image_channels: int = 3
    norm: str = "batch"
    groups: int = 32
    norm_eps: float = 1e-5
    momentum: float = 0.1

    def __post_init__(self) -> None:
        check_sizes(self, "num_labels", "stem_width", "image_channels", "groups")
        object.__setattr__(self, "widths", tuple(self.widths))
        object.__setattr__(self, "depths", tuple(self.depths))
        if not self.widths or len(self.widths) != len(self.depths):
            raise ValueError(f"widths {self.widths} and depths {self.depths} must be as many, at least one")
        if self.layer not in LAYERS or self.norm not in NORMS:
            raise ValueError(f"layer {self.layer!r}: legal {list(LAYERS)}; norm {self.norm!r}: legal {NORMS}")
        inner = [width // LAYERS[self.layer] for width in self.widths]
        normed = sorted({self.stem_width, *self.widths, *inner})
        if self.norm == "group" and any(width % self.groups for width in normed):
            raise ValueError(f"{self.groups} groups do not divide each of the widths {normed}; choose fewer")


PRESETS: dict[str, dict[str, Any]] = {
    "resnet-18": dict(widths=(64, 128, 256, 512), depths=(2, 2, 2, 2), layer="basic"),
    "resnet-34": dict(widths=(64, 128, 256, 512), depths=(3, 4, 6, 3), layer="basic"),
    "resnet-50": dict(),
    "resnet-101": dict(depths=(3, 4, 23, 3)),
    "resnet-152": dict(depths=(3, 8, 36, 3)),
    # ours: small pictures, no batch statistics
    "resnet-tiny": dict(
        widths=(32, 64), depths=(1, 1), layer="basic", num_labels=10, stem_width=32, image_channels=1,
        norm="group", groups=8,
    ),
}  # fmt: skip


# region batch norm
class BatchNorm(nn.Module):
    """(x - mean) / sqrt(variance + eps) * weight + bias, by channel (Ioffe and Szegedy 2015).

    In training mode mean and variance are those of the batch: a picture's result depends on the pictures
    beside it, and on several ranks each would norm by its own share. Group norm ties no pictures together.
    """

    needs_whole_batch = True  # data parallelism refuses it by this

    def __init__(self, channels: int, eps: float, momentum: float):
        super().__init__()
        self.eps, self.momentum = eps, momentum
        self.weight = nn.Parameter(torch.empty(channels))
        self.bias = nn.Parameter(torch.empty(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))
        self.running_mean: Tensor
        self.running_var: Tensor

    def forward(self, x_bcyx: Tensor) -> Tensor:
        mean, variance = self.running_mean, self.running_var
        if self.training:
            variance, mean = torch.var_mean(x_bcyx, dim=(0, 2, 3), correction=0)
            with torch.no_grad():
                n = x_bcyx.numel() // x_bcyx.shape[1]
                if n < 2:
                    raise ValueError("batch norm needs more than one value a channel in training mode")
                # the running variance is the unbiased estimate, the one used above is not
                self.running_mean.lerp_(mean, self.momentum)
                self.running_var.lerp_(variance * n / (n - 1), self.momentum)
        scale = self.weight * torch.rsqrt(variance + self.eps)
        return x_bcyx * scale[:, None, None] + (self.bias - mean * scale)[:, None, None]


# endregion


class GroupNorm(nn.Module):
    """The norm of each picture's groups of channels alone (Wu and He 2018, arXiv:1803.08494)."""

    def __init__(self, channels: int, groups: int, eps: float):
        super().__init__()
        self.groups, self.eps = groups, eps
        self.weight = nn.Parameter(torch.empty(channels))
        self.bias = nn.Parameter(torch.empty(channels))

    def forward(self, x_bcyx: Tensor) -> Tensor:
        return F.group_norm(x_bcyx, self.groups, self.weight, self.bias, self.eps)


class ConvNorm(nn.Module):
    """A convolution without bias, which the norm after it would take away again, and that norm."""

    def __init__(
        self, config: ResNetConfig, channels_in: int, channels_out: int, kernel: int, stride: int = 1
    ):
        super().__init__()
        self.stride, self.padding = stride, kernel // 2
        self.weight = nn.Parameter(torch.empty(channels_out, channels_in, kernel, kernel))
        self.norm: nn.Module
        if config.norm == "batch":
            self.norm = BatchNorm(channels_out, config.norm_eps, config.momentum)
        else:
            self.norm = GroupNorm(channels_out, config.groups, config.norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(F.conv2d(x, self.weight, stride=self.stride, padding=self.padding))


class ResNetStem(Block):
    """pixel_values [b,c,y,x] -> hidden, a quarter as high and wide."""

    reads = ("pixel_values",)
    writes = ("hidden",)

    def __init__(self, config: ResNetConfig):
        super().__init__()
        self.conv = ConvNorm(config, config.image_channels, config.stem_width, kernel=7, stride=2)

    def forward(self, state: State) -> State:
        hidden = F.relu(self.conv(state.pixel_values))
        return state.updated(hidden=F.max_pool2d(hidden, kernel_size=3, stride=2, padding=1))


class ResNetLayer(Block):
    """hidden -> relu(hidden + convolutions(hidden)); where the shape changes, the stream is projected."""

    reads = ("hidden",)
    writes = ("hidden",)

    def __init__(self, config: ResNetConfig, channels_in: int, channels_out: int, stride: int):
        super().__init__()
        changes = channels_in != channels_out or stride != 1
        self.project = ConvNorm(config, channels_in, channels_out, 1, stride) if changes else None
        inner = channels_out // LAYERS[config.layer]
        if config.layer == "basic":
            convs = [(channels_in, inner, 3, stride), (inner, channels_out, 3, 1)]
        else:
            convs = [(channels_in, inner, 1, 1), (inner, inner, 3, stride), (inner, channels_out, 1, 1)]
        self.convs = nn.ModuleList(ConvNorm(config, *shape) for shape in convs)

    def forward(self, state: State) -> State:
        update = state.hidden
        for index, conv in enumerate(self.convs):
            update = conv(update)
            if index < len(self.convs) - 1:
                update = F.relu(update)
        stream = state.hidden if self.project is None else self.project(state.hidden)
        return state.updated(hidden=F.relu(stream + update))


class ResNetHead(Block):
    """hidden -> the mean over the picture -> class_logits [b,k]; with class_labels [b] class_loss_sum too."""

    reads = ("hidden", "class_labels")
    writes = ("class_logits", "class_loss_sum")

    def __init__(self, config: ResNetConfig):
        super().__init__()
        self.classifier = nn.Linear(config.widths[-1], config.num_labels)

    def forward(self, state: State) -> State:
        state = state.updated(class_logits=self.classifier(state.hidden.mean((2, 3))))
        if "class_labels" not in state:
            return state
        loss = class_cross_entropy(state.class_logits, state.class_labels)
        return state.updated(class_loss_sum=loss)


class ResNet(Model):
    """A ResNet for image classification: `model(pixel_values)` gives `class_logits`."""

    CONFIG = ResNetConfig
    PRESETS = PRESETS

    def __init__(self, config: ResNetConfig):
        super().__init__()
        self.config: ResNetConfig = config
        layers, channels = [], config.stem_width
        for stage, (width, depth) in enumerate(zip(config.widths, config.depths, strict=True)):
            for index in range(depth):
                stride = 2 if stage > 0 and index == 0 else 1
                layers.append(ResNetLayer(config, channels, width, stride))
                channels = width
        self.blocks = nn.ModuleList([ResNetStem(config), *layers, ResNetHead(config)])
        self.finish()

    def forward(self, pixel_values: Tensor, class_labels: Tensor | None = None) -> State:
        """Run all blocks on pictures [b,c,y,x]; with class_labels [b] also the sum of the losses."""
        state = self.prepare(pixel_values, class_labels)
        for block in self.blocks:
            state = block(state)
        return state

    def prepare(self, pixel_values: Tensor, class_labels: Tensor | None = None) -> State:
        """Check a batch and make the State that the first block reads. Raises ValueError for other shapes."""
        channels, labels = self.config.image_channels, self.config.num_labels
        if pixel_values.dim() != 4 or pixel_values.shape[1] != channels:
            raise ValueError(
                f"pixel_values must be [batch, {channels}, height, width], got {list(pixel_values.shape)}"
            )
        if class_labels is None:
            return State(pixel_values=pixel_values)
        if class_labels.shape != pixel_values.shape[:1]:
            raise ValueError(
                f"class_labels must be [{len(pixel_values)}], one a picture, got {list(class_labels.shape)}"
            )
        check_values({"class_labels": class_labels})
        if class_labels.device.type == "cpu" and len(class_labels):
            low, high = int(class_labels.min()), int(class_labels.max())
            if low < 0 or high >= labels:
                raise ValueError(f"class_labels must be 0..{labels - 1}, got {low}..{high}")
        return State(pixel_values=pixel_values, class_labels=class_labels)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Kaiming-normal by channels out for convolutions, norms 1 and 0, torch's own for the classifier."""
        for module in self.modules():
            if isinstance(module, ConvNorm):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, BatchNorm | GroupNorm):
                nn.init.ones_(module.weight)
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Linear):
                module.reset_parameters()

    def parallel_plan(self) -> ParallelPlan:
        """Every weight on every rank (data parallel alone pays here); cuts between any two layers."""
        return ParallelPlan(
            rules=(Rule(r"blocks\.\d+\..*", "replicate"),), tied=(), cuts=tuple(range(1, len(self.blocks)))
        )

    @classmethod
    def hf_format(cls) -> HFFormat:
        """transformers' ResNetForImageClassification, which has batch norm only."""
        from fmlab.models.resnet_hf import FORMAT

        return FORMAT
