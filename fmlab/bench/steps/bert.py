"""BERT-base's masked-token training step beside transformers': 15 % of the tokens have a label.

transformers turns every position into logits; ours only the positions that have a label.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from fmlab.extras import require
from fmlab.models import BERT

BATCH, LENGTH, MASKED = 8, 128, 0.15
NAME = f"BERT-base 110M masked-token step, batch {BATCH} x {LENGTH}"
REFERENCE_IMPORTS = ("transformers.models.bert.modeling_bert",)  # not counted as memory of a step


def _loss(side: str) -> tuple[torch.nn.Module, Callable[[Tensor, Tensor], Tensor]]:
    """A side's model and its mean loss of (input_ids, labels)."""
    torch.manual_seed(0)
    if side == "fmlab":
        model = BERT.from_preset("bert-base-uncased", heads="masked")
        return model, lambda ids, labels: model(ids, labels=labels).loss_sum / (labels != -100).sum()
    transformers = require("hf", "transformers")
    transformers.logging.set_verbosity_error()
    config = transformers.BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    reference = transformers.BertForMaskedLM(config)
    return reference.train(), lambda ids, labels: reference(input_ids=ids, labels=labels).loss


def make_step(side: str, precision: str) -> Callable[[], None]:
    """One training step of a side: forward, backward, fused AdamW."""
    model, loss_of = _loss(side)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1000, 30522, (BATCH, LENGTH), generator=generator)
    masked = torch.rand(BATCH, LENGTH, generator=generator) < MASKED
    labels = ids.where(masked, -100)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = loss_of(ids, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step
