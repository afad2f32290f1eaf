"""A tile machine like one NeuronCore: write kernels in Python, get right numbers and modelled times.

    def double(nc, x):                              # x: (128, N) in HBM
        y = nc.hbm(x.shape, x.dtype)                # the result, in HBM
        tile = nc.load(x)                           # HBM -> SBUF, 128 partitions
        nc.store(y, nc.tensor_scalar(tile, "multiply", 2.0))
        return y

    done = run(double, torch.randn(128, 512))
    done.output                                     # the tensor
    print(done.summary(), done.timeline(), sep="\\n")

Values are computed by torch in the dtypes of the hardware. Times, utilisation and memory are modelled from
figures of the AWS Neuron documentation (CORES, fmlab.kernels.tiles.cost); nothing was run on hardware. A
NeuronCore's instructions are those of its engines: Transfers, TensorEngine, VectorEngine, ScalarEngine,
GpSimdEngine; memory and loops are in Machine.
docs/tile-machine.md says how this maps to NKI. Ready kernels: fmlab.kernels.tiles.library.
"""

from fmlab.kernels.tiles.core import CORES, Core
from fmlab.kernels.tiles.dma import Transfers
from fmlab.kernels.tiles.errors import KernelError
from fmlab.kernels.tiles.gpsimd_engine import GpSimdEngine
from fmlab.kernels.tiles.machine import Instruction, Machine
from fmlab.kernels.tiles.report import Run
from fmlab.kernels.tiles.run import NeuronCore, hbm_bytes, run
from fmlab.kernels.tiles.scalar_engine import ScalarEngine
from fmlab.kernels.tiles.tensor_engine import TensorEngine
from fmlab.kernels.tiles.tile import Hbm, Ring, Tile
from fmlab.kernels.tiles.vector_engine import VectorEngine

__all__ = [
    "CORES",
    "Core",
    "GpSimdEngine",
    "Hbm",
    "Instruction",
    "KernelError",
    "Machine",
    "NeuronCore",
    "Ring",
    "Run",
    "ScalarEngine",
    "TensorEngine",
    "Tile",
    "Transfers",
    "VectorEngine",
    "hbm_bytes",
    "run",
]
