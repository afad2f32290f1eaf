"""Recursive doubling and halving: log2(n) steps, and no byte more than a ring sends."""

from collections.abc import Iterator, Sequence

from fmlab.collectives.schedule import Send, Steps


# region doubling
def doubling_all_gather(members: Sequence[int], blocks: Sequence[Sequence[int]]) -> Steps:
    """Rank members[i] begins with blocks[i]; what a rank holds doubles in each of ceil(log2 n) steps.

    n a power of two: exchange all you have with the rank whose place differs in one bit. Any other n: send
    it 1, 2, 4, ... places back, the last time only what is still missing there (Bruck et al., IEEE TPDS 8,
    1997; backwards, as reduce-scatter: Träff, arXiv:2410.14234).
    """
    n, steps = len(members), []
    for have, moved in doubling_sizes(n):
        step = []
        for at in range(n):
            there = partner(at, have, n)
            held = [(at - at % have + k) if power_of_two(n) else (at + k) % n for k in range(moved)]
            chunks = sorted(chunk for block in held for chunk in blocks[block])
            step.append(Send(members[at], members[there], tuple(chunks)))
        steps.append(step)
    return steps


def doubling_sizes(n: int) -> Iterator[tuple[int, int]]:
    """Of each step: blocks that a rank holds before it, and blocks that it sends."""
    have = 1
    while have < n:
        moved = min(have, n - have)
        yield have, moved
        have += moved


def partner(at: int, have: int, n: int) -> int:
    """To whom a rank sends that holds so many blocks."""
    return at ^ have if power_of_two(n) else (at - have) % n


# endregion


def power_of_two(n: int) -> bool:
    return n & (n - 1) == 0


def dissemination(n: int) -> Steps:
    """A barrier: in step k each rank tells the rank 2^k further that all it has heard of are there.

    After ceil(log2 n) steps everybody has heard of everybody, some twice, which does no harm here
    (Hensgen, Finkel, Manber, Int. J. Parallel Programming 17, 1988).
    """
    steps: Steps = []
    distance = 1
    while distance < n:
        steps.append([Send(rank, (rank + distance) % n, (0,), reduce=True) for rank in range(n)])
        distance *= 2
    return steps
