"""`fmlab lab`: what it serves, to whom, and that it leaves nothing behind."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import psutil
import pytest

from fmlab.lab import launch

ROOT = Path(__file__).parents[2]


def no_password(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JUPYTER_CONFIG_DIR", str(tmp_path))
    monkeypatch.setenv("JUPYTER_CONFIG_PATH", str(tmp_path))


PUBLIC = ["0.0.0.0", "::", "*", "", "0", "192.168.1.5", "10.0.0.1", "fe80::1", "example.org", " 127.0.0.1"]


@pytest.mark.parametrize("ip", PUBLIC)
def test_a_public_address_needs_a_password(ip: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    no_password(monkeypatch, tmp_path)
    with pytest.raises(ValueError, match="jupyter server password"):
        launch.check_ip(ip)
    hashed = {"IdentityProvider": {"hashed_password": "argon2:x"}}
    (tmp_path / "jupyter_server_config.json").write_text(json.dumps(hashed))
    assert launch.check_ip(ip) is False


@pytest.mark.parametrize(
    "argv",
    [["--ip", ip] for ip in PUBLIC]
    + [["--ip="], ["--i", "0.0.0.0"], ["--ip", "127.0.0.1", "--ip", "0.0.0.0"]],
)
def test_the_command_refuses_before_it_listens(
    argv: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    no_password(monkeypatch, tmp_path)
    monkeypatch.setattr(launch, "start", lambda *args: pytest.fail("it would have listened"))
    with pytest.raises(ValueError, match="jupyter server password"):
        launch.main([*argv, str(tmp_path)])


@pytest.mark.parametrize("argument", ["--ServerApp.ip=0.0.0.0", "--IdentityProvider.token=", "--token=''"])
def test_what_is_jupyters_own_is_no_argument(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        launch.main([argument])
    assert "unrecognized arguments" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("jupyter_server_config.json", '{"IdentityProvider": {"token": ""}}'),
        ("jupyter_server_config.py", "c.ServerApp.token = ''"),
        ("jupyter_config.py", "c.PasswordIdentityProvider.token = ''; c.ServerApp.ip = '0.0.0.0'"),
        ("jupyter_server_config.py", "c.ServerApp.token = ''; c.ServerApp.password = ''"),
    ],
)
def test_an_empty_token_in_jupyters_configuration_is_refused(
    file: str, text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    no_password(monkeypatch, tmp_path)
    monkeypatch.setattr(launch, "start", lambda *args: pytest.fail("it would have listened"))
    (tmp_path / file).write_text(text)
    with pytest.raises(ValueError, match="sets an empty token and no password"):
        launch.main([str(tmp_path)])


def test_an_empty_password_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    auth = pytest.importorskip("jupyter_server.auth")
    no_password(monkeypatch, tmp_path)
    config = tmp_path / "jupyter_server_config.json"
    for hashed, wanted in ((auth.passwd(""), "password is empty"), ("", "jupyter server password")):
        config.write_text(json.dumps({"IdentityProvider": {"hashed_password": hashed}}))
        with pytest.raises(ValueError, match=wanted):
            launch.check_ip("0.0.0.0")
    config.write_text(
        json.dumps({"IdentityProvider": {"hashed_password": auth.passwd("a secret"), "token": ""}})
    )
    assert launch.check_ip("0.0.0.0") is False
    assert launch.choose_token(launch.jupyter_settings()) == "", "the password guards it"


def test_a_token_of_ones_own_is_the_one_in_the_address(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    no_password(monkeypatch, tmp_path)
    tokens = {launch.choose_token(launch.jupyter_settings()) for _ in range(2)}
    assert len(tokens) == 2
    assert min(map(len, tokens)) >= 32
    (tmp_path / "jupyter_server_config.py").write_text("c.IdentityProvider.token = 'mine'")
    assert launch.choose_token(launch.jupyter_settings()) == "mine"


@pytest.mark.parametrize("ip", ["127.0.0.1", "127.0.0.9", "::1", "localhost"])
def test_loopback_is_private(ip: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    no_password(monkeypatch, tmp_path)
    assert launch.check_ip(ip) is True


def test_the_token_is_not_on_the_command_line() -> None:
    server = launch.Server(Path("/a b"), "127.0.0.1", 8888, "/lab", "secret")
    assert not any("secret" in part for part in server.command(browser=True))
    assert server.environment()["JUPYTER_TOKEN"] == "secret"
    assert Path(server.environment()["PYTHONSTARTUP"]).is_file()
    assert "--ServerApp.ip=127.0.0.1" in server.command(browser=False)  # which wins over configuration files
    assert "--ServerApp.root_dir=/a b" in server.command(browser=False)
    assert server.address == "http://127.0.0.1:8888/lab?token=secret"
    other = launch.Server(Path("/a c"), "127.0.0.1", 8888, "/lab", "secret")
    remembered = [p for s in (server, other) for p in s.command(False) if "workspaces_dir" in p]
    assert len(set(remembered)) == 2, "what was open in one clone does not come up in another"
    assert ("--allow-root" in server.command(browser=False)) == (os.geteuid() == 0)


@pytest.mark.parametrize(
    ("platform", "environ", "opens"),
    [
        ("linux", {}, False),
        ("linux", {"DISPLAY": ":0"}, True),
        ("linux", {"WAYLAND_DISPLAY": "wayland-0"}, True),
        ("darwin", {}, True),
        ("darwin", {"SSH_CONNECTION": "a b"}, False),
        ("linux", {"BROWSER": "lynx"}, True),
    ],
)
def test_a_browser_is_opened_only_where_it_is_seen(
    platform: str, environ: dict[str, str], opens: bool
) -> None:
    assert launch.can_open_browser(platform, environ) is opens


def test_a_taken_port_is_refused_or_passed_over() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {port} is taken"):
            launch.choose_port("127.0.0.1", port)
    assert launch.choose_port("127.0.0.1", None) >= launch.FIRST_PORT


@pytest.mark.parametrize("port", [-1, 0, 65536])
def test_a_port_that_cannot_exist_is_refused(port: int) -> None:
    with pytest.raises(ValueError, match="legal: 1 to 65535"):
        launch.choose_port("127.0.0.1", port)


def test_the_first_page(tmp_path: Path) -> None:
    assert launch.first_page(tmp_path) == "/lab"
    shutil.copytree(ROOT / "notebooks", tmp_path / "notebooks")
    page = launch.first_page(tmp_path)
    assert page == "/lab/tree/learn/0_start/0.1_welcome.ipynb"
    copy = tmp_path / page.removeprefix("/lab/tree/")
    cells = json.loads(copy.read_text())["cells"]
    assert not any(cell.get("outputs") for cell in cells), "a prediction comes before its answer"
    copy.write_text("my work")
    assert launch.first_page(tmp_path) == page
    assert copy.read_text() == "my work"
    next((tmp_path / "notebooks").glob("*/*.ipynb")).unlink()
    assert launch.first_page(tmp_path) == "/lab", "not all is built"
    with pytest.raises(FileNotFoundError, match="is no folder"):
        launch.choose_folder(tmp_path / "nowhere")


@pytest.mark.parametrize("answer", [200, 403])
def test_a_server_that_lets_everybody_in_is_noticed(answer: int) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(answer)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.handle_request, daemon=True).start()
        server = launch.Server(Path("/a"), "127.0.0.1", http.server_port, "/lab", "secret")
        assert launch.is_open(server) == (answer == 200)


def status(url: str, token: str | None = None) -> int:
    request = urllib.request.Request(url, headers={"Authorization": f"token {token}"} if token else {})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.slow
def test_a_real_server(tmp_path: Path) -> None:
    """It prints one address, asks for the token, keeps the news away, and an interrupt ends all of it."""
    folder = tmp_path / "my course"
    folder.mkdir()
    (tmp_path / "jupyter_server_config.py").write_text("c.ServerApp.ip = '0.0.0.0'")  # ours wins
    env = {**os.environ, "JUPYTER_RUNTIME_DIR": str(tmp_path / "run"), "JUPYTER_CONFIG_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "fmlab.cli", "lab", "--no-browser", str(folder)]
    lab = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    assert lab.stdout is not None
    try:
        said = ""
        while "Ctrl-C" not in said:
            line = lab.stdout.readline()
            assert line, f"ended early: {said}"
            said += line
        match = re.search(r"(http://127\.0\.0\.1:\d+)/lab\?token=(\w+)", said)
        assert match is not None, said
        origin, token = match.groups()
        assert status(f"{origin}/api/contents") == 403
        assert status(f"{origin}/api/contents", token) == 200
        settings = f"{origin}/lab/api/settings/@jupyterlab/apputils-extension:notification"
        request = urllib.request.Request(settings, headers={"Authorization": f"token {token}"})
        with urllib.request.urlopen(request, timeout=10) as answer:
            schema = json.load(answer)["schema"]
        assert schema["properties"]["fetchNews"]["default"] == "false"
        assert status(f"{origin}/lab/api/workspaces/default", token) in (200, 404)  # the folder is taken
        started = psutil.Process(lab.pid).children(recursive=True)
        listening = [c.laddr.ip for p in started for c in p.net_connections("tcp") if c.status == "LISTEN"]
        assert set(listening) == {"127.0.0.1"}
        lab.send_signal(signal.SIGINT)
        assert lab.wait(30) == 0
        assert "Stopping JupyterLab" in lab.stdout.read()
        assert not psutil.wait_procs(started, timeout=10)[1]
    finally:
        lab.kill()
        lab.wait()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="a killed parent is noticed on Linux only")
def test_the_server_does_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    env = {**os.environ, "JUPYTER_RUNTIME_DIR": str(tmp_path / "run")}
    command = [sys.executable, "-m", "fmlab.cli", "lab", "--no-browser", str(tmp_path)]
    lab = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (started := psutil.Process(lab.pid).children()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert started
    lab.kill()
    lab.wait()
    assert not psutil.wait_procs(started, timeout=20)[1]
