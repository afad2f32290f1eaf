"""The server as a client sees it: real sockets, streaming, refusals, load, clients that leave."""

import json
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fmlab.data import ByteBPE
from fmlab.models import GPT
from fmlab.train.generate import generate
from fmlab.train.serve import Server
from fmlab.train.serve.__main__ import main
from fmlab.train.serve.load import run_load
from fmlab.train.serve.text import TextStream

TEXT = ["the cat sat on the mat é中文 " * 40]


def small(**overrides: Any) -> tuple[GPT, ByteBPE]:
    tokenizer = ByteBPE.train(TEXT, 300)
    torch.manual_seed(0)
    shape = dict(vocab_size=tokenizer.vocab_size, hidden_size=32, num_layers=2, num_heads=2, init_std=0.3)
    return GPT.from_preset("gpt2-tiny", **{**shape, **overrides}).eval(), tokenizer


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Server, GPT, ByteBPE]]:
    model, tokenizer = small()
    with Server(model, tokenizer, pages=60, page_size=8, max_batch=4, max_waiting=8) as server:
        yield server, model, tokenizer


def ask(server: Server, path: str = "/v1/completions", raw: bytes | None = None, **body: Any) -> Any:
    data = raw if raw is not None else (json.dumps(body).encode() if body else None)
    with urllib.request.urlopen(urllib.request.Request(server.url + path, data), timeout=60) as answer:
        return json.loads(answer.read())


def test_the_answer_is_what_generate_gives(served: Any) -> None:
    server, model, tokenizer = served
    got = ask(server, prompt="the cat", max_tokens=12, temperature=0)
    assert got["object"] == "text_completion"
    assert got["choices"][0]["text"] == generate(model, tokenizer, "the cat", max_new_tokens=12, greedy=True)
    assert got["usage"]["prompt_tokens"] == len(tokenizer.encode("the cat"))
    drawn = ask(server, prompt="the cat", max_tokens=12, temperature=0.8, top_p=0.9, seed=5, echo=True)
    wanted = generate(model, tokenizer, "the cat", max_new_tokens=12, temperature=0.8, top_p=0.9, seed=5)
    assert drawn["choices"][0]["text"] == "the cat" + wanted
    assert drawn["choices"][0]["finish_reason"] in ("length", "stop")
    by_ids = ask(server, prompt=tokenizer.encode("the cat"), max_tokens=12, temperature=0)
    assert by_ids["choices"][0]["text"] == got["choices"][0]["text"]


def test_streamed_pieces_make_up_the_answer_and_characters_stay_whole(served: Any) -> None:
    server, _, _ = served
    whole = ask(server, prompt="é", max_tokens=30, temperature=0)["choices"][0]["text"]
    report = run_load(server.url, [dict(prompt="é", max_tokens=30, temperature=0)])
    assert report.failed == 0
    assert report.answers[0].text == whole


def test_stop_strings_end_a_text_and_are_left_out(served: Any) -> None:
    server, _, _ = served
    whole = ask(server, prompt="the", max_tokens=30, temperature=0)["choices"][0]["text"]
    stop = whole[8:11]
    cut = ask(server, prompt="the", max_tokens=30, temperature=0, stop=stop)
    assert cut["choices"][0]["text"] == whole[: whole.index(stop)]
    assert cut["choices"][0]["finish_reason"] == "stop"
    streamed = run_load(server.url, [dict(prompt="the", max_tokens=30, temperature=0, stop=[stop])])
    assert streamed.answers[0].text == whole[: whole.index(stop)]


def test_text_that_may_still_change_is_held_back() -> None:
    class Letters:
        def decode(self, ids: list[int]) -> str:
            return bytes(ids).decode(errors="replace")

    stream = TextStream(Letters(), stop=["abc"])
    pieces = [stream.push(byte) for byte in "é xab!".encode()]
    assert pieces == ["", "é", " ", "x", "", "", "ab!"]
    assert stream.finish() == ""
    stream = TextStream(Letters(), stop=["abc"])
    pieces = [stream.push(byte) for byte in b"-ab"]
    assert pieces == ["-", "", ""]
    assert stream.finish() == "ab"
    assert TextStream(Letters()).push(0xC3) == ""


BAD = {
    "not JSON": (b"{", "not JSON"),
    "no object": (b"[1]", "must be a JSON object"),
    "unknown field": (b'{"promt": "x"}', "unknown field 'promt'; legal: .*prompt"),
    "type": (b'{"prompt": "x", "max_tokens": "many"}', "max_tokens must be a whole number"),
    "not a number": (b'{"prompt": "x", "temperature": NaN}', "temperature must be"),
    "two texts": (b'{"prompt": ["a", "b"]}', "send one a request"),
    "not offered": (b'{"prompt": "x", "n": 2}', "n=2 is not offered"),
    "too long": (b'{"prompt": "x", "max_tokens": 100000}', "positions"),
    "negative": (b'{"prompt": "x", "max_tokens": -5}', "max_tokens must be at least 1, got -5"),
    "no prompt": (b"{}", "prompt is missing"),
    "null prompt": (b'{"prompt": null}', "prompt is missing"),
    "empty prompt": (b'{"prompt": ""}', "prompt is empty"),
    "no ids": (b'{"prompt": []}', "prompt is empty"),
    "stop": (b'{"prompt": "x", "stop": [""]}', "stop must be"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_requests_are_refused_with_the_field_and_the_reason(served: Any, case: str) -> None:
    body, message = BAD[case]
    with pytest.raises(urllib.error.HTTPError) as caught:
        ask(served[0], raw=body)
    assert caught.value.code == 400
    error = json.loads(caught.value.read())["error"]
    assert re.search(message, error["message"])
    assert ask(served[0], prompt="the", max_tokens=1)["choices"]  # and the server goes on


def test_other_routes(served: Any) -> None:
    server, _, _ = served
    assert ask(server, "/health") == {"status": "ok"}
    assert ask(server, "/v1/models")["data"][0]["id"] == "fmlab"
    assert ask(server, "/metrics")["new_tokens"] > 0
    with pytest.raises(urllib.error.HTTPError, match="404"):
        ask(server, "/v2")
    with pytest.raises(urllib.error.HTTPError, match="405"):
        ask(server)
    with pytest.raises(OSError, match=r"cannot be had .* choose another"):
        Server(served[1], served[2], port=int(server.url.rsplit(":", 1)[1]), pages=4)


def test_under_load_all_are_answered_as_alone_or_turned_away_and_no_page_is_lost(served: Any) -> None:
    server, model, tokenizer = served
    prompts = ["the cat", "the mat sat", "on", "é"]
    bodies = [dict(prompt=prompts[i % 4], max_tokens=5 + i % 9, temperature=0) for i in range(30)]
    report = run_load(server.url, bodies)
    answered = 0
    for body, answer in zip(bodies, report.answers, strict=True):
        if answer.error is not None:
            assert answer.error.startswith("429")
            continue
        answered += 1
        wanted = generate(model, tokenizer, body["prompt"], max_new_tokens=body["max_tokens"], greedy=True)
        assert answer.text == wanted
    assert answered >= 12  # 4 run and 8 wait at the least
    assert "tokens/s" in str(report)
    paced = run_load(server.url, bodies[:6], rate=200.0)
    assert paced.failed == 0
    assert ask(server, "/metrics")["pages_free"] == 60


def test_a_client_that_leaves_gives_its_pages_back(served: Any) -> None:
    server, _, _ = served
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps(dict(prompt="the", max_tokens=200, stream=True)).encode()
    with socket.create_connection((host, int(port))) as client:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        client.recv(200)
    deadline = time.monotonic() + 10
    while ask(server, "/metrics")["pending"] and time.monotonic() < deadline:
        time.sleep(0.02)
    metrics = ask(server, "/metrics")
    assert metrics["pending"] == 0
    assert metrics["pages_free"] == 60


def test_a_model_that_fails_is_told_to_every_client() -> None:
    model, tokenizer = small()
    with Server(model, tokenizer, pages=20) as server:
        model.register_forward_pre_hook(lambda *_: 1 / 0)
        for _ in range(2):
            with pytest.raises(urllib.error.HTTPError) as caught:
                ask(server, prompt="the", max_tokens=2)
            assert caught.value.code == 503
            assert "division by zero" in caught.value.read().decode()
        with pytest.raises(urllib.error.HTTPError, match="503"):
            ask(server, "/health")


def test_the_command_serves_a_saved_model(tmp_path: Path) -> None:
    model, tokenizer = small()
    model.save_pretrained(tmp_path)
    tokenizer.save(tmp_path)
    command = [sys.executable, "-m", "fmlab.train.serve", str(tmp_path), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            url = line.split(" at ")[1].split(";")[0]
            report = run_load(url, [dict(prompt="the", max_tokens=3)])
            assert report.failed == 0
        finally:
            process.terminate()
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"has no config\.json"):
        main([str(tmp_path / "empty")])
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "run" / "model" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"its model is in .*run/model"):
        main([str(tmp_path / "run")])
