"""Where the time of a rank goes: computing, talking, waiting."""

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass

from fmlab.sim.replay import Replay
from fmlab.sim.step import Step

#: What `Usage` splits a step into, in the order of its fields.
SHARES = ("computing", "recomputing", "optimizer", "tensor", "pipeline", "data", "bubble")


@dataclass(frozen=True)
class Usage:
    """Seconds of one rank in a step; the parts add up to it.

    computing:   forward and backward passes
    recomputing: activations made a second time
    optimizer:   the gradient's norm and the update
    tensor:      messages of the tensor group (all exposed: computing waits for each)
    pipeline:    waiting for a message between stages while it travels, and summing what several stages hold
                 (tied tables, the gradient's norm)
    data:        waiting for messages between replicas that the backward pass did not hide
    bubble:      waiting for other stages to have something to do
    """

    rank: int
    seconds: float
    computing: float
    recomputing: float
    optimizer: float
    tensor: float
    pipeline: float
    data: float
    bubble: float

    @property
    def communication(self) -> float:
        """Exposed communication: seconds in which computing waits for messages."""
        return self.tensor + self.pipeline + self.data

    def share(self, part: str) -> float:
        """A part as a share of the step."""
        return float(getattr(self, part)) / self.seconds


def usage(step: Step, result: Replay, rank: int) -> Usage:
    """Where the time of a rank goes."""
    lane = (rank, "compute")
    spent: defaultdict[str, float] = defaultdict(float)
    messages = sorted(result.ends[i] for lane in ("gather", "reduce") for i in result.on((rank, lane)))
    now = 0.0
    for i in result.on(lane):
        task, gap = result.tasks[i], result.starts[i] - now
        if gap > 0:
            for name, seconds in _waiting(result, i, gap, messages):
                spent[name] += seconds
        if i in step.parts:
            part = step.parts[i]
            whole = sum(one.seconds for one in part.passes)
            again = sum(one.again_seconds for one in part.passes)
            again *= part.computing / whole if whole else 0.0  # a slower rank makes them slower too
            spent["recomputing"] += again
            spent["computing"] += part.computing - again
            spent["tensor"] += part.talking
        else:
            spent[{"optimizer": "optimizer", "tensor": "tensor"}.get(task.kind, "pipeline")] += task.seconds
        now = result.ends[i]
    own = messages[-1] if messages else now
    spent["data"] += max(0.0, own - now)
    spent["bubble"] += max(0.0, result.seconds - max(own, now))
    return Usage(rank, result.seconds, *(spent[name] for name in SHARES))


def _waiting(result: Replay, i: int, gap: float, messages: list[float]) -> list[tuple[str, float]]:
    """What a rank waited for before task i: the travel of a message, replicas, or others' work (bubble).

    messages: when the rank's own messages with replicas end, in order.
    """
    by = result.cause[i]
    if by < 0:
        return [("bubble", gap)]
    cause = result.tasks[by]
    if cause.kind not in ("data", "pipeline"):
        return [("bubble", gap)]
    own = 0.0
    if cause.kind == "data" and (ended := bisect_right(messages, result.starts[i])):
        own = min(gap, max(0.0, gap - (result.starts[i] - messages[ended - 1])))
    travel = min(gap - own, cause.seconds)  # of others: before it began, the rank waited for their work
    return [(cause.kind, own + travel), ("bubble", gap - own - travel)]
