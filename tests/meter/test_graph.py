"""The depth of a computation, counted by hand on small graphs."""

import pytest
import torch

from fmlab.meter import graph_depth


def test_the_longest_path_counts() -> None:
    x = torch.ones(3, requires_grad=True)
    assert graph_depth(x.exp()) == 1
    short, long = x.sin(), x.exp().exp().exp()
    assert graph_depth(short * long) == 4
    y = x
    for _ in range(5000):  # deeper than Python's stack
        y = y * 1.0
    assert graph_depth(y) == 5000


def test_what_has_no_graph_is_refused() -> None:
    with pytest.raises(ValueError, match="has no graph"):
        graph_depth(torch.ones(3))
