"""Messages between the head and a host's agent: both ends prove that they know the token, then each message
carries a proof that it is the next one of this connection.

The messages make their receiver run code, so nothing of a peer is interpreted before it has proved itself.
`multiprocessing.connection` has such a proof too, but one that is not enough here: up to Python 3.11 it is
HMAC-MD5 (later ones still accept it), the proof does not say whose it is, so that the answer of one peer can
be shown to another as one's own, and messages that follow are not checked at all. Here it is HMAC-SHA256 over
the role and over random numbers of both ends; the keys of the messages come from the same numbers, one for
each direction, and each message's tag covers its place in the order. What was recorded, altered, left out or
sent back is refused. Nothing is encrypted: who can listen on the network can read the messages.

    agent -> head   MAGIC, 32 random bytes        then  proof("agent")
    head -> agent   MAGIC, 32 random bytes        then  proof("head")
    each message    length (8 bytes), tag (32), a line of JSON with the message's kind and fields, its payload
"""

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import threading
import time
from typing import Any

MAGIC = b"fmlab ranks v1\r\n"  # 16 bytes
PROVE = 5.0  # seconds a peer has to prove itself
LINK_DOWN = 10.0  # seconds after which an end that acknowledges nothing counts as gone
_NONCE = 32
_TAG = 32
_PART = 1 << 20  # bytes asked of the socket at once: memory grows with what came, not with what was announced


class NotProved(ConnectionError):
    """The peer does not know the token, or does not speak this protocol."""


class Channel:
    """One end of a proved connection. Any thread may send; one thread receives.

    heard: when something last came, by time.monotonic.
    """

    def __init__(self, sock: socket.socket, send_key: bytes, receive_key: bytes) -> None:
        self._sock = sock
        self._send_key, self._receive_key = send_key, receive_key
        self._sent = self._received = 0
        self._lock = threading.Lock()
        self.heard = time.monotonic()

    def send(self, kind: str, payload: bytes = b"", **fields: Any) -> None:
        """Send one message. OSError when the connection has ended."""
        with self._lock:
            self._send(kind, payload, fields)

    def ping(self) -> None:
        """Give a sign of life, unless a message is just being sent, which is one."""
        if self._lock.acquire(blocking=False):
            try:
                self._send("ping", b"", {})
            finally:
                self._lock.release()

    def _send(self, kind: str, payload: bytes, fields: dict[str, Any]) -> None:
        line = json.dumps({"kind": kind, **fields}).encode() + b"\n"
        length = (len(line) + len(payload)).to_bytes(8, "big")
        tag = _tag(self._send_key, self._sent, length, line, payload)
        self._sent += 1
        self._sock.sendall(length + tag + line)
        if payload:
            self._sock.sendall(payload)

    def receive(self) -> tuple[dict[str, Any], bytes]:
        """The next message: (kind and fields, payload). Signs of life are passed over.

        EOFError or OSError when the connection has ended, ConnectionError too when a message was altered.
        """
        while True:
            length = self._exactly(8)
            tag = self._exactly(_TAG)
            body = self._exactly(int.from_bytes(length, "big"))
            if not hmac.compare_digest(tag, _tag(self._receive_key, self._received, length, body)):
                raise ConnectionError("a message was altered on its way")
            self._received += 1
            line, _, payload = body.partition(b"\n")
            fields = json.loads(line)
            if fields["kind"] != "ping":
                return fields, payload

    def _exactly(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            part = self._sock.recv(min(count - len(data), _PART))
            if not part:
                raise EOFError("the connection was closed")
            self.heard = time.monotonic()
            data += part
        return bytes(data)

    def set_timeout(self, seconds: float | None) -> None:
        """How long `send` and `receive` may wait for the other end; None for no limit."""
        self._sock.settimeout(seconds)

    @property
    def address(self) -> str:
        """The address of this end."""
        return str(self._sock.getsockname()[0])

    def close(self) -> None:
        """End the connection; a thread that waits in `receive` or `send` is woken."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


def prove(sock: socket.socket, token: str, role: str) -> Channel:
    """Prove to the peer that this end knows the token, have it do the same, and return the channel.

    role: "agent" (the end that connected; it goes first, so that who merely connects learns nothing) or
    "head". NotProved when the peer fails; OSError or EOFError when it is gone or too slow.
    """
    key = hashlib.sha256(token.encode()).digest()
    deadline = time.monotonic() + PROVE
    mine = secrets.token_bytes(_NONCE)
    _within(sock, deadline).sendall(MAGIC + mine)
    greeting = _read(sock, len(MAGIC) + _NONCE, deadline)
    if not greeting.startswith(MAGIC):
        raise NotProved("the other end does not speak the protocol of these ranks, or another version of it")
    theirs = greeting[len(MAGIC) :]
    numbers = mine + theirs if role == "agent" else theirs + mine
    words = {who: _proof(key, who, numbers) for who in ("agent", "head")}
    other = "head" if role == "agent" else "agent"
    if role == "agent":
        _within(sock, deadline).sendall(words[role])
    with contextlib.suppress(EOFError):
        if hmac.compare_digest(_read(sock, _TAG, deadline), words[other]):
            if role == "head":
                _within(sock, deadline).sendall(words[role])
            sock.settimeout(None)
            _watch_link(sock)
            keys = {who: _proof(key, f"messages of the {who}", numbers) for who in ("agent", "head")}
            return Channel(sock, keys[role], keys[other])
    raise NotProved(f"the {other} has another token")


def _proof(key: bytes, words: str, numbers: bytes) -> bytes:
    return hmac.digest(key, words.encode() + b"\0" + numbers, "sha256")


def _tag(key: bytes, number: int, *parts: bytes) -> bytes:
    mac = hmac.new(key, number.to_bytes(8, "big"), "sha256")
    for part in parts:
        mac.update(part)
    return mac.digest()


def _within(sock: socket.socket, deadline: float) -> socket.socket:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError(f"the other end did not prove itself within {PROVE:g} s")
    sock.settimeout(left)
    return sock


def _read(sock: socket.socket, count: int, deadline: float) -> bytes:
    """Exactly `count` bytes by the deadline, however slowly they drip."""
    data = b""
    while len(data) < count:
        part = _within(sock, deadline).recv(count - len(data))
        if not part:
            raise EOFError("the connection was closed")
        data += part
    return data


def _watch_link(sock: socket.socket) -> None:
    """Have the system end the connection when the other host acknowledges nothing any more.

    The other end's system acknowledges even while its program is busy, so this never takes a busy one for a
    dead one. Systems without the option notice by silence alone (`Pulse`).
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(LINK_DOWN * 1000))
