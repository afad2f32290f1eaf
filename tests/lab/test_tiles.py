"""The picture of a tile machine's run."""

import pytest
import torch

from fmlab.kernels.tiles import library, run


def test_a_row_for_each_engine_that_works() -> None:
    pytest.importorskip("matplotlib")
    from fmlab.lab.tiles import tile_timeline

    shapes = [torch.empty(256, 512, dtype=torch.bfloat16, device="meta") for _ in range(2)]
    done = run(library.matmul_naive, *shapes, dry=True)
    picture = tile_timeline(done)
    (ax,) = picture.fig.axes
    rows = [tick.get_text() for tick in ax.get_yticklabels()]
    assert rows == ["DMA, loads", "DMA, stores", "tensor", "vector"]
    assert picture.kind == "modelled"
    assert "matmul_naive on NeuronCore-v2" in picture.text
    with pytest.raises(ValueError, match="ends after it begins"):
        tile_timeline(done, window=(1e-6, 0.0))
