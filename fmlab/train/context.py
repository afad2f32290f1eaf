"""What a decoder makes of its context: its loss by position, without and with more and more to read.

Kaplan et al. (2020, arXiv:2001.08361, appendix D.5) show the loss at each position of the context falling as
a power law; Olsson et al. (2022, arXiv:2209.11895) call the loss late in the context less that of an early
position the in-context learning score. The weights stay as they are: it is the context that grows.

Shapes: b rows, l positions, v vocabulary.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fmlab.data.batch import IGNORE, Batch


@torch.no_grad()
def loss_by_position(model: Any, batches: Iterable[Batch]) -> tuple[Tensor, Tensor]:
    """Mean loss of the targets at each position of the rows [nats], and how many there were: both fp64 [l].

    model:   a decoder, called as model(input_ids)["logits"]; in eval mode meanwhile
    batches: {"input_ids" [b, l], "labels" [b, l]} of one length, labels shifted, -100 where there is no
    target

    Position 0 has read one token. A position without a target has a loss of nan. Raises ValueError for
    batches of several lengths and when there is none.
    """
    sums: Tensor | None = None
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    try:
        for batch in batches:
            labels_bl = batch["labels"].to(device)
            if sums is not None and sums.shape[1] != labels_bl.shape[1]:
                raise ValueError(
                    f"rows of {labels_bl.shape[1]} positions after rows of {sums.shape[1]}; give one length"
                )
            logits_blv = model(batch["input_ids"].to(device))["logits"].float()
            loss_bl = F.cross_entropy(
                logits_blv.transpose(1, 2), labels_bl, ignore_index=IGNORE, reduction="none"
            )
            here = torch.stack([loss_bl.double().sum(0), (labels_bl != IGNORE).double().sum(0)]).cpu()
            sums = here if sums is None else sums + here
    finally:
        model.train(was_training)
    if sums is None:
        raise ValueError("there is nothing to measure: no batch was given")
    return sums[0] / sums[1], sums[1]
