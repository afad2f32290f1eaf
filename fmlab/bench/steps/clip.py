"""CLIP's training step beside transformers': ViT-B/32's widths and lengths, with three layers a tower instead
of twelve, so that a step takes seconds on a laptop."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fmlab.extras import require
from fmlab.models import CLIP, CLIPConfig
from fmlab.models.clip_hf import to_fields
from fmlab.objectives import Contrastive, total_loss

BATCH, LAYERS = 16, 3
NAME = f"CLIP ViT-B/32 with {LAYERS} layers a tower, batch {BATCH}"
REFERENCE_IMPORTS = ("transformers.models.clip.modeling_clip",)  # not counted as memory of a step


def _config() -> CLIPConfig:
    config = CLIPConfig(**CLIP.PRESETS["clip-vit-b-32"])
    return replace(
        config,
        text=replace(config.text, num_layers=LAYERS),
        vision=replace(config.vision, num_layers=LAYERS),
    )


def _loss(side: str) -> tuple[torch.nn.Module, Callable[[dict[str, Tensor]], Tensor]]:
    """A side's model and its loss of a batch."""
    torch.manual_seed(0)
    if side == "fmlab":
        model, objective = CLIP(_config()), Contrastive()

        def ours(batch: dict[str, Tensor]) -> Tensor:
            return total_loss(objective(model, batch), objective.counts(batch))

        return model, ours
    transformers = require("hf", "transformers")
    transformers.logging.set_verbosity_error()
    reference: Any = transformers.CLIPModel(transformers.CLIPConfig(**to_fields(_config())))
    return reference.train(), lambda batch: reference(**batch, return_loss=True).loss


def make_step(side: str, precision: str) -> Callable[[], None]:
    """One training step of a side: forward, backward, fused AdamW."""
    model, loss_of = _loss(side)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1000, 49000, (BATCH, 77), generator=generator)
    ids[:, -1] = 49407  # the end-of-text token
    batch = {"pixel_values": torch.randn(BATCH, 3, 224, 224, generator=generator), "input_ids": ids}

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = loss_of(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step
