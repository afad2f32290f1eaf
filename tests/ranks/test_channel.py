"""Who may join a head, and that nothing of anybody else is interpreted."""

import os
import pickle
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fmlab import Ranks
from fmlab._ranks import channel, token
from fmlab._ranks.channel import MAGIC, Channel, NotProved, prove
from fmlab._ranks.inbox import Inbox
from fmlab._ranks.link import versions
from fmlab._ranks.listener import parse_address
from fmlab.ranks import ClusterTransport

TOKEN = "a-token-of-these-tests"


def pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        return ours, server.accept()[0]


def proved(agent_token: str = TOKEN, head_token: str = TOKEN) -> tuple[Channel, Channel, socket.socket]:
    """Both ends of a proved connection, the agent's first, and the agent's socket."""
    ours, theirs = pair()
    made: list[Channel | Exception] = []

    def head() -> None:
        try:
            made.append(prove(theirs, head_token, "head"))
        except NotProved as error:
            made.append(error)
            theirs.close()

    thread = threading.Thread(target=head)
    thread.start()
    try:
        agent = prove(ours, agent_token, "agent")
    finally:
        thread.join()
    assert isinstance(made[0], Channel)
    return agent, made[0], ours


@pytest.fixture
def head() -> Iterator[ClusterTransport]:
    transport = ClusterTransport("127.0.0.1:0", token=TOKEN)
    yield transport
    transport.stop()


def connect(head: ClusterTransport) -> socket.socket:
    host, port = parse_address(head.address)
    return socket.create_connection((host, port), 5)


def refusal(head: ClusterTransport, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a user is told when the slots are missing."""
    monkeypatch.setattr("fmlab.ranks.HOSTS_TIMEOUT", 0.5)
    with pytest.raises(TimeoutError) as info:
        Ranks(2, transport=head)
    return str(info.value)


def test_messages_go_both_ways_and_signs_of_life_are_passed_over() -> None:
    agent, head, _ = proved()
    agent.ping()
    agent.send("from", b"\n\0 any bytes", rank=3)
    head.send("to", ranks=[1, 2])
    assert head.receive() == ({"kind": "from", "rank": 3}, b"\n\0 any bytes")
    assert agent.receive() == ({"kind": "to", "ranks": [1, 2]}, b"")


def test_another_token_is_refused_by_both_ends() -> None:
    with pytest.raises(NotProved, match="the head has another token"):
        proved("x" * 20, "y" * 20)


def test_a_head_that_does_not_know_the_token_gets_no_agent() -> None:
    ours, theirs = pair()
    theirs.sendall(MAGIC + bytes(32))

    def parrot() -> None:  # shows the agent its own proof
        theirs.recv(len(MAGIC) + 32)
        theirs.sendall(theirs.recv(32))

    thread = threading.Thread(target=parrot)
    thread.start()
    with pytest.raises(NotProved):
        prove(ours, TOKEN, "agent")
    thread.join()


@pytest.mark.parametrize("tampering", ["replayed", "altered", "reflected"])
def test_messages_that_are_not_the_next_one_of_the_other_end_are_refused(tampering: str) -> None:
    agent, head, wire = proved()
    head.send("to", b"payload")
    recorded = wire.recv(4096)
    target, through = agent, head._sock
    if tampering == "replayed":
        through.sendall(recorded * 2)
        assert agent.receive()[1] == b"payload"
    elif tampering == "altered":
        through.sendall(recorded[:-1] + b"!")
    else:
        target = head
        wire.sendall(recorded)
    with pytest.raises(ConnectionError, match="altered"):
        target.receive()


class Bomb:
    """A pickle that leaves a file behind when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return (os.mkdir, (str(self.path),))


def test_who_has_not_proved_itself_is_told_nothing_and_read_nothing(
    head: ClusterTransport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bomb = pickle.dumps(Bomb(tmp_path / "exploded"))
    frame = len(bomb).to_bytes(8, "big") + bytes(32) + bomb
    for sent in (b"GET / HTTP/1.1\r\n\r\n" * 10, os.urandom(4096), MAGIC + bytes(32) + frame * 9):
        with connect(head) as sock:
            sock.sendall(sent)
            got = b""
            try:
                while part := sock.recv(4096):
                    got += part
            except ConnectionResetError:  # closed with what we sent unread
                pass
            assert len(got) in (0, len(MAGIC) + 32)  # its own random bytes at most
    said = refusal(head, monkeypatch)
    assert "does not speak the protocol" in said
    assert "the agent has another token" in said
    assert not (tmp_path / "exploded").exists()


def drip(sock: socket.socket) -> None:
    while True:
        sock.sendall(MAGIC[:1])
        time.sleep(0.05)


def test_a_peer_that_drips_is_closed_in_time(head: ClusterTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "PROVE", 0.5)
    with connect(head) as sock, pytest.raises((BrokenPipeError, ConnectionResetError)):
        drip(sock)
    said = refusal(head, monkeypatch)  # before it had sent as much as a greeting has
    assert "did not prove itself within 0.5 s" in said or "timed out" in said


def test_other_versions_are_refused_and_both_are_told(
    head: ClusterTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = prove(connect(head), TOKEN, "agent")
    hello = {"host": "c", "slots": 2, "agent": "1", "address": "127.0.0.1", "port": 1}
    agent.send("hello", versions={**versions(), "torch": "1.13.1"}, **hello)
    answer, _ = agent.receive()
    words = f"torch 1.13.1 there, {versions()['torch']} at the head"
    assert answer["kind"] == "refused"
    assert words in answer["reason"]
    assert f"host c has other versions: {words}" in refusal(head, monkeypatch)


def test_slots_that_are_missing_are_counted_and_who_joined_is_told(
    head: ClusterTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = prove(connect(head), TOKEN, "agent")
    hello = {"host": "c", "slots": 1, "agent": "1", "address": "127.0.0.1", "port": 1}
    agent.send("hello", versions=versions(), **hello)
    assert agent.receive()[0]["kind"] == "welcome"
    said = refusal(head, monkeypatch)
    assert f"1 of 2 slots are missing after 0.5 s at {head.address}: host c with 1 joined" in said
    assert f"fmlab ranks join {head.address}" in said


@pytest.mark.parametrize("listen", ["0.0.0.0:0", ":0", "10.0.0.1:29400", "[::]:0"])
def test_without_a_token_only_loopback_is_listened_on(listen: str) -> None:
    with pytest.raises(ValueError, match="lets other machines run code here: give a token_file"):
        ClusterTransport(listen)


def test_a_name_that_only_this_host_reaches_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'127\.1' is 127\.0\.0\.1 here, which no other host reaches"):
        ClusterTransport("127.1:0", token=TOKEN)


def test_on_loopback_a_token_is_made_that_only_its_owner_reads() -> None:
    head = ClusterTransport()
    try:
        assert head.token_file is not None
        assert stat.S_IMODE(head.token_file.stat().st_mode) == 0o600
        assert len(token.read(head.token_file)) >= 32
    finally:
        head.stop()


def test_tokens_that_others_can_read_or_guess_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "token"
    token.make(file)
    with pytest.raises(ValueError, match="exists"):
        token.make(file)
    file.chmod(0o644)
    with pytest.raises(ValueError, match="others can read the token"):
        token.read(file)
    file.chmod(0o600)
    file.write_text("secret\n")
    with pytest.raises(ValueError, match="at least 16 characters"):
        ClusterTransport("0.0.0.0:0", token_file=file)
    with pytest.raises(ValueError, match="fmlab ranks token"):
        token.read(tmp_path / "absent")


@pytest.mark.parametrize("text", ["29400", "host", "host:port", "::1:29400", "host:70000"])
def test_what_is_no_address_is_said(text: str) -> None:
    with pytest.raises(ValueError, match="is no ADDRESS:PORT"):
        parse_address(text)


def test_outputs_beyond_the_limit_are_dropped_and_results_are_kept() -> None:
    inbox = Inbox(limit=100)
    inbox.begin(2)
    for number in range(5):
        inbox.put(2, 0, ("text", "stdout", str(number)), 40)
    inbox.put(2, 0, ("done", 1, {}), 10**9)
    inbox.put(1, 0, ("done", 1, {}), 10)  # of ranks that were ended
    got = [message for _, message in inbox.take(0)]
    assert got[0] == ("text", "stderr", "… 3 outputs were dropped\n")
    assert [message[-1] for message in got[1:3]] == ["0", "1"]
    assert [message[0] for message in got[3:]] == ["done"]
    assert inbox.take(0) == []
