"""Checkers of notebook 2.9."""

import math

from fmlab.lab.exercises import Answer, NotYet, exercise


@exercise("2.9.1", "the rows of a rank", returns=list)
def rows_of_rank(answer: Answer) -> str:
    import torch

    from fmlab.models.plan import Rule

    cases = [(4, 2, 3, 2), (6, 3, 3, 3), (4, 4, 2, 4), (2, 8, 1, 2)]
    for heads, width, parts, ranks in cases:
        rows = torch.arange(parts * heads * width)
        rule = Rule(".*", "column", parts=parts, unit=width)
        for rank in range(ranks):
            right = rule.shard(rows, rank, ranks).tolist()
            got = list(answer(heads, width, parts, ranks, rank))
            if got == right:
                continue
            what = (
                f"got {_short(got)} for heads={heads}, width={width}, parts={parts}, rank {rank} of {ranks}"
            )
            each = len(rows) // ranks
            if got == list(range(rank * each, (rank + 1) * each)):
                raise NotYet(
                    what, "that is Shard(0)", "rank 0 must have queries, keys and values of its heads"
                )
            if got and max(got) < heads * width and parts > 1 and len(got) < len(right):
                raise NotYet(what, "the same heads of each part", "part p begins at row p·heads·width")
            if len(got) < len(right):
                raise NotYet(what, "a head has `width` rows", "multiply heads by width to get rows")
            raise NotYet(
                what, "whole heads, consecutive ones", "rank r has heads r·heads/ranks and those that follow"
            )
    return f"{len(cases)} matrices, each rank"


def _short(rows: list[int]) -> str:
    return str(rows) if len(rows) < 9 else f"[{', '.join(map(str, rows[:8]))}, ...]"


@exercise("2.9.2", "undo a library's divisions", returns=float)
def undo(answer: Answer) -> str:
    cases = [(4, 1, True, False), (2, 8, True, True), (3, 5, False, True), (4, 2, False, False)]
    for ranks, micro, over_ranks, over_micro in cases:
        right = float((ranks if over_ranks else 1) * (micro if over_micro else 1))
        got = answer(ranks, micro, over_ranks, over_micro)
        if math.isclose(got, right):
            continue
        what = (
            f"got {got:g}, not {right:g}, for {ranks} ranks and {micro} micro-batches, divided over ranks: "
            f"{over_ranks}, over micro-batches: {over_micro}"
        )
        if math.isclose(got, 1 / right):
            raise NotYet(what, "the wrong way round", "what divides is undone by what multiplies")
        if math.isclose(got, ranks * micro):
            raise NotYet(
                what, "that is the same whatever the library does", "a division that is not made needs none"
            )
        raise NotYet(
            what, "both divisions count, each if it is made", "start from 1 and multiply once for each"
        )
    return f"{len(cases)} libraries"


@exercise("2.9.3", "which blocks may be groups?", returns=list)
def own_groups(answer: Answer) -> str:
    cases: list[tuple[list[list[str]], list[int]]] = [
        ([["table"], ["a"], ["b"], ["norm", "table"]], [1, 2]),
        ([["t"], ["a", "b"], ["t", "c"], ["d"], ["t"]], [1, 3]),
        ([["a"], [], ["b"]], [0, 2]),
        ([["a"], ["b"]], [0, 1]),
    ]
    for blocks, right in cases:
        got = list(answer(blocks))
        if got == right:
            continue
        what = f"got {got}, not {right}, for {blocks}"
        extra = sorted(set(got) - set(right))
        if any(not blocks[index] for index in extra if index < len(blocks)):
            raise NotYet(what, "a block without tensors has nothing to divide", "leave out empty blocks")
        shares = [
            [j for j, other in enumerate(blocks) if j != i and set(other) & set(blocks[i])] for i in extra
        ]
        if (
            any(not any(abs(i - j) == 1 for j in js) for i, js in zip(extra, shares, strict=True))
            and len(extra) > 1
        ):
            raise NotYet(
                what, "look at all blocks, not only neighbours", "the head is far from the embedding"
            )
        raise NotYet(
            what,
            "of two blocks that share, neither of the two may leave the root",
            "count the holders of each",
        )
    return f"{len(cases)} models"
