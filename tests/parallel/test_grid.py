"""Ranks as points of a grid."""

import pytest

from fmlab.parallel import Layout
from fmlab.parallel.grid import Grid


def test_tensor_ranks_are_neighbours_and_stages_are_far_apart() -> None:
    grid = Layout(tensor=4, data=2, pipeline=2).grid()
    assert grid.lines("tensor") == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert grid.lines("data")[:2] == [[0, 4], [1, 5]]
    assert grid.lines("pipeline")[:2] == [[0, 8], [1, 9]]
    for rank in range(16):
        where = grid.coordinates(rank)
        assert grid.rank(**{axis: where[axis] for axis in grid.order}) == rank
        assert rank in grid.line(rank, "data", "context")


def test_the_order_of_axes_is_a_choice() -> None:
    grid = Layout(tensor=2, pipeline=2, axis_order=("pipeline", "tensor", "context", "data")).grid()
    assert grid.lines("pipeline") == [[0, 1], [2, 3]]
    assert grid.lines("tensor") == [[0, 2], [1, 3]]


def test_parts_of_the_data_axis() -> None:
    grid = Grid({"tensor": 2, "data": 4}, shards=2, experts=4)
    assert grid.lines("shard") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert grid.lines("replica") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert grid.lines("expert") == grid.lines("data") == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert grid.lines("expert_replica") == [[rank] for rank in range(8)]


@pytest.mark.parametrize(
    ("divided", "copied"),
    [
        ((), {"tensor", "context", "pipeline", "data"}),
        (("tensor",), {"context", "pipeline", "data"}),
        (("tensor", "shard"), {"context", "pipeline", "replica"}),
        (("expert",), {"tensor", "context", "pipeline", "expert_replica"}),
        (("expert", "expert_replica"), {"tensor", "context", "pipeline"}),
        (("context", "data"), {"tensor", "pipeline"}),
    ],
)
def test_where_copies_of_a_divided_tensor_lie(divided: tuple[str, ...], copied: set[str]) -> None:
    assert set(Grid({"data": 4, "tensor": 2}, shards=2, experts=2).copies(*divided)) == copied


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expert=3 does not divide data=4; legal are \[1, 2, 4\]"):
        Layout(data=4, expert=3)
    with pytest.raises(ValueError, match=r"replicas=3 does not divide data=4"):
        Layout(data=4, zero=1, replicas=3)
    with pytest.raises(ValueError, match="there is no axis 'rows'"):
        Grid({"rows": 2})
    with pytest.raises(ValueError, match="does nothing without tensor above 1"):
        Layout(sequence_parallel=True)
    with pytest.raises(ValueError, match="name the data axis more than once"):
        Grid({"data": 4}).lines("data", "shard")
