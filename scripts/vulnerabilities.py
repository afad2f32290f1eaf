"""Ask a vulnerability service about every pin, by pip-audit in an environment of its own that is thrown away.

The services (osv.dev, and PyPI's own) need the internet; a mirror of PyPI often has packages only. pip-audit
then calls a package that the service does not know "skipped" and still ends with "No known vulnerabilities
found": so a service is first asked for a release that is known to be vulnerable, and believed only when it
says so.
"""

import json
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import install

PIP_AUDIT = "pip-audit==2.10.1"
SERVICES = ("osv", "pypi")
KNOWN = "jinja2==2.4.1"  # CVE-2014-0012, CVE-2016-10745, CVE-2019-10906 and later ones
SECONDS = 300.0


@dataclass(frozen=True)
class Answer:
    """What a service says of some pins: vulnerable releases and their fixes, and what it does not know."""

    found: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


def read(answer: str) -> Answer:
    """pip-audit's JSON. Raises ValueError for anything else."""
    found, unknown = [], []
    for one in json.loads(answer)["dependencies"]:
        if "skip_reason" in one:
            unknown.append(one["name"])
        for flaw in one.get("vulns", []):
            fixes = ", ".join(flaw["fix_versions"]) or "no release yet"
            found.append(f"{one['name']} {one['version']}: {flaw['id']}, mended in {fixes}")
    return Answer(tuple(found), tuple(unknown))


class Auditor:
    """pip-audit in a temporary environment. Use it as a context; SetupError when it cannot be installed."""

    def __enter__(self) -> "Auditor":
        self._folder = tempfile.TemporaryDirectory()
        venv = Path(self._folder.name) / "venv"
        tools = install.Tools.find()
        install.create_venv(venv, tools)
        self._python = venv / "bin" / "python"
        install.run([str(self._python), "-m", "pip", "install", "--quiet", PIP_AUDIT], venv)
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    def service(self) -> str | None:
        """The first service that knows of a flaw that everybody knows of; None when there is none here."""
        known = Path(self._folder.name) / "known.txt"
        known.write_text(f"{KNOWN}\n")
        for service in SERVICES:
            answer = self.ask(known, service)
            if answer is not None and answer.found:
                return service
        return None

    def ask(self, pins: Path, service: str) -> Answer | None:
        """What the service says of the pins; None when it does not answer."""
        command = [
            str(self._python),
            "-m",
            "pip_audit",
            "--requirement",
            str(pins),
            "--no-deps",
            "--disable-pip",
        ]
        command += ["--vulnerability-service", service, "--format", "json", "--progress-spinner", "off"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
            return read(done.stdout)
        except (subprocess.TimeoutExpired, ValueError, KeyError):
            return None
