"""Bytes that really crossed the network sockets of this process, read from the kernel.

Linux keeps, for every TCP connection, how many bytes the other side has acknowledged and how many arrived
(`TCP_INFO`, include/uapi/linux/tcp.h). Reading it needs no privileges and no change of the program, and it
counts what a library really sends: its headers, its extra copies, its handshakes.
"""

import os
import socket
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

# Offsets into struct tcp_info (Linux 4.6 or later for all of them).
_UNACKED = 24  # u32, segments in flight
_BYTES_ACKED = 120  # u64, bytes sent and acknowledged: a retransmitted byte counts once
_BYTES_RECEIVED = 128  # u64
_INFO_SIZE = 136
_SETTLE_SECONDS = 1.0

_Connection = tuple[int, str]  # inode of the socket, address of the peer


@dataclass
class Wire:
    """Bytes by TCP connection: peer address -> bytes. Filled when the block ends."""

    sent_to: dict[str, int] = field(default_factory=dict)
    received_from: dict[str, int] = field(default_factory=dict)
    available: bool = True

    @property
    def sent(self) -> int | None:
        """Bytes of this process that its peers acknowledged; None where the system does not count them."""
        return sum(self.sent_to.values()) if self.available else None

    @property
    def received(self) -> int | None:
        """Bytes that arrived at this process; None where the system does not count them."""
        return sum(self.received_from.values()) if self.available else None

    def __str__(self) -> str:
        if not self.available:
            return f"not counted: {sys.platform} has no TCP_INFO counters"
        return (
            f"sent {self.sent:,} bytes, received {self.received:,} bytes over {len(self.sent_to)} connections"
        )


@contextmanager
def wire(required: bool = True) -> Iterator[Wire]:
    """Count the bytes that this process sends and receives over TCP inside the block.

    All TCP sockets of the process count, those opened inside the block from their first byte; a connection
    that is closed inside the block is lost. Put a barrier before and after what you measure, or a peer that
    runs ahead or behind moves its bytes across the borders of the block.

    required: on systems other than Linux, which do not offer these counters, raise RuntimeError (the
    default), or give a record whose counts are None.
    """
    if not sys.platform.startswith("linux"):
        if not required:
            yield Wire(available=False)
            return
        raise RuntimeError(
            f"wire() reads Linux's TCP_INFO counters; this is {sys.platform}. "
            "Use fmlab.meter.traffic(), which counts payload on every system"
        )
    before = _settled()
    record = Wire()
    yield record
    for connection, (sent, received) in _settled().items():
        sent_before, received_before = before.get(connection, (0, 0))
        peer = connection[1]
        record.sent_to[peer] = record.sent_to.get(peer, 0) + sent - sent_before
        record.received_from[peer] = record.received_from.get(peer, 0) + received - received_before
    record.sent_to = {peer: count for peer, count in record.sent_to.items() if count}
    record.received_from = {peer: count for peer, count in record.received_from.items() if count}


def _settled() -> dict[_Connection, tuple[int, int]]:
    """The counters once nothing is in flight (or after a second, whichever is first)."""
    deadline = time.monotonic() + _SETTLE_SECONDS
    while True:
        in_flight, counters = _read()
        if not in_flight or time.monotonic() > deadline:
            return counters
        time.sleep(0.001)


def _read() -> tuple[int, dict[_Connection, tuple[int, int]]]:
    """(segments in flight, connection -> (bytes acknowledged, bytes received)) of this process's sockets."""
    in_flight = 0
    counters = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
            if not target.startswith("socket:["):
                continue
            connection = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # closed since the listing
            continue
        with connection:
            try:
                peer = connection.getpeername()
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_SIZE)
            except OSError:  # listening, not connected, or not TCP
                continue
        if len(info) < _INFO_SIZE:
            continue
        in_flight += struct.unpack_from("I", info, _UNACKED)[0]
        acked, received = struct.unpack_from("QQ", info, _BYTES_ACKED)
        inode = int(target.removeprefix("socket:[").removesuffix("]"))
        counters[inode, f"{peer[0]}:{peer[1]}"] = (acked, received)
    return in_flight, counters
