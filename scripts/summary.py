"""Count the results of test steps, from the XML that pytest writes, and put them in a table."""

import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Count:
    """The results of one step."""

    name: str
    seconds: float
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    note: str = ""
    skip_reasons: tuple[str, ...] = ()

    def add_failure(self, note: str) -> "Count":
        """One more failure, of the step itself rather than of a test."""
        return replace(self, failed=self.failed + 1, note=note)


def count_junit(name: str, seconds: float, xml: str) -> Count:
    """Count each test once: failed when its call, set-up or tear-down failed."""
    outcomes: dict[tuple[str, str], set[str]] = {}
    reasons = []
    for number, case in enumerate(ElementTree.fromstring(xml).iter("testcase")):
        # an error at tear-down is a second entry of the same test; nameless entries are collection errors
        key = (case.get("classname", ""), case.get("name") or f"entry {number}")
        found = {child.tag for child in case} & {"failure", "error", "skipped"}
        outcomes.setdefault(key, set()).update(found)
        if found == {"skipped"}:
            skipped = case.find("skipped")
            reasons.append(skipped.get("message", "no reason given") if skipped is not None else "")
    failed = sum(bool(found & {"failure", "error"}) for found in outcomes.values())
    skipped_only = sum(found == {"skipped"} for found in outcomes.values())
    passed = len(outcomes) - failed - skipped_only
    return Count(name, seconds, passed, failed, skipped_only, skip_reasons=tuple(reasons))


def table(counts: Sequence[Count]) -> str:
    """One line a step: its name, seconds, results, and what went wrong with the step itself."""
    rows = [f"{'step':<12}{'seconds':>8}{'passed':>8}{'failed':>8}{'skipped':>9}  result"]
    for count in counts:
        result = "FAILED" if count.failed else "ok"
        rows.append(
            f"{count.name:<12}{count.seconds:>8.0f}{count.passed:>8}{count.failed:>8}{count.skipped:>9}  "
            + (f"{result}: {count.note}" if count.note else result)
        )
    total = sum(count.seconds for count in counts)
    return "\n".join([*rows, f"{'all':<12}{total:>8.0f}"])


def final_line(counts: Sequence[Count]) -> str:
    passed, failed = sum(c.passed for c in counts), sum(c.failed for c in counts)
    return f"{passed} passed, {failed} failed, {sum(c.skipped for c in counts)} skipped"
