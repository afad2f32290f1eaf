"""What dumps of several ranks say together, without processes."""

from dataclasses import replace

import pytest

from fmlab.meter import Dump, FlightEntry, stragglers, verdict

WORLD = (0, 1, 2)


def call(
    number, op="all_reduce", shape=(4,), ended=False, group="0", ranks=WORLD, issued=0.0, dtype="float32"
):
    at = (f"train.py:{number}, in step",)
    return FlightEntry(group, number, op, dtype, shape, 16, ranks, issued or number, ended, at)


def message(op, peer, number=1, ended=False):
    return FlightEntry("0", number, op, "float32", (4,), 16, WORLD, 9.0, ended, ("pipe.py:7, in send",), peer)


def dump(rank, *entries, **fields):
    last = {}
    for entry in entries:
        if not entry.is_message:
            last[entry.group] = entry.number
    return Dump(rank, 3, list(entries), last, lines=("data.py:30, in load",), **fields)


def test_the_rank_that_did_not_enter_is_named_with_what_it_does():
    found = verdict(
        [dump(0, call(1, ended=True), call(2)), dump(1, call(1, ended=True)), dump(2, call(1), call(2))]
    )
    assert (found.kind, found.ranks) == ("absent", (1,))
    assert "rank 1 did not enter all_reduce #2 float32[4], for which ranks 0, 2 wait" in found.headline
    assert "data.py:30" in found.headline
    assert any(line.startswith("rank 0: in all_reduce #2") and "train.py:2" in line for line in found.lines)


def test_waiting_is_followed_to_the_rank_that_waits_for_nobody():
    """0 waits for 1, which waits in another group for 2, which computes."""
    pair = call(1, group="1", ranks=(1, 2))
    found = verdict([dump(0, call(2)), dump(1, call(1, ended=True), pair), dump(2, call(1, ended=True))])
    assert found.ranks == (2,)


@pytest.mark.parametrize(
    ("other", "word"),
    [
        (call(1, op="broadcast"), "broadcast #1"),
        (call(1, shape=(5,)), "float32[5]"),
        (call(1, dtype="float64"), "float64[4]"),
    ],
)
def test_the_rank_that_entered_something_else_is_named(other, word):
    found = verdict([dump(0, call(1)), dump(1, other), dump(2, call(1))])
    assert (found.kind, found.ranks) == ("mismatch", (1,))
    assert f"rank 1 entered {other.collective} where ranks 0, 2 entered all_reduce #1" in found.headline
    assert word in found.headline


def test_two_sends_that_wait_for_each_other_are_a_deadlock():
    found = verdict([dump(0, message("send", 1)), dump(1, message("send", 0)), dump(2)])
    assert (found.kind, found.ranks) == ("deadlock", (0, 1))
    assert "pipe.py:7" in found.headline


def test_a_send_whose_receive_was_asked_for_waits_for_nobody():
    found = verdict([dump(0, message("send", 1)), dump(1, message("recv", 0)), dump(2)])
    assert found.kind == "stuck"


def test_groups_entered_in_another_order_are_a_deadlock():
    a, b = call(1, group="1", ranks=(0, 1)), call(1, group="2", ranks=(0, 1))
    found = verdict([dump(0, a), dump(1, b), dump(2)])
    assert (found.kind, found.ranks) == ("deadlock", (0, 1))


def test_a_rank_without_a_dump_is_dead_and_one_that_has_finished_is_absent():
    found = verdict([dump(0, call(1)), dump(2, call(1))])
    assert (found.kind, found.ranks) == ("dead", (1,))
    assert "rank 1 left no dump, and ranks 0, 2 wait for it in all_reduce #1" in found.headline
    assert any(line.startswith("rank 1: left no dump") for line in found.lines)
    done = dump(1, state="finished")
    found = verdict([dump(0, call(1)), done, dump(2, call(1))])
    assert found.ranks == (1,)
    assert "has finished" in found.headline


def test_nothing_open_is_said_and_nobody_is_blamed():
    assert verdict([dump(rank, call(1, ended=True)) for rank in WORLD]).kind == "none"
    assert verdict([dump(rank, call(1)) for rank in WORLD]).kind == "stuck"
    with pytest.raises(ValueError, match="one rank at least"):
        verdict([])


def test_a_dump_comes_back_from_its_text():
    one = dump(1, call(1), message("recv", 2), state="raised", error="ValueError: x", at=3.0)
    assert Dump.from_json(one.to_json()) == one
    with pytest.raises(ValueError, match="no dump"):
        Dump.from_json("[1]")


def test_overlapping_collectives_count_their_time_once():
    """Rank 1 is 10 ms late to two collectives that are under way at once, rank 2 5 ms to a third."""
    entries = {rank: [call(n, issued=100.0 + n / 1e3) for n in (1, 2, 20)] for rank in WORLD}
    entries[1][:2] = [replace(e, issued=e.issued + 0.010) for e in entries[1][:2]]
    entries[2][2] = replace(entries[2][2], issued=entries[2][2].issued + 0.005)
    found = stragglers([dump(rank, *entries[rank]) for rank in WORLD])
    assert [row.kept for row in found.rows] == pytest.approx([0, 0.011, 0.005], abs=1e-6)
    assert found.worst.rank == 1
    assert found.worst.latest == pytest.approx(0.010, abs=1e-6)
    ahead = stragglers([dump(rank, *entries[rank]) for rank in WORLD], offsets={1: 0.010})
    assert ahead.worst.rank == 2
    assert "rank" in str(found)
