"""Real ranks: n processes that stay alive between calls, joined in a process group, here or on a cluster.

    with Ranks(4) as ranks:
        print(ranks.run(lambda: torch.distributed.get_rank()))      # [0, 1, 2, 3]

It works from scripts (no main guard needed), tests and notebooks; in notebooks `%load_ext fmlab.lab` adds
the `%%ranks` cell magic on top of it. The processes are forked from a small server that imported torch once,
so it does not matter what the caller did with threads or accelerators before. With a `ClusterTransport` the
same calls go to ranks on many hosts.
"""

import itertools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import EllipsisType
from typing import Any

from fmlab._ranks import pickling
from fmlab._ranks.calls import Call, Sink
from fmlab._ranks.cluster import ClusterTransport
from fmlab._ranks.errors import Interrupted, Outcome, RankError, group_by, name_ranks
from fmlab._ranks.fit import available_memory, check_count, check_fits
from fmlab._ranks.interrupt import HeldInterrupt
from fmlab._ranks.transport import LocalTransport, Message, Settings, Transport

__all__ = [
    "ClusterTransport",
    "Outcome",
    "RankError",
    "Ranks",
    "available_memory",
    "check_fits",
    "namespace",
]

START_TIMEOUT = 55.0
HOSTS_TIMEOUT = 45.0  # of these, on a cluster, until hosts with enough slots have joined
HOSTS_AGAIN = 3.0  # seconds for a host that was lost in a call to come back, before the error is raised

_cells = itertools.count(1)


def namespace() -> dict[str, Any]:
    """On a rank: the names that persist there between calls, the globals of its cells."""
    from fmlab._ranks.worker import NAMESPACE

    return NAMESPACE


class Ranks:
    """n ranks in a gloo process group, alive until closed; a context manager.

    timeout: seconds a call may take, None for no limit; `run` and `run_cell` can override it. A call that
        takes longer, or that can no longer end (a rank died, skipped a collective, entered another one),
        raises RankError, and the ranks are restarted where they cannot go on.
    threads: torch threads of each rank.
    seed: torch, numpy and random of rank r are seeded with seed + r.
    env: environment variables of the ranks beside those of the caller.
    output: called with (rank, message) for everything a rank prints or shows, while the call runs. By
        default lines are printed labelled by rank: at once on a terminal, else after the call, in order.
    transport: how the ranks are started and reached: on this machine by default, with a ClusterTransport on
        the hosts that joined it. The pool ends it when it is closed.

    Raises ValueError when n ranks cannot fit this machine; TimeoutError or RuntimeError naming the ranks that
    did not start. One thread uses a pool at a time.
    """

    def __init__(
        self,
        n: int,
        timeout: float | None = 60,
        threads: int = 1,
        seed: int = 0,
        env: Mapping[str, str] | None = None,
        output: Sink | None = None,
        transport: Transport | None = None,
    ) -> None:
        if transport is None:
            check_fits(n, threads)
        check_count(n, threads)
        _check_limit(timeout)
        self.n, self.timeout, self.output = n, timeout, output
        self._settings = Settings(n, threads, seed, timeout, START_TIMEOUT, HOSTS_TIMEOUT, dict(env or {}))
        self._transport: Transport = transport or LocalTransport()
        self._finalizer = weakref.finalize(self, self._transport.stop)
        self._owner = os.getpid()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self.starts = 0  # how often the ranks were started: a change means that their namespaces are new
        try:
            self.restart()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Ranks({self.n}, timeout={self.timeout}, {'alive' if self.alive else 'closed'})"

    @property
    def alive(self) -> bool:
        """Whether every rank has a running process."""
        return self._transport.alive

    @property
    def pids(self) -> list[int]:
        """Process ids by rank, each on its own host; empty when closed."""
        return list(self._transport.pids)

    @property
    def hosts(self) -> list[str]:
        """The host of each rank on a cluster; empty where all are on this machine."""
        return list(self._transport.hosts)

    def run(
        self, fn: Callable[..., Any], /, *args: Any, timeout: float | EllipsisType | None = ..., **kwargs: Any
    ) -> list[Any]:
        """Call fn(*args, **kwargs) on every rank; returns the results by rank.

        Functions and classes of scripts, notebooks and tests are sent by value. `timeout` overrides the
        pool's for this call (bind a function's own `timeout` with functools.partial). Raises RankError when
        a rank fails, ValueError when something cannot be sent.
        """
        payload = pickling.dumps((fn, args, kwargs), fn, *args, *kwargs.values())
        name = getattr(fn, "__qualname__", None) or type(fn).__name__
        return self._values(self._call("call", payload, name, timeout))

    def run_cell(
        self,
        source: str,
        ns: Mapping[str, Any] | None = None,
        *,
        timeout: float | EllipsisType | None = ...,
        file: str | None = None,
        show: bool = True,
        keep: bool = True,
        names: bytes | None = None,
    ) -> list[Any]:
        """Run source on every rank, in the namespace that persists there; returns the last value of each.

        The value is that of a final expression. ns: names to assign on the ranks first. show: whether the
        value is shown as in a notebook. keep: whether the values are sent back (else each is None). names:
        `ns`, pickled already by the notebook magic.
        """
        if names is None and ns:
            names = pickling.dumps(dict(ns), *ns.values())
        file = file or f"<ranks cell {next(_cells)}>"
        payload = {"source": source, "file": file, "show": show, "keep": keep, "names": names}
        return self._values(self._call("cell", payload, file.strip("<>"), timeout))

    def restart(self) -> None:
        """End all ranks and start new ones, with empty namespaces and a fresh process group."""
        self._check_open()
        self.starts += 1
        self._transport.start(self._settings)

    def close(self) -> None:
        """End all ranks. The server that forked them ends by itself when no pool needs it for a while."""
        self._finalizer()

    def _call(self, kind: str, payload: Any, name: str, timeout: float | EllipsisType | None) -> Call:
        if not self._lock.acquire(blocking=False):
            raise RuntimeError("these ranks are running a call; a pool runs one call at a time")
        try:
            self._check_open()
            self._check_deaths(name)
            if not self._transport.pids:  # they could not be restarted after a host was lost
                self.restart()
            limit = self.timeout if isinstance(timeout, EllipsisType) else timeout
            _check_limit(limit)
            printer = None if self.output else _Printer()
            call = Call(self._transport, self.n, next(self._numbers), name, limit, self.output or printer)  # type: ignore[arg-type]
            try:
                self._finish(call, kind, payload)
            finally:
                if printer:
                    printer.close()
            return call
        finally:
            self._lock.release()

    def _check_open(self) -> None:
        if self._owner != os.getpid():
            raise RuntimeError(f"these ranks belong to process {self._owner}, of which this one is a fork")
        if not self._finalizer.alive:
            raise RuntimeError("these ranks are closed; make a new Ranks")

    def _check_deaths(self, name: str) -> None:
        """RankError if a rank died since the last call: what was assigned on the ranks is lost."""
        died = [(rank, m) for rank, m in self._transport.receive(0) if m[0] == "died"]
        if not died:
            return
        hosts = self.hosts or [""] * self.n
        outcomes = [Outcome(rank, "died", message[1], host=hosts[rank]) for rank, message in died]
        first = outcomes[0]
        who = name_ranks([o.rank for o in outcomes if o.error == first.error], hosts=self.hosts)
        headline = f"{who} died before the call of {name}: {first.error}"
        failure = RankError(first.rank, name, f"died: {first.error}", outcomes, headline)
        self._repair(failure)
        raise failure

    def _repair(self, error: RankError | None) -> None:
        """Restart the ranks after `error`, which says what became of them: it must be heard even when hosts
        are missing now."""
        self._check_open()
        self.starts += 1
        try:
            self._transport.start(replace(self._settings, host_timeout=HOSTS_AGAIN))
        except (TimeoutError, RuntimeError) as cannot:
            if error is None:
                raise
            error.advice = f"The ranks could not be restarted; the next call tries again. {_sentence(cannot)}"
        else:
            if error is not None:
                error.restarted = True

    def _finish(self, call: Call, kind: str, payload: Any) -> None:
        """Run a call to its end; what it did to the ranks is repaired before anything is raised."""
        try:
            with HeldInterrupt() as interrupt:
                self._transport.send_all((kind, call.number, payload, call.timeout))
                error = call.wait(interrupt)
                if call.out_of_step():
                    self._repair(error)
                if interrupt.pending:
                    interrupt.pending = False
                    raise Interrupted(error)
        except (RankError, Interrupted):
            raise
        except BaseException:
            self.restart()
            raise
        if error is not None:
            raise error

    @staticmethod
    def _values(call: Call) -> list[Any]:
        data = [call.outcomes[rank].value for rank in range(call.n)]
        return [pickling.loads(one) if one is not None else None for one in data]


class _Printer:
    """Shows what ranks print, labelled: at once on a terminal, else at the end in order of rank."""

    def __init__(self) -> None:
        self.live = sys.stdout.isatty()
        self.kept: dict[int, list[Message]] = {}

    def __call__(self, rank: int, message: Message) -> None:
        if message[0] == "assigned":
            return
        if self.live:
            self.show([rank], message)
        else:
            self.kept.setdefault(rank, []).append(message)

    def show(self, ranks: Sequence[int], message: Message) -> None:
        if message[0] == "rich":
            message = ("text", "stdout", message[1].get("text/plain", "") + "\n")
        stream = sys.stderr if message[1] == "stderr" else sys.stdout
        stream.write(label(message[2], name_ranks(ranks)))
        stream.flush()

    def close(self) -> None:
        for ranks, messages in merged(self.kept):
            for message in messages:
                self.show(ranks, message)
        self.kept = {}


def merged(kept: Mapping[int, Sequence[Message]]) -> list[tuple[list[int], list[Message]]]:
    """Outputs by rank, ranks with equal output together, adjoining texts of a stream joined."""
    joined: dict[int, list[Message]] = {}
    for rank in sorted(kept):
        out = joined.setdefault(rank, [])
        for message in kept[rank]:
            if out and message[0] == "text" and out[-1][:2] == message[:2]:
                out[-1] = (*message[:2], out[-1][2] + message[2])
            else:
                out.append(message)
    for out in joined.values():
        out[:] = [(*m[:2], _settled(m[2])) if m[0] == "text" else m for m in out]
    groups = group_by(list(joined), lambda rank: repr(joined[rank]))
    return [(ranks, joined[ranks[0]]) for ranks in groups]


def _settled(text: str) -> str:
    """Text as a terminal would leave it: of a line that was overwritten, a progress bar's, the last state."""
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))


def _sentence(error: Exception) -> str:
    return str(error)[:1].upper() + str(error)[1:]


def label(text: str, who: str) -> str:
    """Each line of `text` with `[who] ` before it."""
    lines = text.removesuffix("\n").split("\n")
    return "".join(f"[{who}] {line}\n" for line in lines)


def _check_limit(seconds: float | None) -> None:
    if seconds is not None and not seconds > 0:  # nan too
        raise ValueError(f"timeout must be a positive number of seconds or None, not {seconds}")
