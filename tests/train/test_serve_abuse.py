"""What a server meets from clients that are wrong, slow or gone, and how it ends while they are there."""

import http.client
import json
import socket
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fmlab.data import ByteBPE
from fmlab.models import BERT, GPT, T5
from fmlab.train.serve import Server
from fmlab.train.serve.__main__ import main
from fmlab.train.serve.batching import Batcher, Request


def small_server(max_positions: int = 256) -> Server:
    tokenizer = ByteBPE.train(["the cat sat on the mat " * 40], 270)
    torch.manual_seed(0)
    shape: dict[str, Any] = dict(vocab_size=tokenizer.vocab_size, hidden_size=16, num_layers=1, num_heads=2)
    model = GPT.from_preset("gpt2-tiny", **shape, max_positions=max_positions)
    return Server(model, tokenizer, pages=60, page_size=8, max_batch=4)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with small_server() as running:
        yield running


def connect(server: Server) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def post(body: bytes, *headers: str, version: str = "1.1") -> bytes:
    lines = [
        f"POST /v1/completions HTTP/{version}",
        "Host: x",
        *(headers or [f"Content-Length: {len(body)}"]),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


def until_closed(client: socket.socket) -> bytes:
    parts = []
    while part := client.recv(65536):
        parts.append(part)
    return b"".join(parts)


ABUSE = {
    "a temperature that no float holds": b'{"prompt": "a", "temperature": 1%s}' % (b"0" * 400),
    "a number of thousands of digits": b'{"prompt": "a", "seed": %s}' % (b"9" * 5000),
    "JSON a hundred thousand deep": b"[" * 100_000,
    "ids to echo that are no tokens": b'{"prompt": [1000000000], "echo": true}',
    "a negative id to echo": b'{"prompt": [-1], "echo": true}',
    "a stop that is no text": b'{"prompt": "a", "stop": {}}',
}


@pytest.mark.parametrize("case", ABUSE)
def test_one_request_is_refused_and_the_server_goes_on(server: Server, case: str) -> None:
    client = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=10)
    good = b'{"prompt": "the", "max_tokens": 1}'
    for body, status in ((ABUSE[case], 400), (good, 200)):  # on one connection
        client.request("POST", "/v1/completions", body)
        answer = client.getresponse()
        answer.read()
        assert answer.status == status
    client.close()


@pytest.mark.parametrize(
    "headers", [("Transfer-Encoding: chunked",), ("Accept: */*",), ("Content-Length: -1",)]
)
def test_a_body_without_a_length_is_never_read_as_the_next_request(
    server: Server, headers: tuple[str, ...]
) -> None:
    with connect(server) as client:
        client.sendall(post(b'5\r\n{"a":\r\n', *headers))
        answer = until_closed(client)
    assert answer.startswith(b"HTTP/1.1 411")
    assert answer.count(b"HTTP/1.1") == 1
    with connect(server) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello")
        answer = until_closed(client)
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.count(b"HTTP/1.1") == 1


def test_a_body_that_ends_early_is_refused_and_http_1_0_gets_no_chunks(server: Server) -> None:
    with connect(server) as client:
        client.sendall(post(b'{"prompt": "a"}', "Content-Length: 100"))
        client.shutdown(socket.SHUT_WR)
        assert b"the body ended after 15 of 100 bytes" in until_closed(client)
    with connect(server) as client:
        client.sendall(post(b'{"prompt": "a", "max_tokens": 2, "stream": true}', version="1.0"))
        answer = until_closed(client).split(b"\r\n\r\n", 1)[1]
    assert answer.startswith(b"data: {")
    assert answer.endswith(b"data: [DONE]\n\n")


def test_two_clients_with_one_seed_get_one_text_and_a_prompt_as_long_as_the_model_none(
    server: Server,
) -> None:
    body = json.dumps(dict(prompt="the", max_tokens=40, seed=7)).encode()
    texts = []

    def ask() -> None:
        with connect(server) as client:
            client.sendall(post(body, f"Content-Length: {len(body)}", "Connection: close"))
            texts.append(json.loads(until_closed(client).split(b"\r\n\r\n", 1)[1])["choices"][0]["text"])

    threads = [threading.Thread(target=ask) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 5
    assert len(set(texts)) == 1
    with connect(server) as client:
        body = json.dumps(dict(prompt=[1] * 256, max_tokens=1)).encode()
        client.sendall(post(body, f"Content-Length: {len(body)}", "Connection: close"))
        assert b"more than the model's 256 positions" in until_closed(client)


def test_closing_ends_running_idle_and_half_sent_requests_and_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    server = small_server(max_positions=480)
    running, idle, half = (connect(server) for _ in range(3))
    body = b'{"prompt": "the", "max_tokens": 470, "stream": true}'
    running.sendall(post(body))
    running.recv(100)
    idle.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert idle.recv(65536).startswith(b"HTTP/1.1 200")
    half.sendall(post(body)[:-10])
    begun = time.monotonic()
    server.close()
    assert time.monotonic() - begun < 8
    for client in (running, idle, half):
        client.close()
    assert not [thread for thread in set(threading.enumerate()) - before if thread.is_alive()]
    with pytest.raises(RuntimeError, match="the server is closing"):
        server.worker.stream(Request((1,)))


def test_a_tokenizer_reads_for_several_threads_what_each_has_asked_for() -> None:
    tokenizer = ByteBPE.train(["the cat sat on the mat " * 40], 270)
    text = "the cat <|endoftext|> " * 1000
    wanted = {special: tokenizer.encode(text, special) for special in (True, False)}
    assert len(wanted[False]) > len(wanted[True])
    wrong: list[int] = []

    def read(special: bool) -> None:
        wrong.extend(1 for _ in range(10) if tokenizer.encode(text, special) != wanted[special])

    threads = [threading.Thread(target=read, args=(i % 2 == 0,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_models_that_continue_no_text_are_refused() -> None:
    for model in (T5.from_preset("t5-tiny", vocab_size=50), BERT.from_preset("bert-tiny", vocab_size=50)):
        with pytest.raises(ValueError, match="is no decoder that continues a text"):
            Batcher(model)


def test_it_is_for_this_machine_unless_said_and_then_it_warns(capsys: pytest.CaptureFixture[str]) -> None:
    shape: dict[str, Any] = dict(hidden_size=16, num_layers=1, num_heads=2, vocab_size=270)
    tokenizer, model = ByteBPE.train(["the cat sat " * 40], 270), GPT.from_preset("gpt2-tiny", **shape)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Server(model, tokenizer) as server:
            assert server.url.startswith("http://127.0.0.1:")
    with (
        pytest.warns(UserWarning, match=r"host 0\.0\.0\.0: everyone who reaches this machine"),
        Server(model, tokenizer, host="0.0.0.0"),
    ):
        pass
    with pytest.raises(ValueError, match="host is empty, which would be all addresses"):
        Server(model, tokenizer, host="")
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "127.0.0.1" in capsys.readouterr().out
