"""The gpsimd engine: what has a pattern of its own, such as counting and triangular masks. It reads no
PSUM."""

import torch

from fmlab.kernels.tiles import cost
from fmlab.kernels.tiles.elementwise import Elementwise
from fmlab.kernels.tiles.tile import Tile


class GpSimdEngine(Elementwise):
    """Patterns of indices."""

    def iota(self, out: Tile, *, base: int = 0, partition: int = 0, step: int = 1) -> Tile:
        """out[p, f] = base + partition * p + step * f, with f counting all free dimensions."""
        self._check_streams("gpsimd", out)
        self._issue("gpsimd", "iota", [], [out], cost.select(out.free_size))
        out.data.copy_(self._pattern(out, base, partition, step))
        return out

    def affine_select(
        self,
        data: Tile,
        *,
        base: int,
        partition: int,
        step: int,
        otherwise: float,
        out: Tile | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tile:
        """out[p, f] = data[p, f] where base + partition * p + step * f >= 0, else `otherwise`.

        A causal mask of queries from q and keys from k: base=q - k, partition=1, step=-1.
        """
        self._check_streams("gpsimd", data)
        out = self._result(out, data.shape, dtype, data.dtype)
        self._check_result("gpsimd", out, data.dtype)
        self._issue("gpsimd", "affine_select", [data], [out], cost.select(data.free_size))
        keeps = self._pattern(data, base, partition, step) >= 0
        out.data.copy_(torch.where(keeps, data.data, otherwise))
        return out

    @staticmethod
    def _pattern(tile: Tile, base: int, partition: int, step: int) -> torch.Tensor:
        rows = torch.arange(tile.partitions, device=tile.data.device)[:, None]
        columns = torch.arange(tile.free_size, device=tile.data.device)
        return (base + partition * rows + step * columns).reshape(tile.shape)
