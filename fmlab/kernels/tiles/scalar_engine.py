"""The scalar engine: a function of each element, with a multiply-add before it and a sum behind it for
free."""

import torch

from fmlab.kernels.tiles import cost
from fmlab.kernels.tiles.elementwise import FUNCTIONS, Elementwise, Operand, known
from fmlab.kernels.tiles.errors import refuse
from fmlab.kernels.tiles.tile import Tile


class ScalarEngine(Elementwise):
    """A function of each element."""

    def activation(
        self,
        op: str,
        data: Tile,
        *,
        bias: Operand = 0.0,
        scale: Operand = 1.0,
        total: Tile | None = None,
        out: Tile | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tile:
        """out = op(data * scale + bias), in fp32; default dtype: the data's.

        bias, scale: numbers, or tiles of one element a partition. total (P x 1): takes the sum of the result
        along the free dimensions, before it is converted. Which functions there are:
        fmlab.kernels.tiles.elementwise.FUNCTIONS.
        """
        function = known(op, FUNCTIONS, "function")
        self._check_streams("scalar", data)
        operands = self._check_operand_of(data, bias) + self._check_operand_of(data, scale)
        out = self._result(out, data.shape, dtype, data.dtype)
        self._check_result("scalar", out)
        writes = [out]
        if total is not None:
            self._check_result("scalar", total)
            if total.shape != (data.partitions, 1):
                refuse(f"total takes one sum a partition, shape ({data.partitions}, 1), not {total}")
            writes.append(total)
        cycles = cost.activation(data.free_size, total is not None)
        self._issue("scalar", op, [data, *operands], writes, cycles)
        value = data.data.float()
        value = function(value * self._value(scale, value) + self._value(bias, value))
        out.data.copy_(value)
        if total is not None:
            total.data.copy_(value.flatten(1).sum(dim=1, keepdim=True))
        return out
