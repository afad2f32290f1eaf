"""Write constraints.txt from the packages of .venv, and those of the other environments from theirs.

Run it when the tested set changes, then `make test`. Markers and lines for other systems (a package that only
macOS needs, a release that asks for a newer Python) are kept from the present file.
"""

import re
import subprocess
import sys

from environment import FRONTENDS, MAIN, XLA, Environment

HEADERS = {
    MAIN.constraints: """\
# The tested set: every package that `make lab` and `make test` install, pinned. Written by scripts/pin.py.
# It serves Python 3.11 to 3.14 on Linux (x86_64, arm64) and macOS (arm64); the xla extra needs its own set.
""",
    FRONTENDS.constraints: """\
# The tested set of .venv-frontends: what `make lab-frontends` and `make test` install there. Written by
# scripts/pin.py. It serves Python 3.11 to 3.13 on Linux (x86_64).
""",
    XLA.constraints: """\
# The tested set of .venv-xla: what `make lab-xla` and `make test` install there. Written by scripts/pin.py.
# It serves Python 3.11 to 3.13 on Linux (x86_64), the only system for which torch_xla 2.9 was made.
""",
}


def pins(freeze: str, present: str) -> list[str]:
    """Sorted `name==version[ ; marker]` lines; `present` is the text of the file that is replaced."""
    kept = dict(_parse(line) for line in present.splitlines() if "==" in line and not line.startswith("#"))
    lines = {}
    for line in freeze.splitlines():
        if "==" in line and not line.startswith(("#", "-")):
            name, (version, _) = _parse(line)
            marker = kept.get(name, ("", ""))[1]
            lines[name.lower()] = f"{name}=={version}" + (f" ; {marker}" if marker else "")
    for name, (version, marker) in kept.items():
        lines.setdefault(name.lower(), f"{name}=={version}" + (f" ; {marker}" if marker else ""))
    return [lines[name] for name in sorted(lines)]


def _parse(line: str) -> tuple[str, tuple[str, str]]:
    requirement, _, marker = line.partition(" ;")
    name, version = requirement.strip().split("==")
    return re.sub(r"[-_.]+", "-", name), (version.split("+")[0], marker.strip())


def write(kind: Environment) -> None:
    """Pin what is installed in an environment. Exits when it is not there."""
    if not kind.python.exists():
        sys.exit(f"there is no {kind.folder} to read; run 'make test' first")
    command = [str(kind.python), "-m", "pip", "freeze", "--exclude-editable"]
    freeze = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    path = kind.root / kind.constraints
    lines = pins(freeze, path.read_text() if path.exists() else "")
    path.write_text(HEADERS[kind.constraints] + "\n".join(lines) + "\n")
    print(f"{path.name}: {len(lines)} pins")


def main(argv: list[str]) -> None:
    for kind in (MAIN, XLA, FRONTENDS):
        if not argv or kind.folder in argv:
            write(kind)


if __name__ == "__main__":
    main(sys.argv[1:])
