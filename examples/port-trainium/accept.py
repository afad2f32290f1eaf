"""Accept a port or refuse it: python accept.py cpu.json chip.json --planned 0.012.

Exit status 0: accepted. 1: refused, with the reasons. Thresholds are where the reports of bf16 on two devices
agree in practice; tighten them for fp32.
"""

import argparse
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

LOSS, SLOW, STALL, WARM = 0.01, 1.3, 5.0, 6  # WARM: steps in which the three programs compile


def reasons(cpu: dict[str, Any], chip: dict[str, Any], planned: float | None = None) -> list[str]:
    """What speaks against the port; empty if nothing does."""
    found = []
    pairs = list(zip(cpu["losses"], chip["losses"], strict=False))
    if len(pairs) < 10:
        found.append(f"{len(pairs)} losses to compare, 10 are wanted")
    for step, (here, there) in enumerate(pairs, 1):
        if not math.isclose(there, here, rel_tol=LOSS):  # NaN is close to nothing
            found.append(f"step {step}: loss {there:.4f}, {here:.4f} on the CPU")
            break
    if chip["shapes"] > 3:
        found.append(f"{chip['shapes']} shapes: each is a program to compile; the buckets make 3")
    steady = chip["seconds"][WARM:]
    if len(steady) < 4:
        return [*found, f"{len(steady)} steps after the {WARM} that compile, 4 are wanted"]
    median = statistics.median(steady)
    if max(steady) > STALL * median:
        found.append(f"a step of {max(steady):.3g} s among steps of {median:.3g} s: something compiled again")
    if planned is not None and median > SLOW * planned:
        found.append(f"a step takes {median:.3g} s, {median / planned:.1f} times the {planned:.3g} s planned")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cpu", type=Path)
    parser.add_argument("chip", type=Path)
    parser.add_argument("--planned", type=float, help="seconds of a step")
    args = parser.parse_args()
    found = reasons(*(json.loads(file.read_text()) for file in (args.cpu, args.chip)), args.planned)
    print("\n".join(found) or "accepted")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
