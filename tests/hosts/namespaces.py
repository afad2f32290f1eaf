"""Hosts made of Linux namespaces: each with its own network, host name, processes and /etc/hosts.

    with Hosts(2) as hosts:
        hosts[0].run(["ping", "-c1", "host-1"])
        hosts[1].unplug()

A host is a process, number 1 of its namespaces, that reads a pipe of this process. When the pipe closes, as
it does however this process ends, number 1 ends, and with it the kernel ends all processes and devices of the
host: nothing is left, and nothing has a name outside. The hosts share this machine's files.
"""

import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

PROGRAMS = ("ip", "tc", "unshare", "nsenter", "mount")
_LIMIT = 10.0  # seconds that a step of the set-up may take
_NETWORK = "10.77.0"  # only inside the namespaces

#: what /etc/hosts of a host says of its own name: its address, Debian's 127.0.1.1, or no name at all
OwnName = Literal["address", "loopback", "none"]


def refusal() -> str:
    """Why this machine cannot make hosts; "" where it can."""
    if absent := [name for name in PROGRAMS if shutil.which(name) is None]:
        return f"hosts of namespaces need the programs {', '.join(absent)} (Debian: iproute2, util-linux)"
    try:
        with Hosts(1) as hosts:
            hosts[0].limit(100)
    except HostError as error:
        return f"this machine refuses to make hosts of namespaces: {error}"
    return ""


class HostError(RuntimeError):
    """The system refused a step; the message has the command and its answer."""


class _Space:
    """A set of namespaces, kept alive by a process that reads a pipe of ours."""

    def __init__(self, kinds: str, enter: Sequence[str] = ()) -> None:
        command = [*enter, "unshare", *kinds.split(), "--", "sh", "-c", "echo up; exec cat"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        if self.process.stdout.readline().strip() != "up":
            _, said = self.process.communicate(timeout=_LIMIT)
            raise HostError(f"{shlex.join(command)}: {said.strip()}")
        self.pid = _last_child(self.process.pid)

    def close(self) -> None:
        """End it; nothing the second time."""
        assert self.process.stdin is not None
        self.process.stdin.close()  # number 1 reads the end of its input
        self.process.wait(_LIMIT)
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()


class Host:
    """One of `Hosts`: a name, an address, and what can be done to it."""

    def __init__(self, number: int, hosts: "Hosts") -> None:
        self.number, self.hosts = number, hosts
        self.name, self.address = f"host-{number}", f"{_NETWORK}.{number + 1}"
        self.space = self._boot()

    def _boot(self) -> _Space:
        self.space = space = _Space("-n -u -i -p -m --fork --mount-proc", self.hosts.enter_user)
        port = f"port-{self.number}"
        self.hosts.configure(f"ip link add {port} type veth peer name eth0 netns {space.pid}")
        self.hosts.configure(f"ip link set {port} master bridge up")
        table = self.hosts.folder / f"{self.name}.hosts"
        table.write_text(self.hosts.table(self))
        self.check(
            f"hostname {self.name} && mount --bind {shlex.quote(str(table))} /etc/hosts && "
            f"ip link set lo up && ip address add {self.address}/24 dev eth0 && ip link set eth0 up"
        )
        return space

    def start(
        self, command: Sequence[str | Path], env: Mapping[str, str] | None = None, **options: Any
    ) -> "subprocess.Popen[str]":
        """Start a command in this host, in the current folder. Ended by `power_off`, not by ending this."""
        inside = ["sh", "-c", 'cd "$0" && exec "$@"', os.getcwd(), *map(str, command)]
        options.setdefault("stdin", subprocess.DEVNULL)
        return subprocess.Popen([*self._enter(), *inside], env=env, text=True, **options)

    def run(
        self, command: Sequence[str | Path], timeout: float = _LIMIT, **options: Any
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command in this host to its end, or TimeoutExpired; its output is kept."""
        process = self.start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)
        out, err = process.communicate(timeout=timeout)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def check(self, script: str) -> None:
        """Run a line of shell in this host. Raises HostError when it fails."""
        done = self.run(["sh", "-c", script])
        if done.returncode:
            raise HostError(f"{script}: {done.stderr.strip()}")

    def _enter(self) -> list[str]:
        return [
            *self.hosts.enter_user,
            "nsenter",
            "-t",
            str(self.space.pid),
            "-n",
            "-u",
            "-i",
            "-p",
            "-m",
            "--",
        ]

    # region what happens to hosts
    def unplug(self) -> None:
        """Pull the cable: nobody is told, and what is sent is lost."""
        self.hosts.configure(f"ip link set port-{self.number} down")

    def plug(self) -> None:
        """Put the cable back."""
        self.hosts.configure(f"ip link set port-{self.number} up")

    def power_off(self) -> None:
        """All its processes end at once, unasked; the kernel still closes their connections, as when a
        machine is shut down. Pull the cable first for a power cut."""
        self.space.close()
        with suppress(HostError):  # gone with the host, unless its kernel still waits for an answer
            self.hosts.configure(f"ip link delete port-{self.number}")

    def power_on(self) -> None:
        """The same host again, with none of its processes."""
        self.space = self._boot()

    def limit(self, mbit: float) -> None:
        """Limit its cable to that many megabits a second, each way (a token bucket that holds 32 KB)."""
        bucket = f"root tbf rate {mbit:g}mbit burst 32kb latency 400ms"
        self.hosts.configure(f"tc qdisc replace dev port-{self.number} {bucket}")
        self.check(f"tc qdisc replace dev eth0 {bucket}")

    # endregion


class Hosts:
    """`n` hosts on one bridge that leads nowhere else. Raises HostError where the system refuses one."""

    def __init__(self, n: int, own_name: OwnName = "address") -> None:
        self.own_name = own_name
        # without root's rights, they are had inside a user namespace
        self.user = [] if os.geteuid() == 0 else ["-U", "--map-root-user"]
        self.names = [f"host-{number}" for number in range(n)]
        self._all: list[Host] = []
        self._switch: _Space | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="fmlab-hosts-")
        self.folder = Path(self._folder.name)
        try:
            self._switch = _Space(shlex.join([*self.user, "-n", "--fork", "--kill-child"]))
            self.configure("ip link add bridge type bridge")
            self.configure("ip link set bridge up")
            for number in range(n):
                self._all.append(Host(number, self))
        except BaseException:
            self.close()
            raise

    @property
    def enter_user(self) -> list[str]:
        """What a command starts with that needs the rights of the user namespace, if there is one."""
        if not self.user or self._switch is None:
            return []
        return ["nsenter", "-t", str(self._switch.pid), "-U", "--preserve-credentials", "--"]

    def configure(self, command: str) -> None:
        """Run a command in the network of the switch. Raises HostError when it fails."""
        assert self._switch is not None
        enter = [*self.enter_user, "nsenter", "-t", str(self._switch.pid), "-n", "--"]
        done = subprocess.run([*enter, *shlex.split(command)], capture_output=True, text=True, timeout=_LIMIT)
        if done.returncode:
            raise HostError(f"{command}: {done.stderr.strip()}")

    def table(self, host: Host) -> str:
        """/etc/hosts as this host has it."""
        lines = ["127.0.0.1 localhost"]
        for number, name in enumerate(self.names):
            own = number == host.number
            if self.own_name == "none":
                continue
            at = "127.0.1.1" if own and self.own_name == "loopback" else f"{_NETWORK}.{number + 1}"
            lines.append(f"{at} {name}")
        return "\n".join(lines) + "\n"

    def __getitem__(self, number: int) -> Host:
        return self._all[number]

    def __iter__(self) -> Iterator[Host]:
        return iter(self._all)

    def close(self) -> None:
        """End all processes of all hosts, and their network."""
        for host in self._all:
            host.power_off()
        if self._switch is not None:
            self._switch.close()
        self._folder.cleanup()

    def __enter__(self) -> "Hosts":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _last_child(pid: int) -> int:
    """The only child of the only child … of a process: what a chain of nsenter and unshare has started."""
    while children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        pid = int(children[0])
    return pid
