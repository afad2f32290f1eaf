"""How long each notebook runs without a browser, and what `import fmlab` costs beside `import torch`."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from fmlab.bench import Result, interleaved
from fmlab.extras import require
from fmlab.lab.curriculum import XLA_KERNEL, Entry, load, notebooks_folder

CASE_STUDIES = "3_case_studies"
SECONDS, CASE_SECONDS, ALL_SECONDS = 30, 90, 240
XLA_SECONDS = 40  # torch_xla takes ten to load and to compile its first program
CELL_TIMEOUT = 300  # seconds; a dead kernel would otherwise hang the benchmark


def run(quick: bool) -> Iterator[Result]:
    """Execute every ready notebook (quick: the first) and time the imports."""
    folder = notebooks_folder()
    ready = [entry for entry in load(folder).ready if (folder / entry.path).is_file() and _has_kernel(entry)]
    if not ready:
        raise FileNotFoundError(f"{folder} has no notebook that is ready; build them: fmlab notebooks build")
    total, chosen = 0.0, ready[:1] if quick else ready
    for entry in chosen:
        result = _notebook(folder, entry)
        total += result.value
        yield result
    if not quick:
        detail = f"{len(chosen)} notebooks, kernel start included"
        yield Result("all notebooks", total, "s", f"<= {ALL_SECONDS}", detail=detail)
    yield _imports(pairs=3 if quick else 10)


def _has_kernel(entry: Entry) -> bool:
    """Whether it can run here: chapters on XLA only where `make lab-xla` was run."""
    return entry.kernel.name in require("lab", "jupyter_client.kernelspec").find_kernel_specs()


def _notebook(folder: Path, entry: Entry) -> Result:
    nbformat, nbclient = require("lab", "nbformat"), require("lab", "nbclient")
    path = folder / entry.path
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT,
        kernel_name=entry.kernel.name,
        resources={"metadata": {"path": path.parent}},
    )
    start = time.perf_counter()
    client.execute()
    seconds = time.perf_counter() - start
    bound = CASE_SECONDS if entry.part == CASE_STUDIES else SECONDS
    bound = max(bound, XLA_SECONDS) if entry.kernel is XLA_KERNEL else bound
    return Result(f"notebook {entry.number}", seconds, "s", f"<= {bound}", detail=entry.title)


def _imports(pairs: int) -> Result:
    """Fresh interpreters: `import fmlab` must cost no more than the `import torch` that users pay anyway."""

    def start_with(module: str) -> None:
        subprocess.run([sys.executable, "-c", f"import {module}"], check=True)

    ratio = interleaved(lambda: start_with("fmlab"), lambda: start_with("torch"), pairs)
    # interleaved gives time(torch) / time(fmlab); the promise is about the inverse
    return Result(
        "import fmlab / import torch", 1 / ratio.median, "x", "<= 1", detail=f"torch / fmlab {ratio}"
    )
