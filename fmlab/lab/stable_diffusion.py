"""What chapter 3.6 shows: a longer run's figures and pictures, a full-size UNet's step on simulated chips,
and what a pipeline would have to send.

The run was made by the commands in fmlab.train.images.study; its weights are not kept, their hashes are.

Shapes: b batch, h height and width of latents, m text tokens.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fmlab.extras import require
from fmlab.models import UNet
from fmlab.models.diffusion import UNetConfig
from fmlab.models.diffusion.presets import UNET_PRESETS
from fmlab.models.state import live_names
from fmlab.sim import simulated_mode
from fmlab.sim.cores import attention_core

__all__ = ["ChipStep", "Cut", "chip_step", "cuts", "longer_run", "picture", "ready_to_compare"]

_FOLDER = Path(__file__).with_name("stable_diffusion_run")
TEXT = 77


def longer_run() -> dict[str, Any]:
    """The figures of the longer run; see fmlab.train.images.study."""
    found: dict[str, Any] = json.loads((_FOLDER / "run.json").read_text("utf-8"))
    return found


def picture(name: str) -> NDArray[np.uint8]:
    """A grid of its pictures, bytes [H,W,3]: "guidance", "samplers" or "word"."""
    with require("lab", "PIL.Image").open(_FOLDER / f"{name}.png") as image:
        return np.asarray(image)


@dataclass(frozen=True)
class ChipStep:
    """A training step on a simulated chip: seconds, the fullest moment of its memory, FLOPs of products."""

    seconds: float
    peak_bytes: int
    capacity: int
    flops: float
    peak_flops: float

    @property
    def utilisation(self) -> float:
        """Share of the chip's peak that the matrix products and convolutions use."""
        return self.flops / self.seconds / self.peak_flops


def bare(preset: str) -> UNet:
    """A UNet on the meta device, its weights never filled, with attention as an accelerator's one kernel."""
    kind: Any = type("UNet", (UNet,), {"reset_parameters": lambda self: None})
    with torch.device("meta"):
        model: UNet = kind(UNetConfig(**UNET_PRESETS[preset]), attention_core=attention_core("fused"))
    return model


def chip_step(chip: str, preset: str = "sd-1.5", batch: int = 8, size: int = 64) -> ChipStep:
    """Forward, backward and AdamW of a UNet in bf16 on latents of that size: shapes alone, nothing computed.

    The moments are bf16 too, without fp32 masters; loss and rate of products are those of the chip's peak.
    """
    with simulated_mode(chip, dry=True) as device:
        unet = bare(preset).to(torch.bfloat16)
        inputs = _inputs(unet, batch, size)
        optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-4)
        device.reset()
        unet(*inputs).sample.float().square().mean().backward()
        optimizer.step()
        seconds, totals, memory = device.seconds, device.totals, device.memory
        capacity = memory.capacity or 0
        return ChipStep(seconds, memory.peak, capacity, totals.flops, device.chip.peak_flops("bf16"))


def _inputs(unet: UNet, batch: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Noisy latents, timesteps and the text, on the meta device in bf16."""
    config, kind = unet.config, dict(dtype=torch.bfloat16, device="meta")
    sample = torch.empty(batch, config.in_channels, size, size, **kind)  # type: ignore[call-overload]
    text = torch.empty(batch, TEXT, config.text_size, **kind)  # type: ignore[call-overload]
    return sample, torch.zeros(batch, dtype=torch.long, device="meta"), text


@dataclass(frozen=True)
class Cut:
    """What a pipeline sends forward where it cuts before block `block`, in bytes of bf16, for one picture.

    hidden: the stream itself; skips: what later blocks will read; names: how many tensors in all.
    """

    block: int
    hidden: int
    skips: int
    names: int


@torch.no_grad()
def cuts(preset: str = "sd-1.5", size: int = 64) -> list[Cut]:
    """All places where a UNet may be cut, from shapes alone."""
    unet = bare(preset).to(torch.bfloat16)
    state, found = unet.prepare(*_inputs(unet, 1, size)), []
    for block, part in enumerate(unet.blocks):
        if block:
            names = [name for name in live_names(list(unet.blocks), block) if name in state]  # type: ignore[arg-type]
            sizes = {name: state[name].numel() * 2 for name in names}
            skips = sum(n for name, n in sizes.items() if name.startswith("skip_"))
            found.append(Cut(block, sizes["hidden"], skips, len(names)))
        state = part(state)
    return found


def ready_to_compare(build: Any, seed: int = 0) -> Any:
    """A builder whose model has no zero matrix: a UNet starts with zeros where its blocks write, through
    which no gradient passes, so that on a fresh one nothing could differ."""

    def filled() -> Any:
        model = build()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                if not parameter.any():
                    parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
        return model

    return filled
