"""`fmlab bench [NAME...] [--quick] [--json FILE]`: run benchmarks and print one table."""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

from fmlab.bench import BENCHES, Result


def cpu_model() -> str:
    """The CPU's name as its maker writes it, or the architecture where the system does not tell."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    """Cores this process may use (a container may own fewer than the host has)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def allocator() -> str:
    """The malloc in use: a preloaded one changes large-tensor timings by tens of per cent."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return f"{platform.system()} default"
    loaded = maps.read_text(errors="replace")
    for name in ("tcmalloc", "jemalloc", "mimalloc"):
        if f"lib{name}" in loaded:
            return name
    return " ".join(platform.libc_ver()).strip() or "libc"


def machine() -> dict[str, str | int]:
    """What the timings depend on, printed as the first line of every report."""
    import torch

    return {
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "allocator": allocator(),
    }


def _load(name: str) -> Callable[[bool], Iterable[Result]]:
    module, function = BENCHES[name].split(":")
    run: Callable[[bool], Iterable[Result]] = getattr(import_module(module), function)
    return run


def table(results: list[Result]) -> str:
    """The results as text, one a line: measured value, target and whether it was met."""
    marks = {None: "", True: "ok", False: "MISSED"}
    rows = [("what", "value", "target", "", "kind", "detail")]
    for r in results:
        target = f"{r.target} {r.unit}" if r.target else ""
        rows.append((r.name, f"{r.value:.4g} {r.unit}", target, marks[r.met], r.kind, r.detail))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[5]]).rstrip()
        for row in rows
    )


def main(argv: list[str]) -> int:
    """Returns 0 when every target was met, 1 when one was missed."""
    parser = argparse.ArgumentParser(prog="fmlab bench", description="Measure what fmlab promises.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"from: {', '.join(BENCHES)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="a rough answer in a fraction of the time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write machine and results to FILE")
    args = parser.parse_args(argv)
    unknown = [name for name in args.names if name not in BENCHES]
    if unknown:
        raise ValueError(f"no benchmark is called {unknown[0]!r}; there are: {', '.join(BENCHES)}")
    here = machine()
    print(", ".join(f"{key} {value}" for key, value in here.items()), flush=True)
    results: list[Result] = []
    for name in args.names or BENCHES:
        print(f"measuring {name} ...", file=sys.stderr, flush=True)
        start = time.perf_counter()
        for result in _load(name)(args.quick):
            print(f"  {result.name}: {result.value:.4g} {result.unit}", file=sys.stderr, flush=True)
            results.append(result)
        print(f"measuring {name} took {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    print(table(results))
    if args.json is not None:
        report = {
            "machine": here,
            "quick": args.quick,
            "results": [{**asdict(r), "met": r.met} for r in results],
        }
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if any(result.met is False for result in results) else 0
