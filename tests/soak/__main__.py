"""`python -m tests.soak`: kills at random moments over all engines, damaged files; bounded in time."""

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

from tests.soak.cases import CASES
from tests.soak.damage import damage
from tests.soak.kills import kill


def main(argv: list[str]) -> int:
    """0 when all held; 1 with what did not."""
    parser = argparse.ArgumentParser(prog="make soak ARGS=")
    parser.add_argument("--kills", type=int, default=100, help="over all cases (default: %(default)s)")
    parser.add_argument("--files", type=int, default=200, help="damaged ones (default: %(default)s)")
    parser.add_argument(
        "--minutes", type=float, default=30.0, help="begin no case after (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="cases with one of these in their name, a,b,c")
    args = parser.parse_args(argv)
    cases = [case for case in CASES if any(part in case.name for part in args.only.split(","))]
    draw, start, failed, kills, in_a_save, left = (
        random.Random(args.seed),
        time.monotonic(),
        0,
        0,
        0,
        len(cases),
    )
    for number, case in enumerate(cases):
        if time.monotonic() - start > 60 * args.minutes:
            break
        share = args.kills // len(cases) + (number < args.kills % len(cases))
        with tempfile.TemporaryDirectory() as folder:
            try:
                done = kill(case, Path(folder), share, draw)
            except AssertionError as error:
                failed += 1
                print(f"FAILED {error}", flush=True)
            else:
                kills, in_a_save = kills + done.kills, in_a_save + done.in_a_save
                print(
                    f"{case.name}: {done.kills} kills, {done.in_a_save} of them in a save; bitwise",
                    flush=True,
                )
        left -= 1
    with tempfile.TemporaryDirectory() as folder:
        counts = damage(Path(folder), args.files, draw)
    print(", ".join(f"{number} {what}" for what, number in sorted(counts.items())))
    print(
        f"{kills} kills, {in_a_save} in a save, over {len(cases) - left} cases; {failed} failed, {left} not "
        f"run; {args.files} damaged files; {time.monotonic() - start:.0f} s"
    )
    return 1 if failed or left else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
