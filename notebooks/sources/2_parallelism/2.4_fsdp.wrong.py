# Plausible wrong answers to the exercises of 2.4_fsdp.py, each with the hint that it must earn.


# %% exercise="2.4.1" hint="as even as possible is another way"
def rows_of(rows: int, ranks: int, rank: int) -> range:
    size, more = divmod(rows, ranks)
    start = rank * size + min(rank, more)
    return range(start, start + size + (rank < more))


# %% exercise="2.4.1" hint="some rows are on no rank"
def rows_of(rows: int, ranks: int, rank: int) -> range:
    size = rows // ranks
    return range(rank * size, (rank + 1) * size)


# %% exercise="2.4.1" hint="there are no such rows"
def rows_of(rows: int, ranks: int, rank: int) -> range:
    size = -(-rows // ranks)
    return range(rank * size, (rank + 1) * size)


# %% exercise="2.4.1" hint="every row belongs to one rank"
def rows_of(rows: int, ranks: int, rank: int) -> range:
    return range(rank, rows, ranks)


# %% exercise="2.4.2" hint="its backward pass comes next"
def step_of(blocks: int) -> list[tuple[str, int]]:
    forward = [(what, i) for i in range(blocks) for what in ("gather", "free")]
    return forward + [
        (what, i) for i in reversed(range(blocks)) for what in ("gather", "reduce", "free")
    ]


# %% exercise="2.4.2" hint="needs the weights too"
def step_of(blocks: int) -> list[tuple[str, int]]:
    forward = [(what, i) for i in range(blocks) for what in ("gather", "free")]
    return (
        forward[:-1] + [("reduce", i) for i in reversed(range(blocks))] + [("free", blocks - 1)]
    )


# %% exercise="2.4.2" hint="which block does the backward pass reach first?"
def step_of(blocks: int) -> list[tuple[str, int]]:
    forward = [(what, i) for i in range(blocks) for what in ("gather", "free")]
    return forward[:-1] + [
        (what, i) for i in range(blocks) for what in ("gather", "reduce", "free")
    ]


# %% exercise="2.4.2" hint="all blocks would be whole at once"
def step_of(blocks: int) -> list[tuple[str, int]]:
    forward = [("gather", i) for i in range(blocks)]
    return forward + [(what, i) for i in reversed(range(blocks)) for what in ("reduce", "free")]


# %% exercise="2.4.3" hint="must divide the number of ranks"
def ranks_of_a_copy(parameters: float, largest: float, ranks: int, memory: float) -> int:
    for shards in range(1, ranks + 1):
        if 16 * parameters / shards + 4 * largest <= memory:
            return shards
    return 0


# %% exercise="2.4.3" hint="the largest unit is there beside the shard"
def ranks_of_a_copy(parameters: float, largest: float, ranks: int, memory: float) -> int:
    for shards in range(1, ranks + 1):
        if ranks % shards == 0 and 16 * parameters / shards <= memory:
            return shards
    return 0


# %% exercise="2.4.3" hint="a smaller number is enough"
def ranks_of_a_copy(parameters: float, largest: float, ranks: int, memory: float) -> int:
    return ranks if 16 * parameters / ranks + 4 * largest <= memory else 0


# %% exercise="2.4.3" hint="it never fits"
def ranks_of_a_copy(parameters: float, largest: float, ranks: int, memory: float) -> int:
    for shards in range(1, ranks + 1):
        if ranks % shards == 0 and 16 * parameters / shards + 4 * largest <= memory:
            return shards
    return ranks
