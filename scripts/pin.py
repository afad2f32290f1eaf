"""Write constraints.txt from the packages of .venv: run it when the tested set changes, then `make test`.

Markers and lines for other systems (a package that only macOS needs, a release that asks for a newer Python)
are kept from the present file.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADER = """\
# The tested set: every package that `make lab` and `make test` install, pinned. Written by scripts/pin.py.
# It serves Python 3.11 to 3.14 on Linux (x86_64, arm64) and macOS (arm64); the xla extra needs its own set.
"""


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


def main() -> None:
    python = ROOT / ".venv" / "bin" / "python"
    if not python.exists():
        sys.exit("there is no .venv to read; run 'make test' first")
    command = [str(python), "-m", "pip", "freeze", "--exclude-editable"]
    freeze = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    path = ROOT / "constraints.txt"
    lines = pins(freeze, path.read_text() if path.exists() else "")
    path.write_text(HEADER + "\n".join(lines) + "\n")
    print(f"{path.name}: {len(lines)} pins")


if __name__ == "__main__":
    main()
