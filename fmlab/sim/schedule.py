"""Pipeline schedules as data: what each stage does, in which order.

A schedule is one list of actions (fmlab.sim.actions) a stage. It says nothing about time: dependencies and
durations do, in a replay, and idle time (the bubble) comes out of it. The simulator draws these lists, and
fmlab.parallel.pipeline runs them.

Sources: GPipe, Huang et al. 2019, arXiv:1811.06965, section 2.3; 1F1B and its interleaved form, Narayanan et
al. 2021, arXiv:2104.04473, section 2.2; the zero-bubble schedules, which split the backward pass, are in
fmlab.sim.zero_bubble.
"""

from collections.abc import Sequence

from fmlab.sim import zero_bubble
from fmlab.sim.actions import Action, Direction, model_chunk, most_in_flight, place, source_of
from fmlab.sim.replay import Replay, Task, replay

__all__ = [
    "SCHEDULES",
    "SPLIT_BACKWARD",
    "Action",
    "bubble_formula",
    "check_schedule",
    "model_chunk",
    "most_in_flight",
    "place",
    "replay_schedule",
    "schedule",
    "source_of",
]

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv")
SPLIT_BACKWARD = ("zb-h1", "zbv")


def schedule(kind: str, stages: int, micro_batches: int, virtual_stages: int = 1) -> list[list[Action]]:
    """The actions of each stage. Raises ValueError, with the legal values, for what cannot run.

    kind:           "gpipe": all forward, then all backward; needs memory for every micro-batch.
                    "1f1b": one forward, one backward, after a warm-up of stages - 1 - s forwards.
                    "interleaved": 1f1b over several chunks a stage, which makes the bubble virtual_stages
                    times smaller and the messages virtual_stages times as many.
                    "zb-h1": 1f1b whose gradients of weights wait, and fill the bubble.
                    "zbv": two chunks a stage in the shape of a V; no bubble but that of the first
                    micro-batch on its way.

    Fewer micro-batches than stages run, with a larger bubble ("interleaved" needs whole groups of them).
    """
    check_schedule(kind, stages, micro_batches, virtual_stages)
    if kind in SPLIT_BACKWARD:
        return zero_bubble.ORDERS[kind](stages, micro_batches)
    if kind == "gpipe":
        one = [Action(d, i) for d in ("forward", "backward") for i in range(micro_batches)]
        return [list(one) for _ in range(stages)]
    if kind == "1f1b":
        forward = [Action("forward", i) for i in range(micro_batches)]
        backward = [Action("backward", i) for i in range(micro_batches)]
        return [_one_by_one(forward, backward, stages - 1 - stage) for stage in range(stages)]
    forward, backward = _interleaved_order(stages, micro_batches, virtual_stages)
    return [
        _one_by_one(forward, backward, 2 * (stages - 1 - stage) + (virtual_stages - 1) * stages)
        for stage in range(stages)
    ]


def check_schedule(kind: str, stages: int, micro_batches: int, virtual_stages: int = 1) -> None:
    """Raise ValueError, with the legal values, for a schedule that cannot run."""
    if kind not in SCHEDULES:
        raise ValueError(f"schedule {kind!r} is unknown; the schedules are: {', '.join(SCHEDULES)}")
    sizes = {"stages": stages, "micro_batches": micro_batches, "virtual_stages": virtual_stages}
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r}: give a whole number, 1 or more")
    if kind == "zbv":
        if virtual_stages != 2:
            raise ValueError(
                f"schedule 'zbv' has 2 chunks a stage, got virtual_stages={virtual_stages}; set "
                "virtual_stages=2, or schedule='zb-h1' for one chunk a stage"
            )
        return
    if kind != "interleaved":
        if virtual_stages != 1:
            raise ValueError(
                f"virtual_stages={virtual_stages} with schedule {kind!r}, which has one chunk a stage; "
                "set schedule='interleaved' or virtual_stages=1"
            )
        return
    if virtual_stages == 1 or stages == 1:
        raise ValueError(
            f"schedule 'interleaved' with virtual_stages={virtual_stages} and {stages} stages interleaves "
            "nothing; give at least 2 of each, or schedule='1f1b'"
        )
    if micro_batches % stages:
        below = micro_batches // stages * stages
        legal = [n for n in (below, below + stages) if n]
        raise ValueError(
            f"schedule 'interleaved' walks through micro-batches in groups of {stages} (the stages), so "
            f"micro_batches={micro_batches} is illegal; use {' or '.join(map(str, legal))}, "
            "or schedule='1f1b'"
        )


def _one_by_one(forward: Sequence[Action], backward: Sequence[Action], ahead: int) -> list[Action]:
    """Warm up with `ahead` forwards, then alternate, then drain."""
    ahead = min(ahead, len(forward))
    actions = list(forward[:ahead])
    for f, b in zip(forward[ahead:], backward, strict=False):
        actions += [f, b]
    return actions + list(backward[len(forward) - ahead :])


def _interleaved_order(stages: int, micro_batches: int, chunks: int) -> tuple[list[Action], list[Action]]:
    """Each group of `stages` micro-batches passes chunk 0, then chunk 1, …; backward from the last chunk."""
    forward, backward = [], []
    for first in range(0, micro_batches, stages):
        for chunk in range(chunks):
            group = range(first, first + stages)
            forward += [Action("forward", i, chunk) for i in group]
            backward += [Action("backward", i, chunks - 1 - chunk) for i in group]
    return forward, backward


def bubble_formula(
    stages: int,
    micro_batches: int,
    virtual_stages: int = 1,
    kind: str = "1f1b",
    forward: float = 1.0,
    backward: float = 2.0,
    weight: float = 1.0,
) -> float:
    """The share of a step that a stage idles, if all stages are alike and messages take no time.

    (p-1) / (v m + p-1) for GPipe and 1F1B (v=1) and interleaved (Narayanan et al. 2021, section 2.2),
    whatever the times of passes. With p stages and m micro-batches, at least as many, the idle time is

        zb-h1   (p-1) (F + B - W)         Qi et al. 2023, arXiv:2401.10241, table 2; B without W
        zbv     (p-1) F / 2               while F = B = W: until the first micro-batch, half a stage at a
                                          time, has come down to the last stage (it counts as no bubble in
                                          the paper, whose stages start the next step at different times)

    forward, backward, weight: F, B + W and W of a micro-batch through a whole stage.
    """
    if kind not in SPLIT_BACKWARD:
        return (stages - 1) / (virtual_stages * micro_batches + stages - 1)
    idle = (stages - 1) * (forward + backward - 2 * weight if kind == "zb-h1" else forward / 2)
    return idle / (micro_batches * (forward + backward) + idle)


def replay_schedule(
    actions: Sequence[Sequence[Action]],
    forward: float = 1.0,
    backward: float = 2.0,
    send: float = 0.0,
    weight: float | None = None,
    kind: str = "1f1b",
) -> Replay:
    """Replay a schedule whose stages are all alike, times in any unit.

    forward, backward: of one micro-batch through one whole stage (a chunk takes 1 / virtual_stages of it).
    send: of one message between stages; it delays the receiver, not the sender.
    weight: the part of `backward` that the gradients of weights take, where the schedule splits it (default:
    half). kind: "zbv" says that chunks lie in the shape of a V.
    """
    stages, chunks = len(actions), 1 + max((a.chunk for stage in actions for a in stage), default=0)
    weight = backward / 2 if weight is None else weight
    if not 0 <= weight <= backward:
        raise ValueError(f"weight={weight} is a part of backward={backward}: give 0 to {backward}")
    times = {"forward": forward, "backward": backward, "input": backward - weight, "weight": weight}
    flat = [(stage, action) for stage, todo in enumerate(actions) for action in todo]
    at = {key: 2 * i for i, key in enumerate(flat)}  # each action is followed by its message
    tasks = []
    for stage, action in flat:
        after: tuple[int, ...] = ()
        if (source := source_of(action, stage, stages, chunks, kind)) is not None:
            if source not in at:
                raise ValueError(
                    f"stage {stage}: {action} needs {source[1]} of stage {source[0]}, which is missing"
                )
            after = (at[source] + (source[0] != stage),)  # from the stage itself there is no message
        if action.direction != "forward":
            before: Direction = "input" if action.direction == "weight" else "forward"
            own = (stage, Action(before, action.micro_batch, action.chunk))
            if own not in at:
                raise ValueError(f"stage {stage}: {action} without its {before} pass")
            after += (at[own],)
        tasks.append(
            Task(
                str(action),
                times[action.direction] / chunks,
                ((stage, "compute"),),
                after,
                kind=action.direction,
            )
        )
        lane = (stage, f"send {action.direction}")
        tasks.append(Task(f"send {action}", send, (lane,), (at[stage, action],), kind="pipeline"))
    return replay(tasks)
