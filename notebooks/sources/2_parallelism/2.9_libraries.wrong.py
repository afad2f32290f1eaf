# Plausible wrong answers to the exercises of 2.9_libraries.py, each with the hint that it must earn.


# %% exercise="2.9.1" hint="that is Shard(0)"
def rows_of_rank(heads: int, width: int, parts: int, ranks: int, rank: int) -> list[int]:
    each = parts * heads * width // ranks
    return list(range(rank * each, (rank + 1) * each))


# %% exercise="2.9.1" hint="of each part"
def rows_of_rank(heads: int, width: int, parts: int, ranks: int, rank: int) -> list[int]:
    mine = heads // ranks * width
    return list(range(rank * mine, (rank + 1) * mine))


# %% exercise="2.9.1" hint="a head has `width` rows"
def rows_of_rank(heads: int, width: int, parts: int, ranks: int, rank: int) -> list[int]:
    mine = heads // ranks
    return [part * heads + rank * mine + i for part in range(parts) for i in range(mine)]


# %% exercise="2.9.1" hint="whole heads"
def rows_of_rank(heads: int, width: int, parts: int, ranks: int, rank: int) -> list[int]:
    return [row for row in range(parts * heads * width) if row % ranks == rank]


# %% exercise="2.9.2" hint="the wrong way round"
def undo(ranks: int, micro_batches: int, over_ranks: bool, over_micro_batches: bool) -> float:
    return 1.0 / ((ranks if over_ranks else 1) * (micro_batches if over_micro_batches else 1))


# %% exercise="2.9.2" hint="whatever the library does"
def undo(ranks: int, micro_batches: int, over_ranks: bool, over_micro_batches: bool) -> float:
    return float(ranks * micro_batches)


# %% exercise="2.9.2" hint="both divisions"
def undo(ranks: int, micro_batches: int, over_ranks: bool, over_micro_batches: bool) -> float:
    return float(ranks if over_ranks else 1)


# %% exercise="2.9.3" hint="neither of the two"
def own_groups(blocks: list[list[str]]) -> list[int]:
    seen: set[str] = set()
    found = []
    for index, names in enumerate(blocks):
        if names and not seen & set(names):
            found.append(index)
        seen |= set(names)
    return found


# %% exercise="2.9.3" hint="not only neighbours"
def own_groups(blocks: list[list[str]]) -> list[int]:
    found = []
    for index, names in enumerate(blocks):
        near = blocks[max(0, index - 1) : index] + blocks[index + 1 : index + 2]
        if names and not any(set(names) & set(other) for other in near):
            found.append(index)
    return found


# %% exercise="2.9.3" hint="nothing to divide"
def own_groups(blocks: list[list[str]]) -> list[int]:
    return [
        index
        for index, names in enumerate(blocks)
        if not any(set(names) & set(o) for j, o in enumerate(blocks) if j != index)
    ]
