"""Ranks on their hosts."""

import pytest

from fmlab.lab.placement import axis_between, placement_view
from fmlab.parallel import Layout

ORDERS = {
    "tensor first": ("tensor", "context", "data", "pipeline"),
    "data first": ("data", "context", "tensor", "pipeline"),
}
#: rank 0 and 1, 2 and 3 send each other 4 MB; 0 and 2, 1 and 3 send 1 MB; a few bytes go elsewhere
LINKS = {
    (0, 1): 3_000_000,
    (1, 0): 1_000_000,
    (2, 3): 4_000_000,
    (0, 2): 1_000_000,
    (3, 1): 1_000_000,
    (0, 3): 8,
}


def grid(name: str):
    return Layout(tensor=2, data=2, axis_order=ORDERS[name]).grid()


def test_the_axis_of_two_ranks_depends_on_the_order() -> None:
    assert [axis_between(grid("tensor first"), 0, other) for other in (1, 2, 3)] == [
        "tensor",
        "data",
        "several",
    ]
    assert [axis_between(grid("data first"), 0, other) for other in (1, 2)] == ["data", "tensor"]


def test_the_text_of_the_picture_has_its_numbers() -> None:
    shown = placement_view(
        {"tensor first": (grid("tensor first"), LINKS)}, per_host=2, text="Tensor stays inside."
    )
    lines = repr(shown)
    assert "ranks 0 and 1, tensor, inside a host [MB]: 4" in lines
    assert "ranks 1 and 3, data, between hosts [MB]: 1" in lines
    assert "0 and 3" not in lines


def test_hosts_must_be_filled() -> None:
    with pytest.raises(ValueError, match="do not fill hosts of 3"):
        placement_view({"tensor first": (grid("tensor first"), LINKS)}, per_host=3, text="No.")
