"""The tensor engine: a systolic array of 128 x 128 that multiplies tiles in SBUF into PSUM."""

import torch

from fmlab.kernels.tiles import cost
from fmlab.kernels.tiles.core import BANK_BYTES, MOVING, PARTITIONS, STATIONARY
from fmlab.kernels.tiles.errors import refuse
from fmlab.kernels.tiles.machine import Machine
from fmlab.kernels.tiles.tile import Tile, short


class TensorEngine(Machine):
    """Matrix multiplication and transposition, from SBUF into PSUM."""

    def matmul(
        self, stationary: Tile, moving: Tile, out: Tile | None = None, accumulate: bool = False
    ) -> Tile:
        """out (M x N, PSUM, fp32) = or += stationary.T (M x K) @ moving (K x N).

        stationary (K x M, M <= 128) is loaded into the array and stays; moving (K x N, N <= 512) streams
        through. Both have the contraction K (<= 128) in the partition dimension, lie in SBUF and have one
        dtype: fp32 (four times slower), bf16 or fp16. Products are summed in fp32.
        """
        self._check_operands(stationary, moving)
        k, m, n = stationary.partitions, stationary.free_size, moving.free_size
        if accumulate and out is None:
            refuse("accumulate=True adds to a tile: give it as out=")
        out = self._result(out, (m, n), None, torch.float32, "PSUM")
        self._check_product(out)
        if accumulate and not self.dry and not bool(out.mask.all()):
            refuse(f"accumulate=True adds to {out}, which was not written yet: begin with accumulate=False")
        cycles = cost.matmul(m, n, stationary.dtype)
        adds_to = out if accumulate else None
        self.fp32_matmuls |= stationary.dtype == torch.float32
        self._issue("tensor", "matmul", [stationary, moving], [out], cycles, 2 * m * n * k, adds_to)
        left, right = stationary.data.float(), moving.data.float()
        product = left.T @ right
        if accumulate:
            out.data.add_(product)
        else:
            out.data.copy_(product)
        return out

    def transpose(self, data: Tile, out: Tile | None = None) -> Tile:
        """out (F x P, PSUM) = data (P x F, both <= 128, SBUF) transposed: a multiplication by the
        identity."""
        self._check_operand(data, "the tile to transpose", STATIONARY)
        out = self._result(out, (data.free_size, data.partitions), None, torch.float32, "PSUM")
        self._check_product(out)
        cycles = cost.transpose(self.core, data.partitions, data.free_size, data.dtype)
        self._issue("tensor", "transpose", [data], [out], cycles)
        out.data.copy_(data.data.T)
        return out

    def _check_operands(self, stationary: Tile, moving: Tile) -> None:
        self._check_operand(stationary, "the stationary tile", STATIONARY)
        self._check_operand(moving, "the moving tile", MOVING)
        if stationary.partitions != moving.partitions:
            refuse(
                "the contraction runs along the partitions, so both tiles need equally many: "
                f"{stationary} and {moving} have {stationary.partitions} and {moving.partitions}"
            )
        if stationary.dtype != moving.dtype:
            kinds = f"{short(stationary.dtype)} and {short(moving.dtype)}"
            refuse(f"both tiles of a matmul have one dtype, not {kinds}; copy one to the other's")

    def _check_operand(self, tile: Tile, what: str, most: int) -> None:
        self._check_alive(tile)
        if tile.space != "SBUF":
            refuse(f"the tensor engine reads SBUF; {tile} is in PSUM: copy it to SBUF first")
        if len(tile.shape) != 2:
            refuse(f"{what} is a matrix, not {tile}")
        if tile.free_size > most:
            refuse(f"{what} has at most {most} elements in its free dimension; {tile} has {tile.free_size}")
        if tile.dtype == torch.int32:
            refuse(f"the tensor engine multiplies fp32, bf16 and fp16, not int32: {tile}")
        if tile.region()[0] % 32:
            refuse(f"a tile for an engine begins at partition 0, 32, 64 or 96; {tile} at {tile.region()[0]}")

    def _check_product(self, out: Tile) -> None:
        self._check_alive(out)
        if out.space != "PSUM":
            refuse(f"the tensor engine writes PSUM; {out} is in SBUF: make the result with psum({out.shape})")
        _, _, first, last = out.region()
        if first // BANK_BYTES != (last - 1) // BANK_BYTES:
            refuse(f"a product lies in one PSUM bank, 512 numbers in each partition; {out} crosses banks")
        assert out.partitions <= PARTITIONS
