"""`fmlab flight FOLDER`: what the flight recorders of a run's ranks say, after the run has ended."""

import argparse
from pathlib import Path

from fmlab.meter import Dump, read_dumps, stragglers, verdict
from fmlab.train.watchdog import FOLDER


def main(argv: list[str]) -> int:
    """Print the verdict over the dumps of a folder, and on request the last calls of a rank or who was slow.

    Raises ValueError for a folder without dumps, and for a rank that left none.
    """
    parser = argparse.ArgumentParser("fmlab flight", description=__doc__)
    parser.add_argument("folder", help="the run's folder, or one with rank-0.json and so on")
    parser.add_argument("--rank", type=int, help="the last calls of this rank as well, newest last")
    parser.add_argument("--last", type=int, default=20, help="how many calls (20)")
    parser.add_argument(
        "--stragglers", action="store_true", help="how long each rank kept the others waiting"
    )
    args = parser.parse_args(argv)
    if args.last < 1:
        raise ValueError(f"--last must be at least 1, got {args.last}")
    folder = Path(args.folder)
    dumps = read_dumps(folder / FOLDER if (folder / FOLDER).is_dir() else folder)
    print(verdict(dumps))
    if args.rank is not None:
        print(f"\n{calls_of(dumps, args.rank, args.last)}")
    if args.stragglers:
        print(f"\n{stragglers(dumps)}")
    return 0


def calls_of(dumps: list[Dump], rank: int, last: int) -> str:
    """The last calls of a rank: seconds before its dump, the call, whether it ended, bytes, line.

    Raises ValueError for a rank without a dump.
    """
    found = next((dump for dump in dumps if dump.rank == rank), None)
    if found is None:
        known = ", ".join(str(dump.rank) for dump in dumps)
        raise ValueError(f"rank {rank} left no dump; those that did: {known}")
    lines = [f"rank {rank}, its last calls:"]
    for entry in found.entries[-last:]:
        state = "ended" if entry.ended else "open"
        line = f"  {entry.lines[0]}" if entry.lines else ""
        lines.append(
            f"{entry.issued - found.at:>10.3f} s  {entry!s:<40} {state:<6}{entry.bytes:>12,} B{line}"
        )
    return "\n".join(lines)
