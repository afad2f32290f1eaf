"""Checkers of notebook 2.7."""

from typing import Any

from fmlab.lab.exercises import Answer, NotYet, exercise


@exercise("2.7.1", "put attention together", returns=tuple)
def put_together(answer: Answer) -> str:
    import torch

    torch.manual_seed(27)
    scores, values = torch.randn(5, 12, dtype=torch.float64), torch.randn(12, 3, dtype=torch.float64)
    hidden = scores.clone()
    hidden[0] = hidden[1, :4] = hidden[2, 8:] = -torch.inf  # row 0 sees nothing at all
    for name, table in (
        ("parts of one softmax", scores),
        ("scores around 1000", scores + 1000),
        ("rows that see nothing in a part", hidden),
    ):
        parts = [_part(table[:, c], values[c]) for c in (slice(0, 4), slice(4, 8), slice(8, 12))]
        right, right_sum = _part(table, values)
        got = answer([(mixed.clone(), total.clone()) for mixed, total in parts])
        if len(got) != 2 or any(not isinstance(t, torch.Tensor) for t in got):
            raise NotYet("the result is not a pair of tensors", "return (mixed, logsumexp) of the whole rows")
        mixed, total = got
        if mixed.shape != right.shape or total.shape != right_sum.shape:
            raise NotYet(
                f"got shapes {tuple(mixed.shape)} and {tuple(total.shape)}",
                "the whole has the shapes of each part",
                "add over the parts, not over queries",
            )
        if not torch.allclose(mixed, right, atol=1e-9):
            raise _wrong_mixture(name, mixed, parts, right)
        if not torch.allclose(total, right_sum, atol=1e-9):
            raise NotYet(
                f"{name}: the values are right, the log-sum-exp is not",
                "the sums that softmax divides by add up: log of the sum of exp",
                "torch.logsumexp over the stacked log-sum-exps",
            )
    return "parts, large scores and rows that see nothing"


def _part(scores: Any, values: Any) -> tuple[Any, Any]:
    total = scores.logsumexp(-1)
    weights = (scores - total.masked_fill(total.isinf(), 0)[:, None]).exp()
    return weights @ values, total


def _wrong_mixture(name: str, mixed: Any, parts: Any, right: Any) -> NotYet:
    import torch

    what = f"wrong for {name}"
    stacked = torch.stack([part for part, _ in parts])
    if mixed.isnan().any() or mixed.isinf().any():
        if name == "scores around 1000":
            return NotYet(
                f"{what}: nan or inf",
                "exp(1000) is more than a float can hold",
                "subtract the whole's log-sum-exp before exp: a part's share is exp(part - whole)",
            )
        return NotYet(
            f"{what}: nan",
            "-inf minus -inf is nan: such a row must give zeros",
            "replace an infinite log-sum-exp of the whole by 0 before you subtract it",
        )
    if torch.allclose(mixed, stacked.mean(0)):
        return NotYet(what, "that is the mean: a part with larger scores must weigh more", "weigh by exp")
    if torch.allclose(mixed, stacked.sum(0)):
        return NotYet(
            what, "each part was divided by its own sum: added up, weights are 3 in all", "rescale each first"
        )
    return NotYet(
        what,
        "what is a part's share of the sum that the whole softmax divides by?",
        "exp(its log-sum-exp - the whole's log-sum-exp)",
    )


@exercise("2.7.2", "even out a causal ring", returns=list)
def mirrored(answer: Answer) -> str:
    for ranks, length in ((2, 8), (3, 24), (4, 16)):
        right = [_mirrored(rank, ranks, length) for rank in range(ranks)]
        got = [[int(column) for column in answer(rank, ranks, length)] for rank in range(ranks)]
        if got == right:
            continue
        what = f"{ranks} ranks, {length} columns: rank 0 has {got[0]}"
        if sorted(column for columns in got for column in columns) != list(range(length)):
            raise NotYet(
                what,
                "each column must be on exactly one rank",
                "there are 2 chunks a rank: which chunk is the mirror of chunk r?",
                "chunk 2n - 1 - r",
            )
        work = [sum(column + 1 for column in columns) for columns in got]
        if len(set(work)) > 1:
            raise NotYet(
                f"{what}; the ranks' pairs are {work}",
                "the last columns see the most: give each rank some from both ends",
                "chunks r and 2n - 1 - r",
            )
        if [sorted(columns) for columns in got] == right:
            raise NotYet(what, "the right columns: list them in ascending order")
        raise NotYet(
            what,
            "as even as can be, but in other pieces than two runs of neighbours",
            "cut the columns into 2n chunks",
        )
    return "2, 3 and 4 ranks, all with equal work"


def _mirrored(rank: int, ranks: int, length: int) -> list[int]:
    size = length // (2 * ranks)
    mirror = 2 * ranks - 1 - rank
    return [*range(rank * size, (rank + 1) * size), *range(mirror * size, (mirror + 1) * size)]


@exercise("2.7.3", "how many tokens travel?", returns=list)
def departures(answer: Answer) -> str:
    import torch

    for table, experts, ranks in (
        ([[0, 1], [2, 3], [0, 3], [3, 1]], 4, 2),
        ([[0, 5], [5, 4], [1, 6], [6, 6], [2, 5]], 6, 3),
        ([[6, 6], [7, 8]], 8, 4),
    ):
        choices = torch.tensor(table)
        per = experts // ranks
        right = [
            int(((choices >= r * per) & (choices < min((r + 1) * per, experts))).sum()) for r in range(ranks)
        ]
        got = [int(count) for count in answer(choices.clone(), experts, ranks)]
        if got == right:
            continue
        what = f"got {got}, not {right}, for experts {table} of {experts} on {ranks} ranks"
        if len(got) != ranks:
            raise NotYet(
                what, "one number for each rank, not for each expert", f"a rank has {per} experts here"
            )
        if sum(got) == choices.numel() and experts in choices:
            raise NotYet(
                what,
                f"expert number {experts} is nobody: such a pair stays at home and takes no part",
                "drop it before you count",
            )
        by_turns = [int(((choices % ranks == r) & (choices < experts)).sum()) for r in range(ranks)]
        if got == by_turns:
            raise NotYet(
                what,
                "that deals experts out by turns",
                f"rank 0 holds experts 0 to {per - 1}, the next rank the next ones",
            )
        if sum(got) < sum(right):
            raise NotYet(
                what,
                "count every (token, choice) pair: a token with two experts travels twice",
                "even if both are on one rank",
            )
        raise NotYet(what, "which rank holds expert x?", "x // (experts on a rank)")
    return "full, dropped and one-sided choices"
