"""`RankError`: what happened to each rank of a call that failed, told once and briefly."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fmlab.entered import name_ranks
from fmlab.stacks import Frame


@dataclass
class Outcome:
    """What one rank did in a call.

    kind: "ok" (returned), "raised", "interrupted", "died", "stuck" (had to be ended).
    """

    rank: int
    kind: str
    error: str = ""  # "ValueError: not enough rows"
    where: str = ""  # the collective or function it was in, "all_reduce #3 float32[4]"
    frames: list[Frame] = field(default_factory=list)
    value: Any = None
    log: Any = None

    @property
    def line(self) -> str:
        """The last line of the user's own code it was in, or ""."""
        return str(self.frames[-1]) if self.frames else ""


class RankError(RuntimeError):
    """A call failed on one or more ranks.

    Attributes: rank (the first rank to blame), call (the collective or function it was in), error (the
    remote error, "ValueError: …", or what happened instead), outcomes (an `Outcome` per rank), restarted
    (whether the ranks had to be started anew, which empties their namespaces), advice (what to do, "" for
    nothing to say).
    """

    def __init__(
        self, rank: int, call: str, error: str, outcomes: Sequence[Outcome], headline: str = ""
    ) -> None:
        self.rank = rank
        self.call = call
        self.error = error
        self.outcomes = list(outcomes)
        self.restarted = False
        self.advice = ""
        self.headline = headline
        super().__init__(rank, call, error)

    def __reduce__(self) -> Any:
        return (RankError, (self.rank, self.call, self.error, self.outcomes, self.headline))

    def __str__(self) -> str:
        return "\n".join(self.report())

    def report(self) -> list[str]:
        """The message, line by line: who failed, where, and what the other ranks were doing."""
        culprits = [o for o in self.outcomes if o.kind in ("raised", "interrupted") and o.error == self.error]
        first = next((o for o in self.outcomes if o.rank == self.rank), None)
        who = name_ranks([o.rank for o in culprits], len(self.outcomes)) if culprits else f"rank {self.rank}"
        lines = [self.headline or f"{who}: {self.error}"]
        if first is not None and not self.headline:
            if first.where:
                lines.append(f"  in {first.where}")
            lines += [f"  at {frame}" for frame in first.frames]
        told = {o.rank for o in culprits} | ({self.rank} if not self.headline else set())
        for outcomes in group_by(
            [o for o in self.outcomes if o.rank not in told], lambda o: (o.kind, o.error, o.where, o.line)
        ):
            one = outcomes[0]
            text = f"  {name_ranks([o.rank for o in outcomes])}: {_KINDS.get(one.kind, one.kind)}"
            text += f" {one.error}" if one.error and one.kind in ("raised", "died") else ""
            text += f" in {one.where}" if one.where else ""
            text += f", at {one.line}" if one.line else ""
            lines.append(text)
        if self.restarted:
            lines.append("  The ranks were restarted: names assigned on them are gone.")
        if self.advice:
            lines.append(f"  {self.advice}")
        return lines

    def _render_traceback_(self) -> list[str]:
        """IPython shows these lines instead of the frames of the pool."""
        return [f"RankError: {self.report()[0]}", *self.report()[1:]]


class Interrupted(KeyboardInterrupt):
    """The user interrupted a call: where the ranks were, in the notebook's words."""

    def __init__(self, error: RankError | None) -> None:
        self.error = error
        super().__init__("\n".join(self._lines()))

    def _lines(self) -> list[str]:
        if self.error is None:
            return ["the call had just ended on all ranks"]
        return ["stopped on the ranks", *self.error.report()[1:]]

    def _render_traceback_(self) -> list[str]:
        first, *rest = self._lines()
        return [f"KeyboardInterrupt: {first}", *rest]


_KINDS = {
    "ok": "returned",
    "raised": "raised",
    "died": "died:",
    "stuck": "still",
    "interrupted": "stopped",
}


def group_by(items: Sequence[Any], key: Any) -> list[list[Any]]:
    """Items with equal keys together, in order of first appearance."""
    groups: dict[Any, list[Any]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())
