"""Logs of collectives, compared without processes."""

from fmlab._ranks.log import Collective, Log, compare, out_of_step


def _logs(full: bool) -> dict[int, Log]:
    """Rank 1 has entered so many collectives of other groups that its buffer may have lost the one of "3"."""
    members = {"3": (0, 1)}
    one = Collective("3", 1, "all_reduce", "int64", (2,))
    return {0: Log(members, {"3": 1}, [one]), 1: Log(members, {}, [], full=full)}


def test_what_a_full_buffer_may_have_lost_is_no_disagreement() -> None:
    assert compare(_logs(full=True), finished=[0, 1]) is None
    assert not out_of_step(_logs(full=True))


def test_what_a_rank_never_entered_is_one() -> None:
    found = compare(_logs(full=False), finished=[0, 1])
    assert found is not None
    assert found.culprits == [1]
    assert out_of_step(_logs(full=False))


def test_a_rank_that_is_done_and_has_destroyed_the_group_is_not_missing() -> None:
    logs = _logs(full=False)
    logs[1] = Log({}, {}, [])
    assert compare(logs, finished=[1]) is None
    assert not out_of_step(logs)
