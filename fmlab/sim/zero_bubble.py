"""Pipeline schedules that split the backward pass, and fill the bubble with the half that can wait.

Behind a matrix product y = x W, the backward pass owes two products: the gradient of x (B), for which the
stage before waits, and that of W (W), which nobody needs before the optimizer: Qi et al. 2023,
arXiv:2401.10241, who have ZB-H1 among the schedules made by hand (section 2), and ZBV as the one that needs
no more memory than 1F1B.

Both are written down for enough micro-batches; with fewer, the actions of those that are missing are left
out, which takes nothing away that another action needs.
"""

from collections.abc import Callable, Iterator, Mapping

from fmlab.sim.actions import Action


def zb_h1(stages: int, micro_batches: int) -> list[list[Action]]:
    """1F1B in which stage s puts off its gradients of weights by s micro-batches.

    The later a stage is in the pipeline, the fewer forward passes it is ahead, so that no stage holds more
    than `stages` micro-batches: 1F1B's most.
    """
    return [list(_h1_stage(stage, stages, micro_batches)) for stage in range(stages)]


def _h1_stage(stage: int, stages: int, micro_batches: int) -> Iterator[Action]:
    ahead = min(stages - 1 - stage, micro_batches)
    for i in range(ahead):
        yield Action("forward", i)
    for i in range(micro_batches):
        if i + ahead < micro_batches:
            yield Action("forward", i + ahead)
        yield Action("input", i)
        if i >= stage:
            yield Action("weight", i - stage)
    for i in range(max(0, micro_batches - stage), micro_batches):
        yield Action("weight", i)


def zbv(stages: int, micro_batches: int) -> list[list[Action]]:
    """Two chunks a stage: the model goes down the stages (chunk 0) and up again (chunk 1).

    The first stage has the first and the last chunk, so that the first gradient comes back to where the
    first forward pass began, and every stage is fully at work from its first pass to its last.
    """
    enough = max(micro_batches, 2 * stages - 1)
    return [
        [action for action in _v_stage(stage, stages, enough) if action.micro_batch < micro_batches]
        for stage in range(stages)
    ]


def _v_stage(stage: int, stages: int, micro_batches: int) -> Iterator[Action]:
    below = stages - stage  # stages from here to the turn of the V, this one included
    count: dict[tuple[str, int], int] = {}

    def do(direction: str, chunk: int) -> Action:
        i = count.get((direction, chunk), 0)
        count[direction, chunk] = i + 1
        return Action(direction, i, chunk)  # type: ignore[arg-type]

    for _ in range(2 * below - 1):  # until the first micro-batch is back from the turn
        yield do("forward", 0)
    for _ in range(stage):  # until its gradient is
        yield from (do("forward", 1), do("forward", 0))
    for _ in range(below):
        yield from (do("forward", 1), do("input", 1), do("weight", 1))
    while count["forward", 1] < micro_batches:  # steady: a pass of each kind on each chunk
        if count["forward", 0] < micro_batches:
            yield do("forward", 0)
        yield from (do("input", 0), do("weight", 0))
        yield from (do("forward", 1), do("input", 1), do("weight", 1))
    for _ in range(stage):  # no more forward passes: gradients of inputs first, those of weights can wait
        yield from (do("input", 0), do("input", 1))
    for _ in range(below):
        yield from (do("input", 0), do("weight", 0))
    while count["weight", 1] < micro_batches:
        yield do("weight", 1)
    while count["weight", 0] < micro_batches:
        yield do("weight", 0)


ORDERS: Mapping[str, Callable[[int, int], list[list[Action]]]] = {"zb-h1": zb_h1, "zbv": zbv}
