"""What a dry run of GPT-3 175B on 1,024 chips costs, and how near dry runs come to published steps.

`python -m fmlab.bench.dry_run` is the process that is measured: it prints what it took.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator

from fmlab.bench import Result
from fmlab.bench.peak import _high_water_mb
from fmlab.sim.published import PUBLISHED


def run(quick: bool) -> Iterator[Result]:
    """Time and memory of the large dry run; modelled against quoted step times (four of them with quick)."""
    took = [_fresh_process() for _ in range(1 if quick else 3)]
    best = min(took, key=lambda one: one["seconds"])
    yield Result(
        "dry-run: GPT-3 175B on 1,024 chips",
        best["seconds"],
        "s",
        "<= 10",
        detail=f"the call in a fresh process, best of {len(took)}; with imports "
        f"{best['process_seconds']:.1f} s; {best['tasks']:.0f} tasks",
    )
    yield Result(
        "dry-run: memory that it takes", best["peak_mb"], "MB", "<= 2000", detail="of its whole process"
    )
    yield Result(
        "dry-run: its step", best["step"], "s", kind="modelled", detail="p4de.24xlarge x 128, peak rates"
    )
    for published in PUBLISHED[:4] if quick else PUBLISHED:
        modelled = {rates: published.dry_run(rates).seconds for rates in ("peak", "achievable")}
        yield Result(
            f"dry-run: {published.name}",
            modelled["achievable"] / published.seconds,
            "x",
            kind="modelled",
            detail=f"{modelled['achievable']:.2f} s at achievable rates ({modelled['peak']:.2f} s at peak) "
            f"over {published.seconds:.2f} s quoted ({published.how}; {published.source})",
        )


def _fresh_process() -> dict[str, float]:
    """What a process of its own took, start and imports apart."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "fmlab.bench.dry_run"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found | {"process_seconds": time.perf_counter() - start}


def main() -> None:
    """Dry-run GPT-3 175B on 1,024 chips and print time and memory as JSON."""
    from fmlab.sim import dry_run

    start = time.perf_counter()
    report = dry_run(
        "gpt3-175b",
        host="p4de.24xlarge",
        chips=1024,
        tensor=8,
        pipeline=16,
        data=8,
        micro_batches=192,
        sequence_parallel=True,
        global_batch=1536,
        seq_len=2048,
    )
    str(report)
    found = {
        "seconds": time.perf_counter() - start,
        "peak_mb": _high_water_mb(),
        "step": report.seconds,
        "tasks": len(report.step.tasks),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
