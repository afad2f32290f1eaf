# Plausible wrong answers to the exercises of 2.10_failures.py, each with the hint that it must earn.


# %% exercise="2.10.1" hint="all lists are equally long"
def culprits(calls: list[list[str]]) -> list[int]:
    longest = max(map(len, calls))
    return [rank for rank, mine in enumerate(calls) if len(mine) < longest]


# %% exercise="2.10.1" hint="earlier place than the last"
def culprits(calls: list[list[str]]) -> list[int]:
    longest = max(map(len, calls))
    did = [mine[-1] if len(mine) == longest else "" for mine in calls]
    right = max(set(did), key=lambda one: (did.count(one), one != "", -did.index(one)))
    return [rank for rank, one in enumerate(did) if one != right]


# %% exercise="2.10.1" hint="you blamed the other side"
def culprits(calls: list[list[str]]) -> list[int]:
    for place in range(len(calls[0])):
        did = [mine[place] if place < len(mine) else "" for mine in calls]
        if len(set(did)) > 1:
            return [rank for rank, one in enumerate(did) if one != did[0]]
    return []


# %% exercise="2.10.1" hint="whose list has ended did nothing"
def culprits(calls: list[list[str]]) -> list[int]:
    for did in zip(*calls):
        if len(set(did)) > 1:
            right = max(set(did), key=lambda one: (did.count(one), -did.index(one)))
            return [rank for rank, one in enumerate(did) if one != right]
    return []


# %% exercise="2.10.2" hint="all need the same number"
def batches_of(rows: int, ranks: int, size: int, rank: int) -> list[list[int]]:
    mine = list(range(rank, rows, ranks))
    padded = mine + [-1] * (-len(mine) % size)
    return [padded[first : first + size] for first in range(0, len(padded), size)]


# %% exercise="2.10.2" hint="the last ones too"
def batches_of(rows: int, ranks: int, size: int, rank: int) -> list[list[int]]:
    steps = rows // (ranks * size)
    firsts = [(step * ranks + rank) * size for step in range(steps)]
    return [list(range(first, first + size)) for first in firsts]


# %% exercise="2.10.2" hint="start again from row 0"
def batches_of(rows: int, ranks: int, size: int, rank: int) -> list[list[int]]:
    steps = -(-rows // (ranks * size))
    firsts = [(step * ranks + rank) * size for step in range(steps)]
    return [[i % rows for i in range(first, first + size)] for first in firsts]


# %% exercise="2.10.2" hint="another size is another shape"
def batches_of(rows: int, ranks: int, size: int, rank: int) -> list[list[int]]:
    steps = -(-rows // (ranks * size))
    firsts = [(step * ranks + rank) * size for step in range(steps)]
    return [[i for i in range(first, first + size) if i < rows] for first in firsts]


# %% exercise="2.10.3" hint="more chips fail more often"
def steps_between(
    failures: int, hours: float, chips: int, planned: int, stop: float, step: float
) -> int:
    between = hours * 3600 / failures
    return max(1, round(math.sqrt(2 * stop * between) / step))


# %% exercise="2.10.3" hint="the wrong way round"
def steps_between(
    failures: int, hours: float, chips: int, planned: int, stop: float, step: float
) -> int:
    between = hours * 3600 / failures * planned / chips
    return max(1, round(math.sqrt(2 * stop * between) / step))


# %% exercise="2.10.3" hint="not steps"
def steps_between(
    failures: int, hours: float, chips: int, planned: int, stop: float, step: float
) -> int:
    between = hours * 3600 / failures * chips / planned
    return max(1, round(math.sqrt(2 * stop * between)))


# %% exercise="2.10.3" hint="hours and seconds"
def steps_between(
    failures: int, hours: float, chips: int, planned: int, stop: float, step: float
) -> int:
    between = hours / failures * chips / planned
    return max(1, round(math.sqrt(2 * stop * between) / step))


# %% exercise="2.10.3" hint="at least 1"
def steps_between(
    failures: int, hours: float, chips: int, planned: int, stop: float, step: float
) -> int:
    between = hours * 3600 / failures * chips / planned
    return round(math.sqrt(2 * stop * between) / step)
