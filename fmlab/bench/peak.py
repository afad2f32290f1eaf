"""Peak memory of a training step, in a process of its own.

`python -m fmlab.bench.peak MODULE SIDE PRECISION` prints what three steps made by MODULE.make_step add to the
memory that the process had after its imports.
"""

import json
import resource
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import torch

from fmlab.extras import require


def peak_memory_mb(module: str, side: str, precision: str) -> float:
    """Peak resident memory that three steps add, in a fresh process, to what it had after its imports.

    Raises RuntimeError with the end of what the process said when it fails.
    """
    command = [sys.executable, "-m", "fmlab.bench.peak", module, side, precision]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return float(json.loads(done.stdout.splitlines()[-1])["peak_mb"])


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
    """Print {"peak_mb": ...} of three steps of one side."""
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
    print(json.dumps({"peak_mb": _high_water_mb() - before}))


if __name__ == "__main__":
    main(*sys.argv[1:])
