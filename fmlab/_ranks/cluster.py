"""Ranks on many hosts: agents join a head, which tells them to fork ranks and carries their messages.

    head                              each host
    ClusterTransport --- channel ---- agent.py ---- socket pair ---- worker.py (a rank)

The head listens; `fmlab ranks join HOST:PORT` on a host makes it a member with so many slots. The ranks' own
process group meets in a TCPStore at the head and then connects rank to rank.
"""

import os
import pickle
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fmlab._ranks import token as tokens
from fmlab._ranks.channel import Channel
from fmlab._ranks.inbox import Inbox
from fmlab._ranks.interrupt import HeldInterrupt
from fmlab._ranks.link import Link, assign
from fmlab._ranks.listener import Listener, name_address, parse_address
from fmlab._ranks.pulse import AGENT_SILENT, Pulse
from fmlab._ranks.rendezvous import check_reach, open_store
from fmlab._ranks.transport import Message, Settings, wait_ready
from fmlab.addresses import is_loopback


class ClusterTransport:
    """Ranks on the hosts that join this head: `Ranks(16, transport=ClusterTransport("10.0.0.1:29400", ...))`.

    listen: "ADDRESS:PORT" that hosts connect to; port 0 takes a free one. With an address other than loopback
        a token is required.
    token, token_file: the secret shared with the agents, or the file with it (mode 0600, made by
        `fmlab ranks token FILE`). On loopback a token is made where none is given, in a file that
        `token_file` then names.

    Who knows the token can run any code as you, on the head and on all hosts. Messages are proved to come
    from the other end, but not encrypted, and the ranks' own connections are neither: use it on a private
    network. Raises ValueError for an address or token that cannot be used, OSError when the port is taken.
    """

    def __init__(
        self,
        listen: str = "127.0.0.1:0",
        *,
        token: str | None = None,
        token_file: str | Path | None = None,
    ) -> None:
        self._host, self._port = parse_address(listen)
        self.token_file: Path | None = Path(token_file) if token_file is not None else None
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._token = self._find_token(token)
        self._owner = os.getpid()
        self._inbox = Inbox()
        self._links: dict[str, Link] = {}
        self._changed = threading.Condition()
        self._gone: list[str] = []  # hosts that were here, and why they are not any more
        self._starts = self._joined = 0
        self._pids: list[int] = []
        self._died: set[int] = set()
        self._by_rank: dict[int, Link] = {}
        self._store: Any = None
        self._pulse: Pulse | None = None
        self._listener: Listener | None = None
        self._open()

    def _find_token(self, token: str | None) -> str:
        if token is not None and self.token_file is not None:
            raise ValueError("give a token or a token_file, not both")
        if token is not None:
            tokens.check(token)
            return token
        if self.token_file is not None:
            return tokens.read(self.token_file)
        if not is_loopback(self._host):
            raise ValueError(
                f"listening on {self._host or 'every address'} lets other machines run code here: give a "
                "token_file (`fmlab ranks token FILE` makes one), or listen on 127.0.0.1"
            )
        self._temporary = tempfile.TemporaryDirectory(prefix="fmlab-token-")
        self.token_file = Path(self._temporary.name) / "token"
        return tokens.make(self.token_file)

    @property
    def address(self) -> str:
        """ADDRESS:PORT that this head listens on."""
        return name_address(self._host, self._port)

    @property
    def pids(self) -> list[int]:
        return list(self._pids)

    @property
    def hosts(self) -> Sequence[str]:
        return [self._by_rank[rank].host for rank in range(len(self._by_rank))]

    @property
    def alive(self) -> bool:
        return bool(self._pids) and not self._died

    # -- hosts ---------------------------------------------------------------------------------------

    def _open(self) -> None:
        if self._listener is None:
            self._listener = Listener(self._host, self._port, self._token, self._join)
            self._port = self._listener.port
            self._pulse = Pulse(self._channels, AGENT_SILENT, self._silent)

    def _channels(self) -> list[Channel]:
        with self._changed:
            return [link.channel for link in self._links.values()]

    def _silent(self, channel: Channel, reason: str) -> None:
        with self._changed:
            link = next((link for link in self._links.values() if link.channel is channel), None)
        if link is not None:
            link.end(reason)

    def _join(self, channel: Channel, hello: dict[str, Any]) -> None:
        """A host has proved itself, with the right versions."""
        with self._changed:
            self._joined += 1
            link = Link(channel, number=self._joined, **hello)
            old = self._links.pop(link.agent, None)
            self._links[link.agent] = link
        if old is not None:  # the agent saw the connection end before we did
            old.end("its agent joined anew")
            self._lose(old)
        link.begin(self._hear, self._lose)
        link.send("welcome")
        with self._changed:
            self._changed.notify_all()

    def _hear(self, start: int, rank: int, message: Message, nbytes: int) -> None:
        if message[0] == "died" and start == self._starts:
            self._died.add(rank)
        self._inbox.put(start, rank, message, nbytes)

    def _lose(self, link: Link) -> None:
        """A host is gone: say so for each of its ranks."""
        with self._changed:
            if self._links.get(link.agent) is link:
                del self._links[link.agent]
            ranks, link.ranks = link.ranks, []
            if self._listener is not None:
                self._gone = [*self._gone[-9:], f"host {link.host} is gone: {link.reason}"]
            self._changed.notify_all()
        for rank in ranks:
            self._hear(self._starts, rank, ("died", f"host {link.host} is gone: {link.reason}", ""), 0)

    def _wait_hosts(self, n: int, limit: float, interrupt: HeldInterrupt) -> list[Link]:
        until = time.monotonic() + limit
        with self._changed:
            while not interrupt.pending:
                links = list(self._links.values())
                if sum(link.slots for link in links) >= n:
                    return assign(links, n)
                if time.monotonic() > until:
                    raise TimeoutError(self._missing(links, n, limit))
                self._changed.wait(0.2)
        return []

    def _missing(self, links: Sequence[Link], n: int, limit: float) -> str:
        have = sum(link.slots for link in links)
        said = [f"host {link.host} with {link.slots}" for link in sorted(links, key=lambda link: link.number)]
        here = f"{', '.join(said)} joined" if said else "no host joined"
        assert self._listener is not None
        told = [*dict.fromkeys(self._gone + self._listener.refused)]
        why = "".join(f"; {one}" for one in told)
        file = self.token_file or "FILE"
        return (
            f"{n - have} of {n} slots are missing after {limit:g} s at {self.address}: {here}{why}. "
            f"On each host: fmlab ranks join {self.address} --slots N --token-file {file}"
        )

    # -- ranks ---------------------------------------------------------------------------------------

    def start(self, settings: Settings) -> None:
        self._open()
        self._end_ranks()
        deadline = time.monotonic() + settings.start_timeout
        try:
            with HeldInterrupt() as interrupt:
                links = self._wait_hosts(settings.world_size, settings.host_timeout, interrupt)
                if links:
                    self._begin(links, settings)
                    wait_ready(self, settings, deadline, interrupt)
        except BaseException:
            self._end_ranks()
            raise
        self._gone = []

    def _begin(self, links: Sequence[Link], settings: Settings) -> None:
        """Tell each host which ranks to fork."""
        for link in links:
            self._by_rank.update(dict.fromkeys(link.ranks, link))
        check_reach(links)
        self._pids = [0] * settings.world_size
        self._store, port = open_store(self._host, settings.start_timeout)
        spec = {
            "start": self._starts,
            "port": port,
            "master": [links[0].address, links[0].port],
            "world_size": settings.world_size,
            "threads": settings.threads,
            "seed": settings.seed,
            "timeout": settings.timeout,
            "start_timeout": settings.start_timeout,
            "env": dict(settings.env),
            "path": list(sys.path),
            "cwd": os.getcwd(),
        }
        for link in links:
            together = [rank for other in links if other.host == link.host for rank in other.ranks]
            local = [together.index(rank) for rank in link.ranks]
            link.send("start", spec=spec, ranks=link.ranks, local_ranks=local, local_world_size=len(together))

    def send(self, rank: int, message: Message) -> None:
        self._by_rank[rank].send("to", pickle.dumps(message), ranks=[rank], start=self._starts)

    def send_all(self, message: Message) -> None:
        """Each host gets the message once."""
        data = pickle.dumps(message)
        for link in dict.fromkeys(self._by_rank.values()):
            link.send("to", data, ranks=link.ranks, start=self._starts)

    def receive(self, timeout: float) -> list[tuple[int, Message]]:
        got = self._inbox.take(timeout)
        for rank, message in got:
            if message[0] == "ready":
                self._pids[rank] = message[1]
        return got

    def interrupt(self, rank: int) -> None:
        self._by_rank[rank].send("interrupt", rank=rank)

    def stacks(self, rank: int) -> str:
        return self._by_rank[rank].stacks(rank)

    def _end_ranks(self) -> None:
        self._starts += 1
        self._inbox.begin(self._starts)
        for link in dict.fromkeys(self._by_rank.values()):
            link.send("end")
            link.ranks = []
        self._by_rank, self._pids, self._died, self._store = {}, [], set(), None

    def stop(self) -> None:
        """End all ranks, let the agents go, and stop listening; agents wait for the next head for a while."""
        if self._owner != os.getpid():
            return
        with HeldInterrupt():
            self._end_ranks()
            if self._listener is not None:
                self._listener.close()
                self._listener = None
            if self._pulse is not None:
                self._pulse.stop()
            with self._changed:
                links = list(self._links.values())
                self._links.clear()
            for link in links:
                link.send("goodbye")
                link.end("the head closed")
