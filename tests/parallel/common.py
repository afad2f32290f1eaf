"""Models, data and engines that the parallel tests share. Sent to ranks by value."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fmlab.models import GPT, GPTConfig
from fmlab.objectives import CausalLM, Term
from fmlab.parallel import Engine, Layout, parallelize
from fmlab.parallel.ddp import DataParallel

VOCABULARY = 131  # odd, and not a multiple of any number of ranks


def gpt(tie_embeddings: bool = True) -> GPT:
    return GPT(
        GPTConfig(
            vocab_size=VOCABULARY,
            max_positions=24,
            num_layers=3,
            hidden_size=16,
            num_heads=2,
            tie_embeddings=tie_embeddings,
        )
    )


def tokens(rows: int, targets: list[int], seed: int = 0, length: int = 12) -> dict[str, Tensor]:
    """A batch whose row i has targets[i] targets."""
    assert len(targets) == rows
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (rows, length + 1), generator=generator)
    labels = ids[:, 1:].clone()
    for row, count in enumerate(targets):
        labels[row, count:] = -100
    return {"input_ids": ids[:, :-1].contiguous(), "labels": labels}


class Branches(nn.Module):
    """Classifies vectors through one of two branches, picked by the data; `never` takes no part at all."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.left, self.right, self.never = nn.Linear(8, 5), nn.Linear(8, 5), nn.Linear(8, 5)

    def forward(self, x: Tensor, y: Tensor, branch: Tensor) -> Tensor:
        head = self.left if int(branch[0]) == 0 else self.right
        return nn.functional.cross_entropy(head(self.stem(x).tanh()), y, reduction="sum")


class Classify:
    """Each row is a target."""

    def __call__(self, model: Any, batch: dict[str, Tensor]) -> dict[str, Term]:
        return {"class": Term(sum=model(**batch), count=self.counts(batch)["class"])}

    def counts(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"class": torch.tensor(len(batch["y"]))}


def rows(count: int, branch: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(count, 6, generator=generator),
        "y": torch.randint(5, (count,), generator=generator),
        "branch": torch.full((count,), branch),
    }


def engine(
    world: int,
    model: nn.Module | None = None,
    choice: str | Callable[..., Engine] = "fmlab",
    objective: Any = None,
    adamw: bool = False,
    max_grad_norm: float | None = None,
    **layout: Any,
) -> Engine:
    """An engine over `world` ranks, as each test wants it."""
    kind = partial(torch.optim.AdamW, lr=1e-2) if adamw else partial(torch.optim.SGD, lr=0.1)
    return parallelize(
        gpt() if model is None else model,
        Layout(data=world, **layout),
        objective or CausalLM(),
        lambda named: kind([parameter for _, parameter in named]),
        choice,
        max_grad_norm=max_grad_norm,
    )


class DividedTwice(DataParallel):
    """Wrong: the sum of gradients is divided by the ranks, although the losses were by the global count."""

    def _accumulate(self, micro_batches: Any, counts: Any) -> Tensor:
        sums = super()._accumulate(micro_batches, counts)
        for bucket in self.reducer.buckets:
            bucket.flat /= self.layout.data
        return sums


class MeanOfMeans(DataParallel):
    """Wrong where ranks have unequal counts: each rank takes its own mean, and the means are averaged."""

    def _accumulate(self, micro_batches: Any, counts: Any) -> Tensor:
        own = {"causal": sum(int(self.objective.counts(batch)["causal"]) for batch in micro_batches)}
        return super()._accumulate(micro_batches, {name: own[name] * self.layout.data for name in counts})


class LastBucketForgotten(DataParallel):
    """Wrong: the last bucket is never summed over ranks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        send, last = self.reducer.all_reduce, self.reducer.buckets[-1].flat
        self.reducer.all_reduce = lambda flat: None if flat is last else send(flat)  # type: ignore[method-assign]
