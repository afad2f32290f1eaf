"""The vector engine: 128 lanes for sums along the free dimension and for two tiles at a time.

Operands are converted to fp32 and results from it, at no cost. Results go to a new tile in SBUF unless `out`
names one in SBUF or PSUM; the default dtype is that of the data.
"""

import torch

from fmlab.kernels.tiles import cost
from fmlab.kernels.tiles.elementwise import (
    OPERATORS,
    REDUCTIONS,
    Elementwise,
    Operand,
    bf16,
    in_psum,
    known,
    ordered,
    sixteen_bit,
)  # fmt: skip
from fmlab.kernels.tiles.errors import refuse
from fmlab.kernels.tiles.tile import Tile


class VectorEngine(Elementwise):
    """Two tiles at a time, sums along the free dimension, copies."""

    def tensor_tensor(
        self, a: Tile, b: Tile, op: str, out: Tile | None = None, dtype: torch.dtype | None = None
    ) -> Tile:
        """out = a <op> b, element by element; at most one of both in PSUM. Default dtype: a's."""
        function = known(op, OPERATORS, "operator")
        self._check_streams("vector", a, b)
        self._same_shape(a, b)
        if a.space == b.space == "PSUM":
            refuse(f"one of both tiles may be in PSUM, not both: {a} and {b}")
        out = self._result(out, a.shape, dtype, a.dtype)
        self._check_result("vector", out)
        cycles = cost.two_inputs(self.core, a.free_size, op, [a.dtype, b.dtype, out.dtype], in_psum(a, b))
        self._issue("vector", op, [a, b], [out], cycles)
        out.data.copy_(function(a.data.float(), b.data.float()))
        return out

    def tensor_scalar(
        self,
        data: Tile,
        op0: str,
        operand0: Operand,
        op1: str | None = None,
        operand1: Operand = 0.0,
        *,
        reverse0: bool = False,
        reverse1: bool = False,
        out: Tile | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tile:
        """out = (data <op0> operand0) <op1> operand1; a second operator costs nothing.

        Operands are numbers, or tiles of one element a partition. reverse: operand <op> data instead.
        """
        steps = [(known(op0, OPERATORS, "operator"), operand0, reverse0)]
        if op1 is not None:
            steps.append((known(op1, OPERATORS, "operator"), operand1, reverse1))
        self._check_streams("vector", data)
        operands = [tile for _, operand, _ in steps for tile in self._check_operand_of(data, operand)]
        out = self._result(out, data.shape, dtype, data.dtype)
        self._check_result("vector", out)
        cycles = cost.one_input(self.core, data.free_size, sixteen_bit(data, out), in_psum(data, out))
        self._issue("vector", op0 if op1 is None else f"{op0}, {op1}", [data, *operands], [out], cycles)
        value = data.data.float()
        for function, operand, reverse in steps:
            value = ordered(function, value, self._value(operand, value), reverse)
        out.data.copy_(value)
        return out

    def scalar_tensor_tensor(
        self, data: Tile, op0: str, operand0: Operand, op1: str, operand1: Tile,
        out: Tile | None = None, dtype: torch.dtype | None = None,
    ) -> Tile:  # fmt: skip
        """out = (data <op0> operand0) <op1> operand1: operand0 a number or one element a partition, operand1
        a tile of the data's shape."""
        first, second = known(op0, OPERATORS, "operator"), known(op1, OPERATORS, "operator")
        self._check_streams("vector", data, operand1)
        self._same_shape(data, operand1)
        if data.space == operand1.space == "PSUM":
            refuse(f"one of both tiles may be in PSUM, not both: {data} and {operand1}")
        operands = self._check_operand_of(data, operand0)
        out = self._result(out, data.shape, dtype, data.dtype)
        self._check_result("vector", out)
        cycles = cost.scalar_tensor_tensor(data.free_size, (op0, op1), bf16(data, operand1))
        self._issue("vector", f"{op0}, {op1}", [data, *operands, operand1], [out], cycles)
        value = data.data.float()
        out.data.copy_(second(first(value, self._value(operand0, value)), operand1.data.float()))
        return out

    def reduce(
        self,
        op: str,
        data: Tile,
        *,
        negate: bool = False,
        out: Tile | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tile:
        """out (P x 1) = add, max or min of data along its free dimensions; negate flips its sign for nothing.

        Default dtype: fp32. Sums across partitions are the tensor engine's business: multiply by ones.
        """
        function = known(op, REDUCTIONS, "reduction")
        self._check_streams("vector", data)
        out = self._result(out, (data.partitions, 1), dtype, torch.float32)
        self._check_result("vector", out)
        cycles = cost.reduction(data.free_size, op, bf16(data, out))
        self._issue("vector", f"reduce {op}", [data], [out], cycles)
        value = function(data.data.float().flatten(1))
        out.data.copy_(-value if negate else value)
        return out

    def reciprocal(self, data: Tile, out: Tile | None = None, engine: str = "vector") -> Tile:
        """out = 1 / data. The vector engine takes 8 cycles an element, the scalar engine 1 (less precise
        there: that is not imitated)."""
        if engine not in ("vector", "scalar"):
            refuse(f"engine={engine!r} computes no reciprocals; choose vector or scalar")
        self._check_streams(engine, data)
        out = self._result(out, data.shape, None, data.dtype)
        self._check_result(engine, out)
        self._issue(engine, "reciprocal", [data], [out], cost.reciprocal(data.free_size, engine))
        out.data.copy_(data.data.float().reciprocal())
        return out

    def copy(
        self, data: Tile, out: Tile | None = None, dtype: torch.dtype | None = None, engine: str = "vector"
    ) -> Tile:
        """out = data in another place or dtype, by the vector, scalar or gpsimd engine: the way out of
        PSUM."""
        if engine not in ("vector", "scalar", "gpsimd"):
            refuse(f"engine={engine!r} does not copy; choose vector, scalar or gpsimd")
        self._check_streams(engine, data)
        out = self._result(out, data.shape, dtype, data.dtype)
        self._check_result(engine, out, data.dtype)
        fast = engine == "vector" and sixteen_bit(data, out)
        cycles = cost.one_input(self.core, data.free_size, fast, in_psum(data, out))
        self._issue(engine, "copy", [data], [out], cycles)
        out.data.copy_(data.data.clone())
        return out

    def memset(self, out: Tile, value: float, engine: str = "vector") -> Tile:
        """out = value everywhere, by the vector or gpsimd engine."""
        if engine not in ("vector", "gpsimd"):
            refuse(f"engine={engine!r} does not fill tiles; choose vector or gpsimd")
        self._check_result(engine, out, torch.int32 if float(value).is_integer() else torch.float32)
        self._issue(engine, "memset", [], [out], cost.memset(out.free_size, value, out.dtype))
        out.data.fill_(value)
        return out
