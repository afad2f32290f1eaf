"""Recursive doubling and halving: log2(n) steps, and no byte more than a ring sends."""

from fmlab.collectives.schedule import Send, Steps


# region doubling
def doubling_all_gather(n: int, parts: int = 1) -> Steps:
    """What a rank holds doubles in each step. Chunks of rank r are r * parts ... r * parts + parts - 1.

    n a power of two: exchange all you have with the rank whose number differs in one bit. Any other n: send
    it 1, 2, 4, ... ranks back, the last time only what is still missing there (Bruck et al., IEEE TPDS 8,
    1997; backwards, as reduce-scatter: Träff, arXiv:2410.14234). ceil(log2 n) steps for every n.
    """
    steps: Steps = []
    have = 1  # blocks that each rank holds
    while have < n:
        moved = min(have, n - have)
        step = []
        for rank in range(n):
            if n & (n - 1) == 0:
                first = rank - rank % have
                destination, held = rank ^ have, list(range(first, first + have))
            else:
                destination, held = (rank - have) % n, [(rank + k) % n for k in range(moved)]
            chunks = sorted(block * parts + part for block in held for part in range(parts))
            step.append(Send(rank, destination, tuple(chunks)))
        steps.append(step)
        have += moved
    return steps


# endregion


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
