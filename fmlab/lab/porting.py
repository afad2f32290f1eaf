"""What chapter 3.2 runs: one training program on every device, and a model with faults that porting shows."""

import json
import subprocess
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmlab.backends import get_backend
from fmlab.backends.base import Precision
from fmlab.lab.curriculum import environment_python
from fmlab.models import GPT

ROWS, LENGTH = 2, 64
#: What `training_losses("xla")` gave in .venv-xla, for machines that do not have it.
COMMITTED_XLA: dict[str, Any] = {
    "losses": [8.432916641235352, 8.597113609313965, 8.548770904541016],
    "made by": "fmlab.lab.porting.main() in .venv-xla, torch 2.9.1, torch_xla 2.9.0, 30 November 2026",
}


def batch_of(step: int) -> dict[str, Tensor]:
    """Random tokens, the same on each device: input_ids and labels [2, 64]."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(4096, (ROWS, LENGTH + 1), generator=generator)
    return {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


# region program
def training_losses(name: str, steps: int = 3) -> list[float]:
    """The losses of `steps` steps of gpt2-tiny on the backend called `name`."""
    backend = get_backend(name)
    torch.manual_seed(0)
    model = backend.to_device(GPT.from_preset("gpt2-tiny"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # made after the move
    losses = []
    for step in range(steps):
        batch = backend.to_device(batch_of(step))
        with backend.step():  # a lazy device runs its notes at the end of this block
            with backend.autocast("bf16"):
                loss = model(**batch)["loss_sum"] / (ROWS * LENGTH)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())  # a host read, after the step
    return losses


# endregion


def gradients(name: str, precision: Precision) -> dict[str, Tensor]:
    """The gradients of the first step of gpt2-tiny on the backend called `name`, by parameter, on the host.

    precision: "fp32" or "bf16" (ValueError for one that the backend does not have).
    """
    backend = get_backend(name)
    torch.manual_seed(0)
    model = backend.to_device(GPT.from_preset("gpt2-tiny"))
    batch = backend.to_device(batch_of(0))
    with backend.step():
        with backend.autocast(precision):
            loss = model(**batch)["loss_sum"] / (ROWS * LENGTH)
        loss.backward()
    return {n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None}


# region faulty
class Faulty(nn.Module):
    """A word classifier that trains eagerly without a complaint."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(512, 128), nn.Linear(128, 128)
        self.head = nn.Linear(128, 512)
        self.steps = 0

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        self.steps += 1
        hidden = self.body(self.embed(ids)) * (1 + 0.1 / self.steps)
        if hidden.norm() > 100:
            hidden = hidden / 2
        kept = labels != -100
        logits = self.head(hidden[kept]).bfloat16()
        return F.cross_entropy(logits, labels[kept])


# endregion


def ragged_batches(lengths: list[int]) -> list[dict[str, Tensor]]:
    """Batches of 4 rows, as long as `lengths`, a quarter of the labels without a target."""
    batches = []
    for length in lengths:
        ids = torch.arange(4 * length).reshape(4, length) % 512
        labels = ids.clone()
        labels[:, ::4] = -100
        batches.append({"ids": ids, "labels": labels})
    return batches


def xla_losses() -> tuple[list[float], str]:
    """(the losses of `training_losses("xla")`, where they come from): run now in .venv-xla where that is
    there, else the committed ones.
    """
    python = environment_python(".venv-xla")
    if python is None:
        return list(COMMITTED_XLA["losses"]), f"committed, made by: {COMMITTED_XLA['made by']}"
    command = [str(python), "-c", "from fmlab.lab.porting import main; main()"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170)
    if done.returncode != 0:
        raise RuntimeError(f"the program failed in .venv-xla:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1]), "measured now, in .venv-xla"


def main() -> None:
    """Print the losses on torch_xla as JSON; for a process of .venv-xla."""
    from fmlab.backends.xla_environment import configure

    configure(device="CPU", fast_compile=True)
    print(json.dumps(training_losses("xla")))
