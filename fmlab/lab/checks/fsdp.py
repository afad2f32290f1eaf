"""Checkers of notebook 2.4."""

from fmlab.lab.exercises import Answer, NotYet, exercise

#: rows, ranks
TABLES = ((5, 4), (8, 4), (131, 4), (3, 8), (1, 2), (7, 3))

#: parameters, of the largest unit, ranks, bytes of memory
MODELS = (
    (7e9, 0.25e9, 8, 80e9),
    (7e9, 0.25e9, 12, 24e9),
    (1e9, 0.1e9, 6, 4e9),
    (1e9, 0.5e9, 6, 5.5e9),
    (70e9, 1e9, 16, 40e9),
    (1e8, 1e7, 4, 80e9),
)


@exercise("2.4.1", "which rows?", returns=range)
def rows_of(answer: Answer) -> str:
    for rows, ranks in TABLES:
        size = -(-rows // ranks)
        right = [list(range(rows))[rank * size : (rank + 1) * size] for rank in range(ranks)]
        got = [list(answer(rows, ranks, rank)) for rank in range(ranks)]
        if got == right:
            continue
        what = f"got {got} for {rows} rows on {ranks} ranks"
        held = [row for shard in got for row in shard]
        if any(not 0 <= row < rows for row in held):
            raise NotYet(what, f"there are no such rows: the last is {rows - 1}", "cut both ends at `rows`")
        if missing := sorted(set(range(rows)) - set(held)):
            raise NotYet(
                what, f"some rows are on no rank: {missing[:3]}", "round the size of a chunk up, not down"
            )
        if any(shard != list(range(shard[0], shard[0] + len(shard))) for shard in got if shard):
            raise NotYet(
                what, "every row belongs to one rank, next to its neighbours", "a chunk is rows in a row"
            )
        if sorted(held) == list(range(rows)):
            raise NotYet(
                what,
                "as even as possible is another way to divide; here the first chunks are full",
                "the size of a full chunk is rows / ranks, rounded up",
            )
        raise NotYet(what, "some rows are on several ranks", "rank r begins at r times the size of a chunk")
    return "even, uneven and empty shards"


@exercise("2.4.2", "what is gathered when?", returns=list)
def step_of(answer: Answer) -> str:
    for blocks in (3, 1, 5):
        right = _step(blocks)
        got = [tuple(event) for event in answer(blocks)]
        if got != right:
            raise _wrong_step(got, blocks)
    return "one block, and several"


def _step(blocks: int) -> list[tuple[str, int]]:
    forward = [(what, i) for i in range(blocks) for what in ("gather", "free")]
    backward = [(what, i) for i in reversed(range(blocks)) for what in ("gather", "reduce", "free")]
    return forward[:-1] + backward[1:]


def _wrong_step(got: list[tuple[str, int]], blocks: int) -> NotYet:
    shown = " · ".join(f"{event[0]} {event[-1]}" for event in got) or "nothing"
    what = f"got for {blocks} blocks: {shown}"
    last, whole = blocks - 1, set[int]()
    reduced = [event[-1] for event in got if event[0] == "reduce"]
    if sorted(reduced) != list(range(blocks)):
        return NotYet(what, "every block's gradients are sent once", "one reduce for each block")
    if blocks > 1 and reduced != list(reversed(range(blocks))):
        return NotYet(
            what,
            "which block does the backward pass reach first?",
            "the backward pass goes from the last to the first",
        )
    if got.count(("gather", last)) > 1:
        return NotYet(
            what,
            "the last block is given back, although its backward pass comes next",
            f"gather {last} stands there once",
        )
    for kind, block in got:
        if kind == "gather":
            whole.add(block)
        elif kind == "free":
            whole.discard(block)
        elif block not in whole:
            return NotYet(
                what,
                f"block {block} has a backward pass without its parameters: it needs the weights too",
                "gather it again before its reduce",
            )
        if len(whole) > 1:
            return NotYet(
                what,
                "all blocks would be whole at once: then nothing is saved",
                "free a block after its forward pass, before the next is gathered",
            )
    return NotYet(
        what,
        "the order within a block is not that of the docstring",
        "forward: gather, free; backward: gather, reduce, free",
    )


@exercise("2.4.3", "how many copies?", returns=int)
def ranks_of_a_copy(answer: Answer) -> str:
    for parameters, largest, ranks, memory in MODELS:
        fits = [
            n for n in range(1, ranks + 1) if ranks % n == 0 and 16 * parameters / n + 4 * largest <= memory
        ]
        right = fits[0] if fits else 0
        got = answer(parameters, largest, ranks, memory)
        if got == right:
            continue
        what = f"got {got} for {parameters:g} parameters, {ranks} ranks of {memory / 1e9:g} GB"
        if got and ranks % got:
            raise NotYet(
                what, "the number must divide the number of ranks", f"{ranks} ranks are no copies of {got}"
            )
        if not right:
            raise NotYet(what, "it never fits: not even divided among all", "then the answer is 0")
        if got and got < right:
            raise NotYet(
                what,
                "the largest unit is there beside the shard, in bf16 and twice",
                "4 bytes for each of its parameters",
            )
        if got > right:
            raise NotYet(
                what, "a smaller number is enough", "try the numbers from 1 up, and stop at the first"
            )
        raise NotYet(what, "it fits, if enough ranks share a copy", "16 bytes a parameter, divided")
    return "one rank, some, all, and a model that does not fit"
