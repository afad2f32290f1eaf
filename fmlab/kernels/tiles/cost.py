"""What an instruction costs, in cycles of its engine: the estimates of NKI's reference, as functions.

N is the number of elements that an instruction walks in each partition. All 128 partitions work side by
side, so a tile of 1 partition costs as much as one of 128: the first lesson of this machine.
Source, unless said: AWS Neuron documentation 2.21, nki.isa, "estimated instruction cost".
"""

from collections.abc import Sequence

import torch

from fmlab.kernels.tiles.core import Core

SHORTEST = 64  # cycles: the documentation's MIN_II
SELECT = 150  # cycles to start iota or affine_select


def matmul(stationary: int, moving: int, dtype: torch.dtype) -> int:
    """Cycles of a matrix multiplication: one for each column of the moving tile, four in fp32."""
    return max(min(SHORTEST, stationary), moving) * (4 if dtype == torch.float32 else 1)


def transpose(core: Core, partitions: int, free: int, dtype: torch.dtype) -> int:
    """Cycles of a transposition on the tensor engine: a multiplication by the identity.

    fp32 costs 4 times as much on v2, like any fp32 multiplication, and half of that on v3, which has a mode
    for it (Trainium2 Architecture Guide, built-in transpose support).
    """
    slow = (2 if core.name == "v3" else 4) if dtype == torch.float32 else 1
    return max(partitions, min(SHORTEST, free)) * slow


def activation(n: int, reduces: bool) -> int:
    """Cycles of the scalar engine; multiply, add and cast come free, writing a sum out costs 64."""
    return max(SHORTEST, n) + (SHORTEST if reduces else 0)


def one_input(core: Core, n: int, sixteen_bit: bool, in_psum: bool) -> int:
    """tensor_scalar, copy: N. v3, all 16 bit: N/4, or N/2 with one of them in PSUM (Trainium2 guide)."""
    faster = (2 if in_psum else 4) if core.fast_16_bit and sixteen_bit else 1
    return max(SHORTEST, -(-n // faster))


def two_inputs(core: Core, n: int, op: str, dtypes: Sequence[torch.dtype], in_psum: bool) -> int:
    """tensor_tensor: 2N; N if one input comes from PSUM; N in bf16 throughout (v2: add, subtract,
    multiply)."""
    simple = op in ("add", "subtract", "multiply")
    if core.fast_16_bit:
        fast = not in_psum and all(dtype.itemsize == 2 for dtype in dtypes)
    else:
        fast = not in_psum and simple and all(dtype == torch.bfloat16 for dtype in dtypes)
    return max(SHORTEST, n if in_psum or fast else 2 * n)


def scalar_tensor_tensor(n: int, ops: tuple[str, str], bf16: bool) -> int:
    """2N; N for a subtraction then a multiplication of bf16 tiles with an even N."""
    fast = bf16 and ops == ("subtract", "multiply") and n % 2 == 0
    return max(SHORTEST, n if fast else 2 * n)


def reduction(n: int, op: str, bf16: bool) -> int:
    """N; N/2 for sum and maximum of bf16 into bf16."""
    return max(SHORTEST, -(-n // 2) if bf16 and op in ("add", "max") else n)


def memset(n: int, value: float, dtype: torch.dtype) -> int:
    """N; N/2 for zeros of 16 bit."""
    return max(SHORTEST, -(-n // 2) if value == 0 and dtype.itemsize == 2 else n)


def reciprocal(n: int, engine: str) -> int:
    """N on the scalar engine, 8N on the vector engine, which is the more precise one."""
    return max(SHORTEST, 8 * n if engine == "vector" else n)


def select(n: int) -> int:
    """iota, affine_select: 150 + N cycles of gpsimd."""
    return SELECT + n


def transfer(core: Core, partitions: int, nbytes: int, piece: int) -> tuple[int, float]:
    """How many DMA engines a transfer uses, and the seconds that each is busy.

    An engine serves 8 partitions, so few partitions use few engines. nbytes: of the whole transfer. piece:
    bytes that lie side by side on both ends; each piece adds the time of 128 more bytes (an assumption: the
    documentation says that below 256 bytes little of the rate is left and that 2 to 4 KiB saturate it).
    """
    engines = min(core.dma_engines, -(-partitions // 8))
    moved = nbytes + nbytes // piece * core.figures["DMA piece"].value
    return engines, moved / engines / core.dma_rate
