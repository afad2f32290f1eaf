"""The discrete-event core and the pipeline schedules, against what can be worked out by hand."""

import itertools

import pytest

from fmlab.sim.replay import Deadlock, Task, replay
from fmlab.sim.schedule import (
    Action,
    bubble_formula,
    most_in_flight,
    replay_schedule,
    schedule,
)


def test_a_lane_keeps_its_order_and_a_meeting_waits_for_the_last() -> None:
    tasks = [
        Task("a", 2.0, ("x",)),
        Task("b", 5.0, ("y",)),
        Task("all-reduce", 1.0, ("x", "y")),
        Task("c", 1.0, ("x",), after=(1,)),
    ]
    result = replay(tasks)
    assert result.starts == [0, 0, 5, 6]
    assert result.seconds == 7
    assert result.critical_path() == [1, 2, 3]
    assert result.busy("x") == 4
    assert result.on("y") == [1, 2]


def test_a_wire_serves_who_asked_first() -> None:
    wire = (("host 0", "host 1"),)
    tasks = [
        Task("work", 1.0, ("a",)),
        Task("late", 2.0, ("a",), wires=wire),
        Task("early", 3.0, ("b",), wires=wire),
        Task("third", 1.0, ("c",), after=(0,), wires=wire),
    ]
    assert replay(tasks).starts == [0, 3, 0, 5]


def test_ranks_that_wait_for_one_another_are_named() -> None:
    crossed = [
        Task("send to 1", 1.0, ("rank 0", "rank 1"), after=(1,)),
        Task("send to 0", 1.0, ("rank 1", "rank 0")),
    ]
    with pytest.raises(Deadlock, match=r"rank 0 is at 'send to 1', which waits for send to 0"):
        replay(crossed)


@pytest.mark.parametrize("bad", [Task("x", -1, ("a",)), Task("x", 1, ()), Task("x", 1, ("a",), after=(7,))])
def test_impossible_tasks_are_refused(bad: Task) -> None:
    with pytest.raises(ValueError, match="task 0"):
        replay([bad])


@pytest.mark.parametrize(
    ("stages", "micro_batches"), list(itertools.product([1, 2, 3, 4, 8], [1, 2, 4, 5, 16]))
)
def test_bubbles_are_those_of_the_formula(stages: int, micro_batches: int) -> None:
    for kind in ("gpipe", "1f1b"):
        actions = schedule(kind, stages, micro_batches)
        seconds = replay_schedule(actions, forward=1, backward=2).seconds
        assert seconds == pytest.approx(3 * (micro_batches + stages - 1))
        assert 1 - 3 * micro_batches / seconds == pytest.approx(bubble_formula(stages, micro_batches))


@pytest.mark.parametrize(
    ("stages", "groups", "chunks"), list(itertools.product([2, 4, 8], [1, 2, 4], [2, 3]))
)
def test_interleaving_divides_the_bubble(stages: int, groups: int, chunks: int) -> None:
    micro_batches = stages * groups
    actions = schedule("interleaved", stages, micro_batches, chunks)
    done = [sorted(map(str, stage)) for stage in actions]
    assert done[0] == done[-1]
    assert len(set(done[0])) == 2 * micro_batches * chunks
    seconds = replay_schedule(actions, forward=1, backward=2).seconds
    bubble = 1 - 3 * micro_batches / seconds
    assert bubble == pytest.approx(bubble_formula(stages, micro_batches, chunks))


def test_what_a_stage_holds() -> None:
    held = [most_in_flight(stage) for stage in schedule("1f1b", 4, 16)]
    assert held == [4, 3, 2, 1]
    assert [most_in_flight(stage) for stage in schedule("1f1b", 4, 2)] == [2, 2, 2, 1]
    assert [most_in_flight(stage) for stage in schedule("gpipe", 4, 16)] == [16] * 4
    # interleaved: p v (1 + (p-1) / (p v)) chunks on the first stage
    assert most_in_flight(schedule("interleaved", 4, 16, 2)[0]) == 4 * 2 + 3


def test_messages_cost_time_only_where_they_are_waited_for() -> None:
    actions = schedule("1f1b", 4, 8)
    free, slow = (replay_schedule(actions, send=send).seconds for send in (0.0, 0.5))
    assert slow > free
    assert replay_schedule(schedule("1f1b", 1, 8), send=0.5).seconds == 8 * 3 + 0.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("zigzag", 2, 2), "gpipe, 1f1b, interleaved"),
        (("interleaved", 4, 10, 2), "use 8 or 12"),
        (("interleaved", 4, 8, 1), "interleaves nothing"),
        (("1f1b", 4, 8, 2), "schedule='interleaved' or virtual_stages=1"),
        (("1f1b", 0, 8), "stages=0"),
    ],
)
def test_illegal_schedules_name_the_legal(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        schedule(*arguments)


def test_a_schedule_of_ones_own_is_checked() -> None:
    with pytest.raises(ValueError, match="without its forward"):
        replay_schedule([[Action("backward", 0)]])
    swapped = [[Action("backward", 0), Action("forward", 0)]]
    with pytest.raises(Deadlock, match="B0"):
        replay_schedule(swapped)
