"""Peak memory of a training step, in a process of its own.

`python -m fmlab.bench.peak MODULE SIDE PRECISION` prints what three steps made by MODULE.make_step add to the
memory that the process had after its imports, and the most bytes of tensors alive at once. The difference is
what the heap holds in gaps between tensors: it depends on the order in which they come and go.
"""

import json
import resource
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import torch

from fmlab.extras import require
from fmlab.meter import peak_memory


class Peak(NamedTuple):
    """MiB: resident, beyond what the process had after its imports; and of the tensors alive at once."""

    resident: float
    tensors: float


def peak_memory_mb(module: str, side: str, precision: str) -> Peak:
    """Peak memory of three steps in a fresh process.

    Raises RuntimeError with the end of what the process said when it fails.
    """
    command = [sys.executable, "-m", "fmlab.bench.peak", module, side, precision]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    peaks = json.loads(done.stdout.splitlines()[-1])
    return Peak(peaks["peak_mb"], peaks["tensors_mb"])


def _high_water_mb() -> float:
    """Largest resident size so far, of this program alone.

    Linux carries ru_maxrss over from the process that started this one; VmHWM starts anew.
    """
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # macOS counts bytes


def main(module: str, side: str, precision: str) -> None:
    """Print {"peak_mb": ..., "tensors_mb": ...} of three steps of one side."""
    bench = import_module(module)
    if side not in ("fmlab", "minimal"):
        for name in bench.REFERENCE_IMPORTS:
            require("hf", name)
    # torch loads its compiler, 60 MB, with the first optimizer; reference libraries have loaded it before
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
    before = _high_water_mb()
    step = bench.make_step(side, precision)
    for _ in range(3):
        step()
    resident = _high_water_mb() - before
    with peak_memory() as tensors:
        step = bench.make_step(side, precision)  # the first one's tensors do not count
        for _ in range(2):
            step()
    print(json.dumps({"peak_mb": resident, "tensors_mb": tensors.peak / 2**20}))


if __name__ == "__main__":
    main(*sys.argv[1:])
