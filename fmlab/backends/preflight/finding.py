"""What a pre-flight says."""

from dataclasses import dataclass, field
from typing import Literal

#: error: it will not run, or not rightly. warning: it will cost time or accuracy. note: good to know.
Severity = Literal["error", "warning", "note"]
_ORDER: dict[Severity, int] = {"error": 0, "warning": 1, "note": 2}


@dataclass(frozen=True)
class Finding:
    """One thing to put right.

    check:  the kind, in one or two words, the same each time ("host read", "shapes", …)
    what:   one sentence with the numbers       where: file:line and module, or what part of the job
    remedy: what to do                          times: how often it was seen in one step
    """

    severity: Severity
    check: str
    what: str
    where: str
    remedy: str
    times: int = 1

    def __str__(self) -> str:
        times = f" ({self.times}x a step)" if self.times > 1 else ""
        lines = (f"{self.severity:7} {self.check}: {self.what}{times}", f"at {self.where}", self.remedy)
        return "\n        ".join(lines)


@dataclass(frozen=True)
class Report:
    """All findings, worst first, and the facts that were counted on the way.

    facts: name -> value, in words where it has a unit ("operators of a step": 1903)
    """

    target: str
    findings: tuple[Finding, ...]
    facts: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ordered = sorted(self.findings, key=lambda finding: _ORDER[finding.severity])
        object.__setattr__(self, "findings", tuple(ordered))

    @property
    def ok(self) -> bool:
        """Whether nothing was found that must or should be put right."""
        return all(finding.severity == "note" for finding in self.findings)

    def of(self, check: str) -> list[Finding]:
        """The findings of one kind."""
        return [finding for finding in self.findings if finding.check == check]

    def __str__(self) -> str:
        counts = ", ".join(
            f"{number} {severity}{'s' if number != 1 else ''}"
            for severity in _ORDER
            if (number := sum(finding.severity == severity for finding in self.findings))
        )
        lines = [f"pre-flight for {self.target}: {counts or 'nothing found'}"]
        lines += [f"  {name}: {value}" for name, value in self.facts.items()]
        return "\n".join([*lines, *(str(finding) for finding in self.findings)])
