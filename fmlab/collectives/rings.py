"""Rings: each rank talks to its neighbours only. The fewest bytes, and as many steps as there are ranks."""

from collections.abc import Sequence

from fmlab.collectives.schedule import Send, Steps, mirror, together

Chunks = Sequence[int]


# region ring
def ring_all_gather(members: Sequence[int], blocks: Sequence[Chunks], way: int = 1) -> Steps:
    """Rank members[i] begins with blocks[i]; after n - 1 steps all have all.

    In each step every rank passes on, clockwise (way 1) or not (-1), what it received in the step before.
    """
    n = len(members)
    return [
        [Send(members[i], members[(i + way) % n], tuple(blocks[(i - way * t) % n])) for i in range(n)]
        for t in range(n - 1)
    ]


def ring_reduce_scatter(members: Sequence[int], blocks: Sequence[Chunks], way: int = 1) -> Steps:
    """Each begins with all blocks; after n - 1 steps members[i] holds the sum of blocks[i]."""
    return mirror(ring_all_gather(members, blocks, -way))


# endregion


def both_ways(members: Sequence[int], blocks: Sequence[Chunks], phase: str) -> Steps:
    """Half of each block runs clockwise, half the other way: both directions of every link are busy.

    phase: "all_gather" or "reduce_scatter".
    """
    build = ring_all_gather if phase == "all_gather" else ring_reduce_scatter
    halves = [
        [block[: len(block) // 2] for block in blocks],
        [block[len(block) // 2 :] for block in blocks],
    ]
    return together(build(members, half, way) for half, way in zip(halves, (1, -1), strict=True))


def chain_broadcast(members: Sequence[int], segments: int) -> Steps:
    """From members[0] along a line, in segments: each rank passes one on while it receives the next."""
    n = len(members)
    return [
        [Send(members[i], members[i + 1], (step - i,)) for i in range(n - 1) if 0 <= step - i < segments]
        for step in range(segments + n - 2)
    ]
