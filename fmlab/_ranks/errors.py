"""`RankError`: what happened to each rank of a call that failed, told once and briefly."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fmlab import entered
from fmlab.stacks import Frame

Hosts = Sequence[str] | Mapping[int, str]  # by rank; empty where they go without saying


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
    host: str = ""  # where the rank was, on a cluster

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
        culprits = [o for o in self.outcomes if _has(o, self.error)]
        first = next((o for o in self.outcomes if o.rank == self.rank), None)
        hosts = self._hosts()
        who = name_ranks([o.rank for o in culprits] or [self.rank], len(self.outcomes), hosts)
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
            text = (
                f"  {name_ranks([o.rank for o in outcomes], hosts=hosts)}: {_KINDS.get(one.kind, one.kind)}"
            )
            text += f" {one.error}" if one.error and one.kind in ("raised", "died") else ""
            text += f" in {one.where}" if one.where else ""
            text += f", at {one.line}" if one.line else ""
            lines.append(text)
        if self.restarted:
            lines.append("  The ranks were restarted: names assigned on them are gone.")
        if self.advice:
            lines.append(f"  {self.advice}")
        return lines

    def _hosts(self) -> dict[int, str]:
        """Hosts by rank; empty where they go without saying."""
        return {o.rank: o.host for o in self.outcomes} if any(o.host for o in self.outcomes) else {}

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


def _has(outcome: Outcome, error: str) -> bool:
    """Whether an outcome is the error of a call, told in the same words."""
    return (outcome.kind in ("raised", "interrupted") and outcome.error == error) or (
        outcome.kind == "died" and f"died: {outcome.error}" == error
    )


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


def name_ranks(ranks: Sequence[int], total: int | None = None, hosts: Hosts = ()) -> str:
    """`[0, 1, 2]` → "ranks 0-2"; "all 4 ranks" when it is everyone; "rank 5 (host b)" given hosts."""
    name = entered.name_ranks(ranks, total)
    if not hosts or name.startswith("all "):
        return name
    where = list(dict.fromkeys(hosts[rank] for rank in sorted(ranks)))
    return f"{name} (host{'s' if len(where) > 1 else ''} {', '.join(where)})"
