"""Where a pipeline cuts a model: which blocks make which chunk, which stage holds what, what crosses a
cut."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import cast

from torch import nn

from fmlab.models.plan import ParallelPlan
from fmlab.models.state import Block, live_names
from fmlab.sim.stages import Traceable, layer_indices

EVEN, WEIGHTED = "even", "weighted"


# region cut
def cut_blocks(
    model: nn.Module, plan: ParallelPlan, chunks: int, where: str | Sequence[int] = EVEN
) -> list[range]:
    """Block indices of each of `chunks` chunks.

    where: "even": layers, the blocks with matrices that the plan divides, are shared out in order: chunk i of
           c begins with layer i * L // c. What stands before the first layer goes to the first chunk, what
           follows a layer goes with it. 7 layers on 2: 3 and 4. With fewer layers than chunks, what lies
           between two possible cuts is shared out instead.
           "weighted": the chunk with the most work has as little as can be. A block's work is the number of
           elements of its matrices, a token's multiplications; so an output head counts, and a table that is
           only looked up does not. Attention's products of positions are left out.
           Or the index of the first block of each chunk but the first.

    Raises ValueError, with what is legal, for more chunks than the plan has cuts for, and for a cut that it
    forbids.
    """
    blocks = len(list(_blocks(model)))
    if isinstance(where, str):
        starts = _even(model, plan, chunks) if where == EVEN else _weighted(model, plan, chunks)
    else:
        starts = list(where)
        if len(starts) != chunks - 1 or starts != sorted(set(starts)):
            raise ValueError(
                f"stage_cuts={tuple(starts)}: {chunks} chunks need {chunks - 1} ascending indices"
            )
    illegal = [start for start in starts if start not in plan.cuts]
    if illegal:
        raise ValueError(
            f"a cut before block {illegal[0]} is not allowed by the plan of {type(model).__name__}, which "
            f"may be cut before blocks {_listed(plan.cuts)}; choose with Layout(stage_cuts=(...))"
        )
    return [range(first, end) for first, end in pairwise([0, *starts, blocks])]


# endregion


def _even(model: nn.Module, plan: ParallelPlan, chunks: int) -> list[int]:
    layers, pieces = layer_indices(cast(Traceable, model), plan), [0, *plan.cuts]
    _check_number(model, chunks, len(pieces))
    shared = layers if chunks <= len(layers) else pieces
    return [shared[i * len(shared) // chunks] for i in range(1, chunks)]


def _check_number(model: nn.Module, chunks: int, most: int) -> None:
    if chunks > most:
        raise ValueError(
            f"a pipeline of {chunks} chunks (pipeline x virtual_stages), and {type(model).__name__} can be "
            f"cut into {most} at most; use fewer stages"
        )


def work_of(block: nn.Module) -> int:
    """Elements of the matrices that a token is multiplied by in a block."""
    tables = {id(m.weight) for m in block.modules() if isinstance(m, nn.Embedding)}
    return sum(p.numel() for p in block.parameters() if p.dim() >= 2 and id(p) not in tables)


def _weighted(model: nn.Module, plan: ParallelPlan, chunks: int) -> list[int]:
    _check_number(model, chunks, len(plan.cuts) + 1)
    return share_work([work_of(block) for block in _blocks(model)], plan.cuts, chunks)


def share_work(works: Sequence[int], cuts: Sequence[int], chunks: int) -> list[int]:
    """The cuts with the smallest largest chunk; of several such, each as early as can be.

    works: of each block. cuts: where a chunk may begin, in order, as many as chunks - 1 or more.
    """
    before = [0, *accumulate(works)]  # work of all blocks before i
    cuts = [0, *cuts]
    # best[i]: (the largest of the chunks so far, their starts) when the next one begins at cut i
    best: dict[int, tuple[int, list[int]]] = {0: (0, [])}
    for _ in range(chunks - 1):
        reached: dict[int, tuple[int, list[int]]] = {}
        for start, (largest, starts) in best.items():
            for end in cuts:
                if end > start:
                    found = (max(largest, before[end] - before[start]), [*starts, end])
                    reached[end] = min(reached.get(end, found), found)
        best = reached
    return min(
        (max(largest, before[-1] - before[start]), starts) for start, (largest, starts) in best.items()
    )[1]


def crossing(blocks: Sequence[Block], cut: int) -> list[str]:
    """The names that are sent at a cut: written before it and read behind it. What a batch holds from the
    start, every stage has for itself."""
    written = {name for block in blocks[:cut] for name in block.writes}
    return [name for name in live_names(blocks, cut) if name in written]


@dataclass(frozen=True)
class Chunk:
    """Some blocks of the model, one after the other, on one stage.

    number:   of the chunk in the model
    blocks:   their indices
    receives: names that come from the chunk before; sends: names that go to the next one (some of them may be
              absent: blocks read optional names too)
    """

    number: int
    blocks: range
    receives: tuple[str, ...]
    sends: tuple[str, ...]


def chunks_of(model: nn.Module, ranges: Sequence[range]) -> list[Chunk]:
    """The chunks of a model that still has all its blocks."""
    blocks = cast(Sequence[Block], _blocks(model))
    edges = [(), *(tuple(crossing(blocks, part.start)) for part in ranges[1:]), ()]
    return [Chunk(i, part, edges[i], edges[i + 1]) for i, part in enumerate(ranges)]


def homes(names: Sequence[str], home_of_block: Mapping[int, int]) -> tuple[int, ...]:
    """The stages that need a parameter of these names (several, if it is tied).

    Raises ValueError for one that stands in no block: no stage could be said to own it.
    """
    found = set()
    for name in names:
        first, _, rest = name.partition(".")
        number = rest.partition(".")[0]
        if first != "blocks" or not number.isdigit():
            raise ValueError(
                f"parameter {name!r} stands in no block, so that no stage of a pipeline owns it; move it "
                "into one of model.blocks, or leave pipeline out"
            )
        found.add(home_of_block[int(number)])
    return tuple(sorted(found))


class Elsewhere(Block):
    """Stands where a block of another stage stood, so that the others keep their names."""


def _blocks(model: nn.Module) -> nn.ModuleList:
    blocks = getattr(model, "blocks", None)
    if not isinstance(blocks, nn.ModuleList) or not hasattr(model, "prepare"):
        raise ValueError(
            f"a pipeline cuts a model between its blocks, and {type(model).__name__} has no list `blocks` of "
            "fmlab.models.state.Block with a method `prepare` that makes what the first one reads"
        )
    return blocks


def _listed(values: Sequence[int]) -> str:
    run = list(values) == list(range(values[0], values[-1] + 1)) if values else False
    return (
        f"{values[0]} to {values[-1]}" if run and len(values) > 2 else ", ".join(map(str, values)) or "none"
    )
