"""Seven ways to get T5 wrong on two tensor-parallel ranks. None raises an error.

Each is an engine of its own, derived from the right one, so that `parity` and a training run take it.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fmlab.lab.t5 import small_t5
from fmlab.models import T5
from fmlab.models.plan import ParallelPlan
from fmlab.models.state import State
from fmlab.parallel import ParityReport
from fmlab.parallel.composed import Composed
from fmlab.parallel.tensor.functions import copy_forward_sum_backward


class FirstHeads(Composed):
    """Every rank takes the first columns of the bias table: heads of rank 0."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for table in bias_tables(self.model):
            self.mesh.axis("tensor").broadcast_(table.weight.data)


class SummedThoughDivided(Composed):
    """The table is divided by heads, and its gradients are summed over ranks as if it were whole."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        sum_bias_gradients(self)


# region whole
class WholeTable(T5):
    """A T5 whose plan leaves the bias tables whole on each rank."""

    def parallel_plan(self) -> ParallelPlan:
        plan = super().parallel_plan()
        whole = [replace(r, kind="replicate") if "position_bias" in r.pattern else r for r in plan.rules]
        return replace(plan, rules=tuple(whole))


class NotSummed(Composed):
    """A rank takes its heads' columns of a whole table; the others get no gradient here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        axis = self.mesh.axis("tensor")
        for layer in first_layers(self.model):
            layer._bias = lambda *a, whole=layer._bias, **k: whole(*a, **k).chunk(axis.size, 1)[axis.rank]


class Summed(NotSummed):
    """The same, put right."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        sum_bias_gradients(self)


# endregion


# region encoder
class NoSumBehindEncoder(Composed):
    """No f behind the encoder: each rank's encoder learns from the rank's own heads alone."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        del encoder_end(self.model).forward  # the block's own comes back


class TwoSumsBehindEncoder(Composed):
    """f twice: once behind the encoder, once more by the one who ported cross-attention."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        end, axis = encoder_end(self.model), self.mesh.axis("tensor")

        def forward(state: State, once: Any = end.forward) -> State:
            state = once(state)
            again = copy_forward_sum_backward(state.encoder_hidden, axis)
            return state.updated(encoder_hidden=again)

        end.forward = forward


# endregion


class TornTable(Composed):
    """Dividing the model makes a second tensor of the output matrix, which was the embedding's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        model: Any = self.model
        output = model.head.tokens
        output.weight = nn.Parameter(output.weight.detach().clone())


class SeedOfTheRank(Composed):
    """Dropout drawn from another seed on each rank, in the stream that all ranks hold."""

    _seed = 0

    @property
    def dropout_seed(self) -> int:
        return self._seed + dist.get_rank()

    @dropout_seed.setter
    def dropout_seed(self, seed: int) -> None:
        self._seed = seed


def first_layers(model: Any) -> list[Any]:
    """The first layer of each stack, which makes the bias for all."""
    return [block for block in model.blocks if hasattr(block, "position_bias")]


def bias_tables(model: Any) -> list[Any]:
    """The encoder's and the decoder's table of relative positions."""
    return [layer.position_bias for layer in first_layers(model)]


def encoder_end(model: Any) -> Any:
    """The block that makes what the decoder's layers look at."""
    return model.blocks[model.config.decoder_start - 1]


def sum_bias_gradients(engine: Composed) -> None:
    """From now on the tables' gradients are added up over the tensor-parallel ranks."""
    for name in [n for n in engine.ledger.entries if "position_bias" in n]:
        engine.ledger.add_partial(name, engine.mesh.axis("tensor"))


def whole_table_t5(seed: int = 0) -> T5:
    """The small T5 with the plan of WholeTable."""
    config = small_t5().config
    torch.manual_seed(seed)
    return WholeTable(config)


#: What went wrong -> (the engine that does it, what builds its model).
FAULTS: dict[str, tuple[type[Composed], Any]] = {
    "bias of the first heads": (FirstHeads, small_t5),
    "bias divided, gradient summed": (SummedThoughDivided, small_t5),
    "bias whole, gradient not summed": (NotSummed, whole_table_t5),
    "no sum behind the encoder": (NoSumBehindEncoder, small_t5),
    "two sums behind the encoder": (TwoSumsBehindEncoder, small_t5),
    "tied table torn apart": (TornTable, small_t5),
    "dropout seed of the rank": (SeedOfTheRank, partial(small_t5, dropout=0.1)),
}


def gives_away(report: ParityReport) -> dict[str, Any]:
    """The numbers of a report that tell the faults apart.

    loss: of the first step, as a multiple of one device's. wrong: gradients that differ. first: the first of
    them in the model's order. factor: the middle one of their multiples. ranks: whether the ranks differ.
    """
    wrong = [row for row in report.rows if not row.gradient.ok]
    factors = sorted(row.gradient.factor for row in wrong)
    return {
        "loss": report.loss.factor if not report.loss.ok else 1.0,
        "wrong": len(wrong),
        "first": wrong[0].name if wrong else "",
        "factor": factors[len(factors) // 2] if wrong else 1.0,
        "ranks": bool(report.ranks_differ),
    }
