"""The discrete-event core and the pipeline schedules, against what can be worked out by hand."""

import itertools

import pytest

from fmlab.sim.replay import Deadlock, Task, replay
from fmlab.sim.schedule import (
    Action,
    bubble_formula,
    model_chunk,
    most_in_flight,
    place,
    replay_schedule,
    schedule,
)
from fmlab.sim.split import Split


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


@pytest.mark.parametrize(
    ("stages", "micro_batches"), list(itertools.product([1, 2, 3, 4, 8], [1, 2, 3, 5, 8, 15, 16, 33]))
)
@pytest.mark.parametrize("kind", ["zb-h1", "zbv"])
def test_zero_bubble_schedules(kind: str, stages: int, micro_batches: int) -> None:
    chunks = 2 if kind == "zbv" else 1
    actions = schedule(kind, stages, micro_batches, chunks)
    everything = {
        (d, i, c) for d in ("forward", "input", "weight") for i in range(micro_batches) for c in range(chunks)
    }
    for todo in actions:
        assert {(a.direction, a.micro_batch, a.chunk) for a in todo} == everything
        assert len(todo) == len(everything)
    # no more memory than 1F1B's first stage, whose micro-batches are as many chunks
    assert max(map(most_in_flight, actions)) <= chunks * min(stages, micro_batches)
    result = replay_schedule(actions, forward=1, backward=2, kind=kind)
    bubble = 1 - 3 * micro_batches / result.seconds
    enough = stages if kind == "zb-h1" else 2 * stages - 1
    if micro_batches >= enough:
        assert bubble == pytest.approx(bubble_formula(stages, micro_batches, chunks, kind))
    else:  # still better than 1F1B: at least the gradients of weights are out of the way
        assert bubble <= bubble_formula(stages, micro_batches) + 1e-9
    if kind == "zbv" and micro_batches >= 2 * stages:  # no stage idles between its first and its last pass
        for stage in range(stages):
            mine = result.on((stage, "compute"))
            assert result.ends[mine[-1]] - result.starts[mine[0]] == pytest.approx(3 * micro_batches)


def test_how_long_the_gradients_of_weights_take_matters_to_zero_bubble_only() -> None:
    times = dict(forward=1.0, backward=2.2, weight=0.8)
    seconds = replay_schedule(schedule("zb-h1", 4, 8), **times).seconds
    assert 1 - 8 * 3.2 / seconds == pytest.approx(bubble_formula(4, 8, 1, "zb-h1", **times))
    assert seconds == pytest.approx(8 * 3.2 + 3 * (1 + 1.4 - 0.8))
    with pytest.raises(ValueError, match="weight=3 is a part of backward=2"):
        replay_schedule(schedule("zb-h1", 4, 8), weight=3)


def test_the_chunks_of_a_v() -> None:
    assert [place("zbv", c, 3) for c in range(6)] == [(0, 0), (1, 0), (2, 0), (2, 1), (1, 1), (0, 1)]
    assert [place("interleaved", c, 3)[0] for c in range(6)] == [0, 1, 2, 0, 1, 2]
    for kind, c in itertools.product(("zbv", "interleaved"), range(6)):
        assert model_chunk(kind, *place(kind, c, 3), 3) == c


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
        (("zb-h1", 4, 8, 2), "virtual_stages=1"),
        (("zbv", 4, 8, 1), "'zbv' has 2 chunks a stage, got virtual_stages=1"),
    ],
)
def test_illegal_schedules_name_the_legal(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        schedule(*arguments)


def test_a_dry_run_does_not_split_backward_passes() -> None:
    with pytest.raises(ValueError, match="use '1f1b', 'gpipe' or 'interleaved'"):
        Split(pipeline=4, micro_batches=8, schedule="zb-h1")


def test_a_schedule_of_ones_own_is_checked() -> None:
    with pytest.raises(ValueError, match="without its forward"):
        replay_schedule([[Action("backward", 0)]])
    swapped = [[Action("backward", 0), Action("forward", 0)]]
    with pytest.raises(Deadlock, match="B0"):
        replay_schedule(swapped)
