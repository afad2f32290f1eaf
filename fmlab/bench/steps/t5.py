"""T5-small's training step beside transformers', at the lengths of its pre-training: 512 in, 114 out."""

from collections.abc import Callable

import torch
from torch import Tensor

from fmlab.extras import require
from fmlab.models import T5

BATCH, INPUTS, OUTPUTS = 4, 512, 114
NAME = f"T5-small 60M step, batch {BATCH} x {INPUTS} -> {OUTPUTS}"
REFERENCE_IMPORTS = ("transformers.models.t5.modeling_t5",)  # not counted as memory of a step


def _loss(side: str) -> tuple[torch.nn.Module, Callable[[Tensor, Tensor], Tensor]]:
    """A side's model and its mean loss of (input_ids, labels)."""
    torch.manual_seed(0)
    if side == "fmlab":
        model = T5.from_preset("t5-small")
        return model, lambda ids, labels: model(ids, labels=labels).loss_sum / labels.numel()
    transformers = require("hf", "transformers")
    transformers.logging.set_verbosity_error()
    reference = transformers.T5ForConditionalGeneration(
        transformers.T5Config(dropout_rate=0.0, use_cache=False, decoder_start_token_id=0)
    )
    return reference.train(), lambda ids, labels: reference(input_ids=ids, labels=labels).loss


def make_step(side: str, precision: str) -> Callable[[], None]:
    """One training step of a side: forward, backward, fused AdamW."""
    model, loss_of = _loss(side)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    generator = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(2, 32000, (BATCH, n), generator=generator) for n in (INPUTS, OUTPUTS))

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = loss_of(ids, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step
