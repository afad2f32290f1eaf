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
figures of the AWS Neuron documentation (CORES, fmlab.kernels.tiles.cost); nothing was run on hardware.
docs/tile-machine.md says how this maps to NKI. Ready kernels: fmlab.kernels.tiles.library.
"""

from fmlab.kernels.tiles.core import CORES, Core
from fmlab.kernels.tiles.errors import KernelError
from fmlab.kernels.tiles.machine import Instruction
from fmlab.kernels.tiles.report import Run
from fmlab.kernels.tiles.run import NeuronCore, hbm_bytes, run
from fmlab.kernels.tiles.tile import Hbm, Ring, Tile

__all__ = [
    "CORES",
    "Core",
    "Hbm",
    "Instruction",
    "KernelError",
    "NeuronCore",
    "Ring",
    "Run",
    "Tile",
    "hbm_bytes",
    "run",
]
