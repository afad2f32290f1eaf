"""A task that can only be learnt from the context: each row has a rule of its own, shown by examples.

A row is x1 y1 x2 y2 ... with y = (x + r) mod p, and r drawn anew for each row. So the weights cannot hold r:
a model that answers the n-th question has read n - 1 examples, its shots (Brown et al. 2020,
arXiv:2005.14165, section 2, call this in-context learning; no weight changes while it reads).

Without an example the best answer is a guess, right in 1 of p. A model that only copies answers a question
that it has seen before. One that has learnt the rule needs a single example: r = y1 - x1.

    task = ShiftTask()
    model, losses = task.learn()
    accuracy_by_shots(model, task.batch(1000, seed=1))      # [shots]: about 1/5, then 1

Shapes: b rows, n questions of a row, v vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fmlab.data.batch import IGNORE, Batch
from fmlab.models import GPT
from fmlab.models.gpt import GPTConfig
from fmlab.train.schedule import warmup_cosine


@dataclass(frozen=True)
class ShiftTask:
    """modulus: p, how many x and how many y there are. questions: of a row, so up to questions - 1 shots.

    x is a token from 0 to p - 1, y one from p to 2p - 1. Raises ValueError for either number below 2.
    """

    modulus: int = 5
    questions: int = 8

    def __post_init__(self) -> None:
        for name in ("modulus", "questions"):
            if getattr(self, name) < 2:
                raise ValueError(f"{name} must be at least 2, got {getattr(self, name)}")

    def batch(self, rows: int, seed: int | torch.Generator) -> Batch:
        """Rows with questions and rules drawn at random: {"input_ids" [b, 2n], "labels" [b, 2n]}.

        Only the answers are targets: nothing in a row tells the next question.
        """
        if rows < 1:
            raise ValueError(f"rows must be at least 1, got {rows}")
        draw = seed if isinstance(seed, torch.Generator) else torch.Generator().manual_seed(seed)
        rule_b1 = torch.randint(self.modulus, (rows, 1), generator=draw)
        x_bn = torch.randint(self.modulus, (rows, self.questions), generator=draw)
        y_bn = (x_bn + rule_b1) % self.modulus + self.modulus
        ids = torch.stack([x_bn, y_bn], dim=2).flatten(1)
        labels = torch.full_like(ids, IGNORE)
        labels[:, 0::2] = y_bn  # what follows x
        return {"input_ids": ids, "labels": labels}

    def copied(self, batch: Batch) -> Tensor:
        """Accuracy of copying on such rows, [n]: right where the question was seen before, else a guess."""
        x_bn = batch["input_ids"][:, 0::2]
        same_bnn = (x_bn[:, :, None] == x_bn[:, None, :]).tril(-1)
        seen_n = same_bnn.any(2).double().mean(0)
        return seen_n + (1 - seen_n) / self.modulus

    def learn(
        self,
        steps: int = 600,
        width: int = 32,
        rows: int = 32,
        lr: float = 6e-3,
        seed: int = 0,
    ) -> tuple[GPT, list[float]]:
        """Train a small GPT on `steps` batches of fresh rows; the model and the loss of each step [nats].

        The loss waits at log p, then falls: the heads that find an example are of no use before there are
        any that use it. Smaller first weights make the wait longer.
        """
        torch.manual_seed(seed)
        draw = torch.Generator().manual_seed(seed)
        shape = GPTConfig(2 * self.modulus, 2 * self.questions, 2, width, num_heads=2, init_std=0.2)
        model = GPT(shape)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.1)
        losses = []
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = warmup_cosine(step, steps, min(50, steps // 2), lr, lr / 10)
            loss = model(**self.batch(rows, draw))["loss_sum"] / (rows * self.questions)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return model, losses


@torch.no_grad()
def accuracy_by_shots(model: Any, batch: Batch) -> Tensor:
    """The part of the rows whose answer is right after 0, 1, 2, ... examples, [n], the likeliest token taken.

    batch: of ShiftTask.batch, or any whose labels stand at the same places in each row; else ValueError.
    """
    target_l = (batch["labels"] != IGNORE).all(0)
    if not (target_l == (batch["labels"] != IGNORE).any(0)).all() or not target_l.any():
        raise ValueError("labels must stand at the same places in each row, so that rows have equal shots")
    was_training = model.training
    model.eval()
    best_bl = model(batch["input_ids"])["logits"].argmax(-1)
    model.train(was_training)
    return (best_bl == batch["labels"])[:, target_l].double().mean(0)
