"""Everybody straight to everybody: the fewest steps, and many messages at once."""

from collections.abc import Sequence

from fmlab.collectives.schedule import Send, Steps


def direct_all_gather(members: Sequence[int], blocks: Sequence[Sequence[int]]) -> Steps:
    """One step: members[i] sends blocks[i] to all others. On a full mesh every link is used once."""
    return [
        [
            Send(source, other, tuple(block))
            for source, block in zip(members, blocks, strict=True)
            for other in members
            if other != source
        ]
    ]


def one_shot_all_reduce(n: int) -> Steps:
    """One step: everybody sends its whole payload to all others, and adds up what arrives."""
    return [[Send(a, b, (0,), reduce=True) for a in range(n) for b in range(n) if a != b]]


def direct_broadcast(root: int, n: int) -> Steps:
    """One step: the root sends everything to each other rank."""
    return [[Send(root, rank, (0,)) for rank in range(n) if rank != root]]


def direct_all_to_all(n: int) -> Steps:
    """One step with all n (n - 1) messages. Chunk s * n + d goes from s to d."""
    return [[Send(s, d, (s * n + d,)) for s in range(n) for d in range(n) if s != d]]


def pairwise_all_to_all(n: int) -> Steps:
    """n - 1 steps: in step k rank r sends to r + k, so that each receives from one rank at a time."""
    return [[Send(s, (s + k) % n, (s * n + (s + k) % n,)) for s in range(n)] for k in range(1, n)]


def bruck_all_to_all(n: int) -> Steps:
    """log2(n) steps: a chunk that has to go k ranks further moves by the bits of k, relayed by others.

    About log2(n) / 2 times the bytes of the direct way, for log2(n) instead of n - 1 messages of a rank
    (Bruck et al., IEEE TPDS 8, 1997).
    """
    steps: Steps = []
    bit = 1
    while bit < n:
        carried: dict[int, list[int]] = {rank: [] for rank in range(n)}
        for source in range(n):
            for way in range(n):
                if way & bit:
                    carried[(source + way % bit) % n].append(source * n + (source + way) % n)
        steps.append([Send(r, (r + bit) % n, tuple(sorted(c))) for r, c in carried.items() if c])
        bit *= 2
    return steps
