"""Pipeline schedules as data: what each stage does, in which order.

A model is cut into stages * virtual_stages chunks; chunk c of a stage s is the model's chunk c * stages + s.
A schedule is one list of actions a stage. It says nothing about time: dependencies and durations do, in a
replay, and idle time (the bubble) comes out of it.

Sources: GPipe, Huang et al. 2019, arXiv:1811.06965, section 2.3; 1F1B and its interleaved form, Narayanan et
al. 2021, arXiv:2104.04473, section 2.2.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fmlab.sim.replay import Replay, Task, replay

SCHEDULES = ("gpipe", "1f1b", "interleaved")


@dataclass(frozen=True, slots=True)
class Action:
    """One pass of one micro-batch through one chunk of a stage."""

    direction: Literal["forward", "backward"]
    micro_batch: int
    chunk: int = 0  # of this stage: 0..virtual_stages-1

    def __str__(self) -> str:
        return f"{'F' if self.direction == 'forward' else 'B'}{self.micro_batch}" + (
            f".{self.chunk}" if self.chunk else ""
        )


def schedule(kind: str, stages: int, micro_batches: int, virtual_stages: int = 1) -> list[list[Action]]:
    """The actions of each stage. Raises ValueError, with the legal values, for what cannot run.

    kind:           "gpipe": all forward, then all backward; needs memory for every micro-batch.
                    "1f1b": one forward, one backward, after a warm-up of stages - 1 - s forwards.
                    "interleaved": 1f1b over several chunks a stage, which makes the bubble virtual_stages
                    times smaller and the messages virtual_stages times as many.
    """
    check_schedule(kind, stages, micro_batches, virtual_stages)
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


def bubble_formula(stages: int, micro_batches: int, virtual_stages: int = 1) -> float:
    """The share of a step that a stage idles, if all passes take equally long and messages no time.

    (p-1) / (v m + p-1): Narayanan et al. 2021, section 2.2; v=1 for GPipe and 1F1B.
    """
    return (stages - 1) / (virtual_stages * micro_batches + stages - 1)


def most_in_flight(actions: Sequence[Action]) -> int:
    """The most passes (micro-batch, chunk) whose activations a stage holds at once."""
    now = most = 0
    for action in actions:
        now += 1 if action.direction == "forward" else -1
        most = max(most, now)
    return most


def source_of(action: Action, stage: int, stages: int, chunks: int) -> tuple[int, Action] | None:
    """The stage and action whose result this one needs; None at either end of the model."""
    step = -1 if action.direction == "forward" else 1
    chunk, other = action.chunk, stage + step
    if not 0 <= other < stages:  # around the ring of stages, into another chunk
        chunk, other = chunk + step, other % stages
    if not 0 <= chunk < chunks:
        return None
    return other, Action(action.direction, action.micro_batch, chunk)


def replay_schedule(
    actions: Sequence[Sequence[Action]], forward: float = 1.0, backward: float = 2.0, send: float = 0.0
) -> Replay:
    """Replay a schedule whose stages are all alike, times in any unit.

    forward, backward: of one micro-batch through one whole stage (a chunk takes 1 / virtual_stages of it).
    send: of one message between stages; it delays the receiver, not the sender.
    """
    stages, chunks = len(actions), 1 + max((a.chunk for stage in actions for a in stage), default=0)
    flat = [(stage, action) for stage, todo in enumerate(actions) for action in todo]
    at = {key: 2 * i for i, key in enumerate(flat)}  # each action is followed by its message
    tasks = []
    for stage, action in flat:
        after: tuple[int, ...] = ()
        if (source := source_of(action, stage, stages, chunks)) is not None:
            if source not in at:
                raise ValueError(
                    f"stage {stage}: {action} needs {source[1]} of stage {source[0]}, which is missing"
                )
            after = (at[source] + 1,)
        if action.direction == "backward":
            own = (stage, Action("forward", action.micro_batch, action.chunk))
            if own not in at:
                raise ValueError(f"stage {stage}: {action} without its forward pass")
            after += (at[own],)
        seconds = (forward if action.direction == "forward" else backward) / chunks
        tasks.append(Task(str(action), seconds, ((stage, "compute"),), after, kind=action.direction))
        lane = (stage, f"send {action.direction}")
        tasks.append(Task(f"send {action}", send, (lane,), (at[stage, action],), kind="pipeline"))
    return replay(tasks)
