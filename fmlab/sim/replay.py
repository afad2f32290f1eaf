"""A discrete-event simulator: tasks on lanes, wires that one message holds at a time, and nothing else.

A lane does its tasks in the order they were listed, as a stream of a chip does. A task that names several
lanes is a meeting (a collective, a transfer): it starts when it is the next one on each of them, so it starts
for all when the last has arrived. A wire serves whoever asked first. Nothing is random: equal times are
settled by the order of the list, so a replay gives the same numbers every time.
"""

import heapq
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

Lane = Hashable  # here (rank, name of the stream): (3, "compute")
Wire = Hashable  # here a directed link of a topology: (source, destination)


@dataclass(slots=True)
class Task:
    """Something that takes time.

    name:    what to show
    seconds: how long it takes once it has started
    lanes:   where it runs: one lane, or all that must arrive before it starts
    after:   positions in the list of tasks that must have ended
    wires:   what it holds, alone, while it runs
    kind:    "forward", "backward", "tensor", "data", "pipeline", "optimizer", …; for colours and sums
    """

    name: str
    seconds: float
    lanes: tuple[Lane, ...]
    after: tuple[int, ...] = ()
    wires: tuple[Wire, ...] = ()
    kind: str = "compute"


class Deadlock(ValueError):
    """Tasks are left that wait for one another."""


@dataclass
class Replay:
    """When everything happened.

    tasks:  what was given
    starts, ends: seconds, in the order of `tasks`
    cause:  for each task, the task whose end let it start (-1: it could start at 0). Following it back from
            the last task gives the critical path.
    """

    tasks: Sequence[Task]
    starts: list[float]
    ends: list[float]
    cause: list[int]

    @property
    def seconds(self) -> float:
        """From the start of the first task to the end of the last."""
        return max(self.ends, default=0.0)

    def busy(self, lane: Lane, kinds: Iterable[str] | None = None) -> float:
        """Seconds that a lane works (on tasks of these kinds)."""
        wanted = None if kinds is None else set(kinds)
        tasks = (self.tasks[i] for i in self.on(lane))
        return sum(task.seconds for task in tasks if wanted is None or task.kind in wanted)

    def on(self, lane: Lane) -> list[int]:
        """Positions of the tasks of a lane, in the order they ran."""
        return self.lanes.get(lane, [])

    @cached_property
    def lanes(self) -> dict[Lane, list[int]]:
        """Positions of the tasks of every lane."""
        found: dict[Lane, list[int]] = {}
        for i, task in enumerate(self.tasks):
            for lane in task.lanes:
                found.setdefault(lane, []).append(i)
        return found

    def critical_path(self) -> list[int]:
        """Positions of the tasks that decide when the last one ends, first to last."""
        path: list[int] = []
        at = max(range(len(self.tasks)), key=self.ends.__getitem__, default=-1)
        while at >= 0:
            path.append(at)
            at = self.cause[at]
        return path[::-1]


def replay(tasks: Sequence[Task]) -> Replay:
    """Run the tasks and say when each started and ended.

    Raises Deadlock (a ValueError) that names who waits for what, and ValueError for a task that waits for one
    that does not exist, has no lane, or takes less than no time.
    """
    _check(tasks)
    count = len(tasks)
    queues: dict[Lane, deque[int]] = {}
    for i, task in enumerate(tasks):
        for lane in task.lanes:
            queues.setdefault(lane, deque()).append(i)
    # What a task still waits for: its predecessors, and to be the next one on each of its lanes.
    missing = [len(task.after) + len(task.lanes) for task in tasks]
    followers: list[list[int]] = [[] for _ in tasks]
    for i, task in enumerate(tasks):
        for before in task.after:
            followers[before].append(i)

    starts, ends, cause = [0.0] * count, [0.0] * count, [-1] * count
    held: set[Wire] = set()
    waiting: list[int] = []  # for wires, in the order they asked
    running: list[tuple[float, int]] = []

    def start(i: int, now: float) -> None:
        held.update(tasks[i].wires)
        starts[i], ends[i] = now, now + tasks[i].seconds
        heapq.heappush(running, (ends[i], i))

    def ask(i: int, now: float) -> None:
        if tasks[i].wires and not held.isdisjoint(tasks[i].wires):
            waiting.append(i)
        else:
            start(i, now)

    def arrive(i: int, now: float, by: int) -> None:
        missing[i] -= 1
        if not missing[i]:
            cause[i] = by
            ask(i, now)

    for queue in list(queues.values()):
        arrive(queue[0], 0.0, -1)
    done = 0
    while running:
        now, i = heapq.heappop(running)
        done += 1
        if tasks[i].wires:
            held.difference_update(tasks[i].wires)
            for other in list(waiting):
                if held.isdisjoint(tasks[other].wires):
                    waiting.remove(other)
                    cause[other] = i
                    start(other, now)
        for lane in tasks[i].lanes:
            queue = queues[lane]
            queue.popleft()
            if queue:
                arrive(queue[0], now, i)
        for follower in followers[i]:
            arrive(follower, now, i)
    if done < count:
        raise Deadlock(_who_waits(tasks, queues, ends, missing))
    return Replay(tasks, starts, ends, cause)


def _check(tasks: Sequence[Task]) -> None:
    for i, task in enumerate(tasks):
        if not task.lanes or len(set(task.lanes)) != len(task.lanes):
            raise ValueError(f"task {i} ({task.name}) needs one lane or several different ones: {task.lanes}")
        if not task.seconds >= 0:
            raise ValueError(f"task {i} ({task.name}) takes {task.seconds} s; give 0 or more")
        if any(not 0 <= before < len(tasks) or before == i for before in task.after):
            raise ValueError(f"task {i} ({task.name}) waits for {task.after}; tasks are 0..{len(tasks) - 1}")


def _who_waits(
    tasks: Sequence[Task], queues: dict[Lane, deque[int]], ends: list[float], missing: list[int]
) -> str:
    left = {i for queue in queues.values() for i in queue}
    lines = []
    for lane, queue in queues.items():
        if not queue:
            continue
        task = tasks[queue[0]]
        unmet = [tasks[b].name for b in task.after if b in left]
        unmet += [f"lane {other} to get to it" for other in task.lanes if queues[other][0] != queue[0]]
        lines.append(f"lane {lane} is at {task.name!r}, which waits for {', '.join(unmet)}")
    return f"{len(left)} tasks wait for one another: " + "; ".join(lines[:8])
