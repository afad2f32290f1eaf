"""The hosts that tests are run on are what they say."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.hosts.namespaces import Hosts

ROOT = Path(__file__).resolve().parents[2]
KNOCK = (
    "import socket, sys; socket.create_connection((sys.argv[1], 9000), timeout=float(sys.argv[2])).close()"
)
LISTEN = (
    "import socket; s = socket.create_server(('', 9000)); print('up', flush=True)\nwhile True: s.accept()"
)
SEND = """
import socket, sys, time
s, start, left = socket.create_connection((sys.argv[1], 9000), timeout=9), time.monotonic(), 2_000_000
while left > 0:
    left -= s.send(bytes(min(left, 65536)))
s.shutdown(socket.SHUT_WR)
s.recv(1)
print(time.monotonic() - start)
"""
SINK = """
import socket
s = socket.create_server(('', 9000)); print('up', flush=True)
c, _ = s.accept()
while c.recv(1 << 20): pass
c.close()
"""


def python(code: str, *words: object) -> list[str]:
    return [sys.executable, "-S", "-c", code, *map(str, words)]


def test_a_host_is_reached_by_name_until_its_cable_is_pulled(two_hosts: Hosts) -> None:
    first, other = two_hosts
    server = other.start(python(LISTEN), stdout=subprocess.PIPE)
    assert server.stdout is not None
    assert server.stdout.readline() == "up\n"

    def reached() -> bool:
        return first.run(python(KNOCK, "host-1", 0.5)).returncode == 0

    assert reached()
    assert first.run(["hostname"]).stdout == "host-0\n"
    other.unplug()
    assert not reached()
    other.plug()
    assert any(reached() for _ in range(6))  # the bridge takes a moment
    other.power_off()
    assert server.wait(5) != 0
    other.power_on()
    server.stdout.close()
    assert "sshd" not in other.run(["ps", "ax"]).stdout
    assert len(other.run(["sh", "-c", "ls -d /proc/[0-9]*"]).stdout.split()) < 6


def test_a_link_is_as_slow_as_it_is_made(two_hosts: Hosts) -> None:
    first, other = two_hosts
    other.limit(20)
    sink = other.start(python(SINK), stdout=subprocess.PIPE)
    assert sink.stdout is not None
    sink.stdout.readline()
    seconds = float(first.run(python(SEND, "host-1")).stdout)
    sink.stdout.close()
    assert (
        0.8 <= 2_000_000 * 8 / 20e6 / seconds <= 1.1
    )  # 2 MB at 20 Mbit/s: 0.8 s, headers and start included


def test_nothing_is_left_when_the_process_that_made_them_is_killed(hosts_can_be_made: None) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.hosts.namespaces import Hosts\n"
        "h = Hosts(1); p = h[0].start(['sleep', '300']); print(h[0].space.pid, p.pid, flush=True); p.wait()"
    )
    maker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert maker.stdout is not None
    left = [int(word) for word in maker.stdout.readline().split()]
    maker.send_signal(signal.SIGKILL)
    maker.wait()
    maker.stdout.close()
    deadline = time.monotonic() + 5
    while any(_runs(pid) for pid in left) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(_runs(pid) for pid in left)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
