"""The engines of a tile machine over time, as a figure."""

import pytest
import torch

from fmlab.kernels.tiles import run
from fmlab.kernels.tiles.library import softmax
from fmlab.lab.engines import engines_view


def test_each_engine_of_each_run_has_a_row_on_one_axis() -> None:
    short, long = (run(softmax, torch.ones(128, columns)) for columns in (64, 4096))
    shown = engines_view({"short": short, "long": long})
    (axes,) = shown.fig.axes
    rows = [label.get_text() for label in axes.get_yticklabels()]
    assert rows[:4] == ["short: loads", "short: stores", "short: scalar", "short: vector"]
    assert [row.replace("long", "short") for row in rows[4:]] == rows[:4]
    assert axes.get_xlim() == (0, pytest.approx(1e6 * long.seconds))
    assert "modelled" in str(shown)
    assert "short [µs]" in str(shown)


def test_no_run_is_refused() -> None:
    with pytest.raises(ValueError, match="no run to show"):
        engines_view({})
