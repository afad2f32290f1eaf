"""Trees: few steps, and in segments also full speed.

A binary tree needs about log2(n) steps, but half of the ranks are leaves that send nothing downwards. Two
trees, in which the leaves of one are the inner nodes of the other, each with half of the payload, keep all
ranks busy (Sanders, Speck, Träff, Parallel Computing 35, 2009; the double binary tree of NCCL 2.4).
"""

from collections.abc import Sequence

from fmlab.collectives.schedule import Send, Steps, mirror, then, together

Parents = dict[int, int | None]  # rank -> its parent; None: the root


def binary_tree(n: int) -> Parents:
    """A tree over 0..n-1 with root 0 whose leaves are the odd numbers (and the last, if it has no child).

    The parent of a number clears its lowest bit that is set and sets the next higher one, or does not set it
    where that number does not exist.
    """
    parents: Parents = {0: None}
    for rank in range(1, n):
        low = rank & -rank
        up = (rank ^ low) | (low << 1)
        parents[rank] = up if up < n else rank ^ low
    return parents


def second_tree(n: int) -> Parents:
    """The same tree with ranks renamed so that odd and even change places: mirrored, or shifted by one."""
    rename = [n - 1 - rank if n % 2 == 0 else (rank + 1) % n for rank in range(n)]
    return {
        rename[rank]: None if parent is None else rename[parent] for rank, parent in binary_tree(n).items()
    }


def renamed(parents: Parents, names: Sequence[int]) -> Parents:
    """The tree with rank r called names[r]."""
    return {names[rank]: None if up is None else names[up] for rank, up in parents.items()}


def depths(parents: Parents) -> dict[int, int]:
    """Steps from the root, by rank."""
    found: dict[int, int] = {}

    def depth(rank: int) -> int:
        if rank not in found:
            parent = parents[rank]
            found[rank] = 0 if parent is None else depth(parent) + 1
        return found[rank]

    for rank in parents:
        depth(rank)
    return found


# region tree
def tree_broadcast(parents: Parents, segments: Sequence[int]) -> Steps:
    """From the root of the tree. Segment k leaves the root in step k, and moves one level down in a step."""
    depth = depths(parents)
    steps: Steps = [[] for _ in range(len(segments) + max(depth.values()) - 1)]
    for rank, parent in parents.items():
        if parent is not None:
            for k, segment in enumerate(segments):
                steps[k + depth[rank] - 1].append(Send(parent, rank, (segment,)))
    return steps


def tree_all_reduce(parents: Parents, segments: Sequence[int]) -> Steps:
    """Up the tree with additions, down again with copies; later segments climb while earlier ones descend."""
    height = max(depths(parents).values())
    down = [tree_broadcast(parents, [segment]) for segment in segments]
    whole = [then(mirror(one), one) for one in down]
    late: list[Steps] = [[[] for _ in range(k)] + steps for k, steps in enumerate(whole)]
    assert all(len(steps) == 2 * height for steps in whole)
    return together(late)


# endregion


def two_trees_all_reduce(n: int, segments: int) -> Steps:
    """Even segments over one tree, odd ones over the other."""
    trees = (binary_tree(n), second_tree(n))
    return together(tree_all_reduce(tree, range(which, segments, 2)) for which, tree in enumerate(trees))


def two_trees_broadcast(root: int, others: Sequence[int], segments: int) -> Steps:
    """The root feeds two trees over the other ranks, one segment to each in turn."""
    phases = []
    for which, tree in enumerate((binary_tree(len(others)), second_tree(len(others)))):
        parents = renamed(tree, others)
        top = next(rank for rank, parent in parents.items() if parent is None)
        phases.append(tree_broadcast({root: None, **parents, top: root}, range(which, segments, 2)))
    return together(phases)
