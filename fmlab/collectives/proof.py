"""A proof without ranks: what each rank holds after a schedule, as sets of contributions.

Every rank begins with its own contribution to some chunks. A message moves sets instead of numbers. A
schedule is right if at the end each rank holds what its collective promises, with every contribution in it
exactly once: an addition of overlapping sets would count a rank twice.
"""

from collections.abc import Iterator

from fmlab.collectives.schedule import Schedule, Send

State = list[dict[int, int]]  # rank -> chunk -> contributions, one bit for each rank


class ScheduleError(ValueError):
    """A schedule that does not do what its collective promises, with the step and the message."""


def prove(plan: Schedule) -> None:
    """Raise ScheduleError unless `plan` delivers every contribution exactly once, to all who need it."""
    state = initial(plan)
    for number, step in enumerate(plan.steps, start=1):
        try:
            play(plan, state, step)
        except ScheduleError as error:
            raise ScheduleError(f"{plan.collective} by {plan.algorithm}, step {number}: {error}") from None
    for rank, chunk, wanted in goal(plan):
        got = state[rank].get(chunk, 0)
        if got != wanted:
            raise ScheduleError(
                f"{plan.collective} by {plan.algorithm}: at the end chunk {chunk} of rank {rank} holds the "
                f"contributions of {ranks_of(got)}, not of {ranks_of(wanted)}"
            )


# region play
def play(plan: Schedule, state: State, step: tuple[Send, ...]) -> None:
    """One step on `state`, in place: all messages leave before any arrives."""
    leaving = [(send, [_held(state, send, chunk) for chunk in send.chunks]) for send in step]
    written: set[tuple[int, int]] = set()
    for send, contents in leaving:
        mine = state[send.destination]
        for chunk, content in zip(send.chunks, contents, strict=True):
            if send.reduce:
                if mine.get(chunk, 0) & content and plan.collective != "barrier":
                    twice = ranks_of(mine[chunk] & content)
                    raise ScheduleError(f"{send}: the contribution of {twice} would count twice")
                mine[chunk] = mine.get(chunk, 0) | content
            elif (send.destination, chunk) in written:
                raise ScheduleError(f"{send}: another message of this step writes the same chunk")
            else:
                mine[chunk] = content
            if not send.reduce:
                written.add((send.destination, chunk))


# endregion


def _held(state: State, send: Send, chunk: int) -> int:
    if send.source == send.destination:
        raise ScheduleError(f"{send}: a rank sends to itself")
    if chunk not in state[send.source]:
        raise ScheduleError(f"{send}: rank {send.source} does not hold chunk {chunk}")
    return state[send.source][chunk]


def initial(plan: Schedule) -> State:
    """What each rank holds before the first step."""
    state: State = [{} for _ in range(plan.n)]
    for rank in range(plan.n):
        state[rank] = dict.fromkeys(_own(plan, rank), 1 << rank)
    return state


def _own(plan: Schedule, rank: int) -> range:
    block = plan.chunks // plan.n
    if plan.collective in ("all_gather", "all_to_all"):
        return range(rank * block, (rank + 1) * block)
    if plan.collective == "broadcast":
        return range(plan.chunks if rank == plan.root else 0)
    return range(plan.chunks)


def goal(plan: Schedule) -> Iterator[tuple[int, int, int]]:
    """(rank, chunk, contributions) that the collective promises."""
    everybody, block = (1 << plan.n) - 1, max(plan.chunks // plan.n, 1)
    for rank in range(plan.n):
        if plan.collective == "reduce_scatter":
            yield from ((rank, c, everybody) for c in range(rank * block, (rank + 1) * block))
        elif plan.collective == "all_to_all":
            yield from ((rank, s * plan.n + rank, 1 << s) for s in range(plan.n))
        elif plan.collective == "reduce":
            yield from ((rank, c, everybody) for c in range(plan.chunks) if rank == plan.root)
        else:
            owner = {"all_gather": lambda c: 1 << (c // block), "broadcast": lambda _: 1 << plan.root}
            wanted = owner.get(plan.collective, lambda _: everybody)
            yield from ((rank, c, wanted(c)) for c in range(plan.chunks))


def ranks_of(bits: int) -> str:
    """As in "ranks 0, 3"."""
    ranks = [str(rank) for rank in range(bits.bit_length()) if bits >> rank & 1]
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(ranks)}" if ranks else "nobody"
