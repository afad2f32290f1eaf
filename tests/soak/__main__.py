"""`python -m tests.soak`: kills at random moments over all engines, damaged files, command lines drawn at
random; bounded in time."""

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from tests.soak.cases import CASES
from tests.soak.damage import damage
from tests.soak.elastic import NAMES, kill_under_torchrun
from tests.soak.fuzz import fuzz
from tests.soak.kills import Killed, kill


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make soak ARGS=")
    parser.add_argument("--kills", type=int, default=100, help="over all cases (default: %(default)s)")
    parser.add_argument(
        "--elastic", type=int, default=8, help="kills under torchrun beside them (default: %(default)s)"
    )
    parser.add_argument("--files", type=int, default=200, help="damaged ones (default: %(default)s)")
    parser.add_argument("--lines", type=int, default=500, help="command lines (default: %(default)s)")
    parser.add_argument(
        "--minutes", type=float, default=30.0, help="begin no case after (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="cases with one of these in their name, a,b,c")
    return parser.parse_args(argv)


def _shares(total: int, cases: int) -> Iterator[int]:
    """How many kills each case gets."""
    return (total // cases + (number < total % cases) for number in range(cases))


def _planned(args: argparse.Namespace, draw: random.Random) -> list[tuple[str, Callable[[Path], Killed]]]:
    """(name, what kills in a folder) for each case that gets a kill."""
    cases = [case for case in CASES if any(part in case.name for part in args.only.split(","))]
    elastic = [case for case in cases if case.name in NAMES]
    plans: list[tuple[str, Callable[[Path], Killed]]] = []
    for case, share in zip(cases, _shares(args.kills, max(len(cases), 1)), strict=True):
        if share:
            plans.append((case.name, partial(kill, case, number=share, draw=draw)))
    for number, (case, share) in enumerate(
        zip(elastic, _shares(args.elastic, max(len(elastic), 1)), strict=False)
    ):
        if share:
            beside = bool(number % 2)
            hurt = partial(kill_under_torchrun, case, number=share, draw=draw, beside=beside)
            plans.append((f"{case.name}, under torchrun", hurt))
    return plans


def main(argv: list[str]) -> int:
    """0 when all held; 1 with what did not."""
    args = _arguments(argv)
    draw, start = random.Random(args.seed), time.monotonic()
    plans = _planned(args, draw)
    failed = kills = in_a_save = run = 0
    for name, hurt in plans:
        if time.monotonic() - start > 60 * args.minutes:
            break
        run += 1
        with tempfile.TemporaryDirectory() as folder:
            try:
                done = hurt(Path(folder))
            except AssertionError as error:
                failed += 1
                print(f"FAILED {error}", flush=True)
                continue
        kills, in_a_save = kills + done.kills, in_a_save + done.in_a_save
        print(f"{name}: {done.kills} kills, {done.in_a_save} of them in a save; bitwise", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        counts = damage(Path(folder), args.files, draw)
    print(", ".join(f"{number} {what}" for what, number in sorted(counts.items())))
    try:
        with tempfile.TemporaryDirectory() as folder:
            ends = fuzz(Path(folder), args.lines, draw) if args.lines else {}
        print("command lines:", ", ".join(f"{number} {end}" for end, number in sorted(ends.items())))
    except AssertionError as error:
        failed += 1
        print(f"FAILED {error}", flush=True)
    left = len(plans) - run
    print(
        f"{kills} kills, {in_a_save} in a save, over {run} cases; {failed} failed, {left} not run; "
        f"{args.files} damaged files; {time.monotonic() - start:.0f} s"
    )
    return 1 if failed or left else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
