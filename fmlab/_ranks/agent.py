"""What runs on each host of a cluster: joins the head, forks ranks when told to, carries their messages.

The agent interprets only the line of JSON of a message; what ranks and head say to each other passes
through unread. When its head is gone it ends its ranks; when the agent is gone, the server that forked
them does.
"""

import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from fmlab._ranks.channel import Channel, NotProved, prove
from fmlab._ranks.errors import name_ranks
from fmlab._ranks.forking import Server
from fmlab._ranks.link import versions
from fmlab._ranks.listener import name_address
from fmlab._ranks.process import RankProcess
from fmlab._ranks.pulse import HEAD_SILENT, Pulse
from fmlab._ranks.rendezvous import interface_of
from fmlab._ranks.seat import Seat
from fmlab._ranks.transport import environment

TRY_EVERY = 0.5  # seconds between two attempts to reach a head that does not listen yet
CONNECT = 5.0  # seconds that one attempt may take
IMPORTS = 300.0  # seconds that importing torch may take, from a slow file system
ADMIT = 20.0  # seconds that the head has to take a host in


@dataclass(frozen=True)
class Member:
    """How a host joins. Times in seconds.

    address: this host's own address towards the others; by default the one it reaches the head with.
    interface: of the ranks' connections; by default the one that has the address.
    wait: for a head to join, at first and again after one is gone. once: whether to end with the first head.
    """

    host: str
    port: int
    slots: int
    token: str
    name: str = field(default_factory=socket.gethostname)
    address: str | None = None
    interface: str | None = None
    wait: float = 300.0
    once: bool = False


def join(member: Member) -> None:
    """Serve one head after another. TimeoutError when none came, ValueError or NotProved when one refused."""
    number = uuid.uuid4().hex
    head = name_address(member.host, member.port)
    while True:
        Server.shared().wait_ready(IMPORTS)  # who joins can start ranks at once
        _say(f"host {member.name} is ready for a head at {head}")
        channel = _reach(member, number)
        try:
            interface = member.interface or interface_of(channel.address)
            _say(f"host {member.name} has joined {head} with {member.slots} slots")
            reason = Agent(channel, member.host, interface).serve()
        finally:
            channel.close()
        if member.once:
            _say(f"{head}: {reason}; its ranks were ended")
            return
        _say(f"{head}: {reason}; its ranks were ended; waits {member.wait:g} s for the next head")


def _reach(member: Member, number: str) -> Channel:
    """The channel to the head, once it listens and has taken this host in."""
    until = time.monotonic() + member.wait
    source = (member.address, 0) if member.address else None
    while True:
        try:
            sock = socket.create_connection((member.host, member.port), CONNECT, source)
            channel = prove(sock, member.token, "agent")
            _introduce(channel, member, number)
            return channel
        except NotProved:
            raise
        except (OSError, EOFError) as error:
            if time.monotonic() > until:
                raise TimeoutError(
                    f"no head at {name_address(member.host, member.port)} within {member.wait:g} s ({error})"
                ) from None
            time.sleep(TRY_EVERY)


def _introduce(channel: Channel, member: Member, number: str) -> None:
    family = socket.AF_INET6 if ":" in channel.address else socket.AF_INET
    with socket.socket(family) as probe:  # for code that reads MASTER_PORT
        probe.bind((channel.address, 0))
        port = probe.getsockname()[1]
    channel.send(
        "hello",
        host=member.name,
        slots=member.slots,
        agent=number,
        address=channel.address,
        port=port,
        versions=versions(),
    )
    channel.set_timeout(ADMIT)
    answer, _ = channel.receive()
    channel.set_timeout(None)
    if answer["kind"] == "refused":
        raise ValueError(f"the head refused: {answer['reason']}; install the same on both")


class Agent:
    """The ranks of this host for one head."""

    def __init__(self, channel: Channel, head: str, interface: str) -> None:
        self._channel, self._head, self._interface = channel, head, interface
        self._seats: dict[int, Seat] = {}
        self._folder = tempfile.mkdtemp(prefix="fmlab-ranks-")
        self._reason = ""

    def serve(self) -> str:
        """Do what the head says until it is gone; returns how it went."""
        pulse = Pulse(lambda: [self._channel], HEAD_SILENT, self._lost)
        try:
            while True:
                fields, payload = self._channel.receive()
                if fields["kind"] == "goodbye":
                    return "the head closed"
                self._do(fields, payload)
        except (EOFError, OSError) as error:
            words = getattr(error, "strerror", None) or error
            return self._reason or f"the head is gone ({words})"
        finally:
            pulse.stop()
            self._end()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _lost(self, channel: Channel, reason: str) -> None:
        self._reason = f"the head is gone ({reason})"
        channel.close()

    def _do(self, fields: dict[str, Any], payload: bytes) -> None:
        match fields["kind"]:
            case "to":
                for rank in fields["ranks"]:
                    if rank in self._seats:
                        self._seats[rank].put(payload)
            case "start":
                self._start(fields)
            case "interrupt":
                if fields["rank"] in self._seats:
                    self._seats[fields["rank"]].process.interrupt()
            case "stacks":
                seat = self._seats.get(fields["rank"])
                text = seat.process.stacks() if seat else ""
                self._channel.send("stacks", text.encode(), number=fields["number"])
            case "end":
                self._end()

    def _start(self, fields: dict[str, Any]) -> None:
        """Fork the ranks of this host."""
        self._end()
        spec, ranks = fields["spec"], fields["ranks"]
        deadline = time.monotonic() + spec["start_timeout"]
        os.makedirs(self._folder, exist_ok=True)
        for rank, local_rank in zip(ranks, fields["local_ranks"], strict=True):
            own = {"RANK": rank, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": fields["local_world_size"]}
            try:
                process = RankProcess(Server.shared(), self._complete(spec, rank, own), deadline)
            except (OSError, RuntimeError) as error:
                failed = pickle.dumps(("failed", f"{type(error).__name__}: {error}"))
                self._channel.send("from", failed, rank=rank, start=spec["start"])
                return
            self._seats[rank] = Seat(process, self._channel, spec["start"])
        _say(f"started {name_ranks(ranks)} of {spec['world_size']}")

    def _complete(self, spec: dict[str, Any], rank: int, own: dict[str, int]) -> dict[str, Any]:
        """The head's description of a rank with what only this host knows."""
        address, port = spec["master"]
        mine = {
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(spec["world_size"]),
            **{name: str(value) for name, value in own.items()},
            **spec["env"],
        }
        env = environment(spec["threads"], self._interface, mine)
        shared = [path for path in spec["path"] if path not in sys.path and os.path.exists(path)]
        return {
            **spec,
            "rank": rank,
            "store": [self._head, spec["port"]],
            "folder": self._folder,
            "log": os.path.join(self._folder, f"output-{spec['start']}-{rank}"),
            # an agent that torchrun started is no rank of torchrun's: its variables would mislead the ranks
            "env": {name: value for name, value in env.items() if not name.startswith("TORCHELASTIC_")},
            "path": [*sys.path, *shared],
            "cwd": spec["cwd"] if os.path.isdir(spec["cwd"]) else os.getcwd(),
            "parent": os.getpid(),
        }

    def _end(self) -> None:
        for seat in self._seats.values():
            seat.end()
        for seat in self._seats.values():
            seat.reap()
        self._seats = {}


def _say(text: str) -> None:
    print(text, flush=True)


def end_on_terminate() -> None:
    """Let SIGTERM, with which job managers end a program, end the ranks in order too."""

    def leave(*_: Any) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, leave)
