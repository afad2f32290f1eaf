"""Transfers between HBM and SBUF."""

import torch

from fmlab.kernels.tiles import cost
from fmlab.kernels.tiles.errors import here, refuse
from fmlab.kernels.tiles.machine import Instruction, Machine
from fmlab.kernels.tiles.tile import Hbm, Tile, about, check_conversion, check_shape, side_by_side


class Transfers(Machine):
    """Loads and stores: two queues, each in order, that share the DMA engines."""

    def load(self, source: Hbm, out: Tile | None = None, dtype: torch.dtype | None = None) -> Tile:
        """HBM -> SBUF. The first dimension of `source` becomes the partition dimension.

        out: the tile to fill (default: a new one); dtype: of a new tile (default: the source's); a transfer
        converts without extra cost.
        """
        if not isinstance(source, Hbm):
            refuse(f"load reads a tensor in HBM, not {source!r}")
        self._check_here(source)
        check_shape(source.shape, f"load of {source}")
        tile = self._result(out, source.shape, dtype, source.dtype)
        if tile.space != "SBUF":
            refuse(f"transfers reach HBM and SBUF; {tile} is in PSUM")
        check_conversion(tile.dtype, source.dtype)
        if source.mask is not None and not self.dry and not bool(source.mask.all()):
            refuse(f"{source} is read, but part of it was never stored")
        waits = source.history.writers(source.region()) if source.role != "input" else set()
        self._check_promise(source, waits)
        number = self._transfer("load", source, tile, waits | self._check_write(tile))
        if source.role != "input":
            source.history.note_read(source.region(), number, "store")
        self._note(number, "load", [], [tile])
        tile.data.copy_(source.data)
        return tile

    def store(self, destination: Hbm, tile: Tile) -> None:
        """SBUF -> HBM, into a tensor that the kernel made with `hbm`; shapes must agree."""
        if not isinstance(destination, Hbm):
            refuse(f"store writes a tensor in HBM, not {destination!r}")
        if destination.role == "input":
            refuse(
                f"{destination} is an input, which kernels only read; make an output with hbm(shape, dtype)"
            )
        self._check_here(destination)
        waits = self._check_read(tile)
        if tile.space != "SBUF":
            refuse(f"transfers reach HBM and SBUF; {tile} is in PSUM: copy it to SBUF first")
        check_conversion(destination.dtype, tile.dtype)
        if destination.shape != tile.shape:
            refuse(f"{tile} does not have the shape of its place, {destination}")
        number = self._transfer(
            "store", destination, tile, waits | destination.history.users(destination.region())
        )
        destination.history.note_write(destination.region(), number)
        self._note(number, "store", [tile], [])
        destination.data.copy_(tile.data)
        if not self.dry and destination.mask is not None:
            destination.mask.fill_(True)

    def _check_here(self, far: Hbm) -> None:
        if far.owner is not self:
            refuse(f"{far} belongs to another run; give its values to this one as an input")

    def _transfer(self, queue: str, far: Hbm, tile: Tile, waits: set[int]) -> int:
        nbytes = far.data.numel() * far.dtype.itemsize
        piece = min(side_by_side(far.data), side_by_side(tile.data[0])) * far.dtype.itemsize
        parts, seconds = cost.transfer(self.core, tile.partitions, nbytes, piece)
        number = len(self.program)
        text = f"{far.name} {about(far.shape, far.dtype)}"
        self.program.append(
            Instruction(
                number, queue, queue, text, here(), tuple(sorted(waits)),
                parts=parts, part_seconds=seconds, nbytes=nbytes,
            )
        )  # fmt: skip
        return number
