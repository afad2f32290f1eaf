"""Every schedule delivers every contribution exactly once, with the bytes and steps that theory gives it."""

from dataclasses import replace
from math import ceil, log2

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fmlab.collectives import ALGORITHMS, ScheduleError, prove, schedule
from fmlab.collectives.algorithms import GRIDS, takes_segments
from fmlab.collectives.trees import binary_tree, second_tree

PAIRS = [(collective, algorithm) for collective, names in ALGORITHMS.items() for algorithm in names]


@settings(max_examples=15, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize(("collective", "algorithm"), PAIRS)
def test_every_schedule_is_proven(collective: str, algorithm: str, data: st.DataObject) -> None:
    options: dict[str, object] = {}
    n = data.draw(st.integers(1, 13), "n")
    if algorithm in GRIDS:
        axes = data.draw(st.integers(2 if algorithm == "hierarchical" else 1, 3), "axes")
        dims = data.draw(st.lists(st.integers(1, 4), min_size=axes, max_size=axes), "dims")
        n = 1
        for dim in dims:
            n *= dim
        assume(n <= 24)
        options["dims"] = dims
    if algorithm == "hierarchical" and collective != "all_to_all":
        options["between"] = data.draw(st.sampled_from(["ring", "halving_doubling"]))
        if len(dims) == 2:
            options["inside"] = data.draw(st.sampled_from(["ring", "direct"]))
    if takes_segments(collective, algorithm):
        options["segments"] = 2 * data.draw(st.integers(1, 4), "segments")
    if collective in ("broadcast", "reduce"):
        options["root"] = data.draw(st.integers(0, n - 1), "root")
    plan = schedule(collective, algorithm, n, **options)  # type: ignore[arg-type]
    prove(plan)
    assert n > 1 or not plan.steps


@pytest.mark.parametrize("n", [2, 3, 4, 6, 8, 13])
def test_bytes_and_steps_of_the_classics(n: int) -> None:
    payload = 840 * n
    least = 2 * (n - 1) * payload // n  # no all-reduce sends less, if all send the same
    ring, halving = (schedule("all_reduce", name, n) for name in ("ring", "halving_doubling"))
    assert ring.sent_by(payload) == halving.sent_by(payload) == [least] * n
    assert (len(ring.steps), len(halving.steps)) == (2 * (n - 1), 2 * ceil(log2(n)))
    assert set(ring.link_bytes(payload)) == {(rank, (rank + 1) % n) for rank in range(n)}
    both = schedule("all_reduce", "bidirectional_ring", n)
    assert both.sent_by(payload) == [least] * n
    if n > 2:
        assert max(both.link_bytes(payload).values()) == least // 2
    tree = schedule("all_reduce", "tree", n, segments=4)
    assert sum(tree.sent_by(payload)) == 2 * (n - 1) * payload
    one_shot = schedule("all_reduce", "one_shot", n)
    assert one_shot.sent_by(payload) == [(n - 1) * payload] * n


def test_two_trees_keep_all_ranks_busy() -> None:
    for n in (8, 9, 16, 33):
        inner = [{up for up in tree(n).values() if up is not None} for tree in (binary_tree, second_tree)]
        assert len(inner[0] & inner[1]) <= 1  # no rank (but one, if n is odd) is an inner node of both
    single = schedule("all_reduce", "tree", 16, segments=16).sent_by(16_000)
    double = schedule("all_reduce", "double_tree", 16, segments=16).sent_by(16_000)
    assert (max(single), max(double)) == (3 * 16_000, 2 * 16_000)


def test_a_torus_uses_every_link_alike_and_a_hierarchy_spares_the_network() -> None:
    plan = schedule("all_gather", "torus", 16, dims=(4, 4))
    loads = plan.link_bytes(16 * 400)
    assert len(loads) == 16 * 4
    assert set(loads.values()) == {15 * 400 // 4}  # (n-1)/n of the payload over 2 axes x 2 directions
    plan = schedule("all_reduce", "hierarchical", 8, dims=(2, 4))
    network = sum(count for (a, b), count in plan.link_bytes(800).items() if a // 4 != b // 4)
    assert network == 2 * 800  # each host sends the payload once, whatever the number of its ranks
    plain = schedule("all_to_all", "direct", 8)
    grouped = schedule("all_to_all", "hierarchical", 8, dims=(2, 4))
    across = [sum(a // 4 != b // 4 for a, b in p.link_bytes(64)) for p in (plain, grouped)]
    assert across == [32, 8]  # the same bytes between hosts, in a quarter of the messages


def test_wrong_schedules_are_seen() -> None:
    plan = schedule("all_reduce", "ring", 4)
    with pytest.raises(ScheduleError, match=r"step 3: .* the contribution of ranks .* would count twice"):
        prove(replace(plan, steps=(*plan.steps[:2], *plan.steps[1:])))
    steps = [list(step) for step in plan.steps]
    astray = next(send for send in steps[1] if send.source == 2)
    steps[1][steps[1].index(astray)] = replace(astray, destination=1)  # one wrong neighbour
    with pytest.raises(ScheduleError, match="2 -> 1: chunks 0, added: the contribution of rank 1"):
        prove(replace(plan, steps=tuple(map(tuple, steps))))
    with pytest.raises(ScheduleError, match="at the end chunk 1 of rank 0"):
        prove(replace(plan, steps=plan.steps[:-1]))
    gather = schedule("all_gather", "ring", 4)
    with pytest.raises(ScheduleError, match="does not hold chunk"):
        prove(replace(gather, steps=gather.steps[1:]))


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("all_reduc", "ring", 4), {}, "did you mean 'all_reduce'"),
        (("all_gather", "tree", 4), {}, "legal: ring, bidirectional_ring"),
        (("all_reduce", "ring", 0), {}, "at least 1"),
        (("all_reduce", "ring", 4), {"segments": 2}, "not cut into segments"),
        (("all_reduce", "ring", 4), {"root": 1}, "has no root"),
        (("broadcast", "tree", 4), {"root": 4}, "none of the ranks 0..3"),
        (("all_reduce", "double_tree", 4), {"segments": 3}, "even"),
        (("all_reduce", "hierarchical", 4), {}, "needs dims"),
        (("all_reduce", "torus", 4), {"dims": (3, 2)}, "multiply to 4"),
        (("all_reduce", "ring", 4), {"dims": (2, 2)}, "no grid"),
        (("all_reduce", "ring", 4), {"inside": "ring"}, "no inside"),
        (("all_reduce", "hierarchical", 8), {"dims": (2, 2, 2), "inside": "ring"}, "no inside"),
    ],
)
def test_what_does_not_exist_or_would_do_nothing_is_refused(
    arguments: tuple[str, str, int], options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        schedule(*arguments, **options)  # type: ignore[arg-type]


def test_blocks_must_be_equal_where_ranks_own_them() -> None:
    with pytest.raises(ValueError, match="pad to 12 elements"):
        schedule("all_gather", "ring", 4).chunk_sizes(10)
    assert schedule("all_reduce", "ring", 4).chunk_sizes(10) == [3, 3, 2, 2]
