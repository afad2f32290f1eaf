"""One call on all ranks, seen from the parent: wait for it, watch it, and say when it cannot end.

gloo tells only the neighbours of a rank that is gone, and says nothing when ranks disagree, so the parent
watches: it asks each running rank where it is, compares the logs of collectives, and ends the wait as soon as
it is certain that the call cannot end, or at the time limit.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fmlab._ranks import log as collectives
from fmlab._ranks import stack
from fmlab._ranks.errors import Frame, Outcome, RankError, name_ranks
from fmlab._ranks.interrupt import HeldInterrupt
from fmlab._ranks.transport import Message, Transport

FIRST_LOOK = 0.5  # seconds into a call, or after the first rank ended, before asking where ranks are
LOOK_EVERY = 1.0  # at first; later a fifth of the time so far, at most LOOK_SELDOM
LOOK_SELDOM = 5.0
ANSWER = 1.0  # seconds a rank has to say where it is
MOST_TEXT = 1_000_000  # characters a rank may print in a call
INTERRUPT_CHECK = 0.1  # seconds until a pending interrupt is seen
INTERRUPT = 1.5  # seconds a rank has to stop when interrupted

Sink = Callable[[int, Message], None]  # what to do with ("text", …), ("rich", …), ("assigned", …) of a rank


@dataclass
class Call:
    """The state of one call: outcomes of ranks that finished, positions of the others."""

    transport: Transport
    n: int
    number: int
    name: str
    timeout: float | None
    sink: Sink
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    positions: dict[int, dict[str, Any]] = field(default_factory=dict)
    before: dict[int, dict[str, Any]] = field(default_factory=dict)
    printed: dict[int, int] = field(default_factory=dict)  # characters
    verdict: str = ""  # why the wait ended early

    @property
    def running(self) -> list[int]:
        return [rank for rank in range(self.n) if rank not in self.outcomes]

    def wait(self, interrupt: HeldInterrupt) -> RankError | None:
        """Wait for the end of the call; returns the error to raise, if any.

        An interrupt stops the call on all ranks.
        """
        start = time.monotonic()
        deadline = start + self.timeout if self.timeout is not None else float("inf")
        look = start + FIRST_LOOK
        ending = False  # a rank has returned or failed, so the others should too
        while self.running and not self.verdict:
            if interrupt.pending:
                self.stop_running()
                break
            now = time.monotonic()
            if now >= deadline:
                self.look()
                self.verdict = f"time limit of {self.timeout:g} s"
                break
            if now >= look:
                self.look()
                now = time.monotonic()
                look = now + min(max(LOOK_EVERY, (now - start) / 5), LOOK_SELDOM)
                self.judge()
                continue
            self.take(self.transport.receive(min(deadline, look, now + INTERRUPT_CHECK) - now))
            if self.outcomes and not ending:
                ending = True
                look = min(look, time.monotonic() + FIRST_LOOK)
        for rank in self.running:
            self.outcomes[rank] = self.stuck(rank)
        return self.conclude()

    def take(self, messages: list[tuple[int, Message]]) -> None:
        """Note what ranks sent."""
        for rank, message in messages:
            kind = message[0]
            if kind == "text":
                self.take_text(rank, message)
            elif kind in ("rich", "assigned"):
                self.sink(rank, message)
            elif kind == "done" and message[1] == self.number:
                self.outcomes[rank] = Outcome(rank, **message[2])
            elif kind == "died" and rank not in self.outcomes:
                self.outcomes[rank] = Outcome(rank, "died", message[1], self.name)
                if message[2]:
                    self.sink(rank, ("text", "stderr", message[2] + "\n"))
            elif kind == "where":
                self.positions[rank] = message[2]

    def take_text(self, rank: int, message: Message) -> None:
        """Pass on what a rank printed, up to MOST_TEXT: an endless loop must not fill the parent's memory."""
        room = MOST_TEXT - self.printed.get(rank, 0)
        self.printed[rank] = self.printed.get(rank, 0) + len(message[2])
        if room > 0:
            cut = "\n… more output was dropped\n" if len(message[2]) > room else ""
            self.sink(rank, (*message[:2], message[2][:room] + cut))

    def look(self) -> None:
        """Ask every running rank where it is."""
        self.before, self.positions = self.positions, {}
        for rank in self.running:
            self.transport.send(rank, ("where", self.number))
        until = time.monotonic() + ANSWER
        while any(rank not in self.positions for rank in self.running) and time.monotonic() < until:
            self.take(self.transport.receive(until - time.monotonic()))

    def stop_running(self) -> None:
        """Interrupt the running ranks; those that do not stop in time count as stuck."""
        for rank in self.running:
            self.transport.interrupt(rank)
        until = time.monotonic() + INTERRUPT
        while self.running and time.monotonic() < until:
            self.take(self.transport.receive(until - time.monotonic()))
        if self.running:
            self.look()

    # -- deciding ------------------------------------------------------------------------------------

    def judge(self) -> None:
        """Set `verdict` when the call can no longer end."""
        gone = [o.rank for o in self.outcomes.values() if o.kind == "died"]
        if gone:
            self.verdict = "died"  # gloo cannot go on without a member
            return
        difference = self.disagreement()
        if difference is not None:
            self.verdict = "disagreement"
            return
        failed = [o for o in self.outcomes.values() if o.kind != "ok"]
        waiting = [r for r in self.running if self.positions.get(r, {}).get("where")]
        still = [r for r in waiting if self.before.get(r, {}).get("frames") == self.positions[r]["frames"]]
        if failed and still and len(still) == len(self.running):
            self.verdict = "a rank failed"  # and the others wait for it in point-to-point calls

    def logs(self) -> dict[int, collectives.Log]:
        logs = {r: p["log"] for r, p in self.positions.items() if p["log"] and r not in self.outcomes}
        return logs | {r: o.log for r, o in self.outcomes.items() if o.log}

    def disagreement(self) -> collectives.Disagreement | None:
        finished = [r for r, o in self.outcomes.items() if o.kind in ("ok", "raised", "interrupted")]
        return collectives.compare(self.logs(), finished)

    def stuck(self, rank: int) -> Outcome:
        position = self.positions.get(rank)
        if position is None:  # its threads cannot run: some call in C holds the interpreter's lock
            text = self.transport.stacks(rank)
            if text:
                self.sink(rank, ("text", "stderr", text))
            return Outcome(rank, "stuck", "", "a call that does not let it answer", stack.of_stacks(text))
        return Outcome(rank, "stuck", "", self.waits_in(position), position["frames"], log=position["log"])

    def waits_in(self, position: dict[str, Any]) -> str:
        log = position["log"]
        return str(log.open[-1]) if log and log.open else position["where"]

    # -- reporting -----------------------------------------------------------------------------------

    def who(self, ranks: Sequence[int], total: int | None = None) -> str:
        return name_ranks(ranks, total, self.transport.hosts)

    def conclude(self) -> RankError | None:
        outcomes = [self.outcomes[rank] for rank in range(self.n)]
        for outcome, host in zip(outcomes, self.transport.hosts, strict=False):
            outcome.host = host
        difference = self.disagreement()
        died = [o for o in outcomes if o.kind == "died"]
        raised = [o for o in outcomes if o.kind in ("raised", "interrupted")]
        stuck = [o for o in outcomes if o.kind == "stuck"]
        if died:
            return RankError(died[0].rank, died[0].where, f"died: {died[0].error}", outcomes)
        if raised:
            first = min(raised, key=lambda o: (_secondary(o), o.rank))
            return RankError(first.rank, first.where or self.name, first.error, outcomes)
        if difference is not None:
            return self.disagreed(difference, outcomes)
        if stuck:
            return self.timed_out(stuck, outcomes)
        return None

    def disagreed(self, difference: collectives.Disagreement, outcomes: list[Outcome]) -> RankError:
        """The report of ranks that entered different collectives."""
        culprits = difference.culprits
        entered = difference.entered
        wrong = entered[culprits[0]]
        rest = {r: one for r, one in entered.items() if r not in culprits and one is not None}
        right = next(iter(rest.values()), None)
        for outcome in outcomes:
            one = entered.get(outcome.rank)
            if one is not None:
                outcome.where = str(one)
                outcome.frames = self.locate(one, outcome.rank) or outcome.frames
            elif outcome.rank in entered and outcome.kind == "ok":
                outcome.where = ""
        others = self.who(list(rest))
        if right is None:  # a few entered what the others did not
            absent = self.who([r for r, one in entered.items() if one is None])
            headline = f"{self.who(culprits)} entered {wrong}, which {absent} did not enter"
        elif wrong is None:
            verb = "did" if outcomes[culprits[0]].kind == "stuck" else "returned and did"
            headline = f"{self.who(culprits)} {verb} not enter {right}, which {others} entered"
        else:
            headline = f"{self.who(culprits)} entered {wrong} where {others} entered {right}"
        return RankError(culprits[0], str(wrong or right), "disagreement", outcomes, headline)

    def locate(self, one: collectives.Collective, rank: int) -> list[Frame]:
        """The source lines that entered a collective, asked of the rank if it still runs."""
        found: dict[int, list[Frame]] = {}
        self.transport.send(rank, ("lines", self.number, one.group, one.number))
        until = time.monotonic() + 5
        while rank not in found and time.monotonic() < until:
            for sender, message in self.transport.receive(until - time.monotonic()):
                if message[0] == "lines":
                    found[sender] = message[2]
                elif message[0] == "died":
                    return []
        return found.get(rank, [])

    def timed_out(self, stuck: list[Outcome], outcomes: list[Outcome]) -> RankError:
        """The report of a call that did not end: who keeps whom waiting."""
        absent, waits = self.absent(outcomes)
        if absent:
            others = self.who(waits)
            call = outcomes[waits[0]].where
            headline = f"{self.verdict}: {self.who(absent)} did not enter {call}, in which {others} waited"
            return RankError(absent[0], call, self.verdict, outcomes, headline)
        first = stuck[0]
        headline = f"{self.verdict}: {self.who([o.rank for o in stuck], self.n)} had not returned"
        return RankError(first.rank, first.where or self.name, self.verdict, outcomes, headline)

    def absent(self, outcomes: list[Outcome]) -> tuple[list[int], list[int]]:
        """Ranks that did not enter the collective others wait in, and those others."""
        for outcome in outcomes:
            if outcome.kind == "stuck" and outcome.log and outcome.log.open:
                one = outcome.log.open[-1]
                members = outcome.log.members.get(one.group, ())
                logs = {r: outcomes[r].log for r in members}
                absent = [r for r, log in logs.items() if log and log.last.get(one.group, 0) < one.number]
                if absent:
                    return absent, [r for r in members if r not in absent]
        return [], []

    def out_of_step(self) -> bool:
        """Whether the ranks' process groups can no longer be used together."""
        kinds = {o.kind for o in self.outcomes.values()}
        if kinds & {"died", "stuck"} or any(_secondary(o) for o in self.outcomes.values()):
            return True
        return collectives.out_of_step({r: o.log for r, o in self.outcomes.items() if o.log})


def _secondary(outcome: Outcome) -> bool:
    """An error of gloo, which breaks its connections and is mostly the echo of another rank's end."""
    words = ("Connection closed", "Connection reset", "gloo", "Broken pipe", "Timed out waiting")
    return outcome.kind == "raised" and any(word in outcome.error for word in words)
