"""Nothing is asked of the network at run time unless the user asks: only loopback is ever connected to."""

import subprocess
import sys

# Runs first in a process of its own: connecting off this machine, and asking for the name of another, fails.
GUARD = """
import ipaddress, sys

def guard(event, args):
    if event in ("socket.connect", "socket.sendto"):
        address = args[1]
        host = address[0] if isinstance(address, tuple) else "127.0.0.1"  # a path: a socket of this machine
    elif event in ("socket.getaddrinfo", "socket.gethostbyname"):
        host = args[0]
    else:
        return
    host = host.decode() if isinstance(host, bytes) else host
    if host in (None, "", "localhost"):
        return
    try:
        inside = ipaddress.ip_address(host).is_loopback
    except ValueError:
        inside = False
    if not inside:
        print("CALLS OUT", event, args[0] if "addr" in event else args[1:], flush=True)
        raise PermissionError(f"{event}: {host}")

sys.addaudithook(guard)
"""

IMPORT = """
import importlib, pkgutil
import fmlab
for room in pkgutil.iter_modules(fmlab.__path__):
    try:
        importlib.import_module(f"fmlab.{room.name}")
    except ImportError as error:
        assert "pip install" in str(error), error
"""

TRAIN = """
from fmlab import cli
settings = "--steps 2 --batch-size 2 --seq-len 16 --eval-every 0 --log-every 1 --backend cpu"
assert cli.main(["train", "gpt2-tiny", *settings.split()]) == 0
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", GUARD + code]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_the_guard_sees_calls():
    for call in ("s.connect(('192.0.2.1', 80))", "socket.getaddrinfo('example.org', 80)"):
        done = run(f"import socket\ns = socket.socket()\n{call}")
        assert done.returncode != 0
        assert "CALLS OUT" in done.stdout


def test_importing_every_room_and_training_call_nobody():
    done = run(IMPORT + TRAIN)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "CALLS OUT" not in done.stdout
