"""`fmlab lab`: JupyterLab on the first notebook, on this machine's loopback address, behind a token.

The server runs in a process of its own, with its output in a log file, so that what the learner sees is one
address. It ends with this process, however that ends.
"""

import argparse
import ctypes
import hashlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fmlab.addresses import is_loopback
from fmlab.data.cache import cache_directory
from fmlab.extras import require
from fmlab.lab.curriculum import load, notebooks_folder
from fmlab.lab.export import export

COPIES = "learn"  # the learner's own notebooks, in the repository but not part of it
FIRST_PORT, PORTS = 8888, 50
EVERYWHERE = ("0.0.0.0", "::", "*", "")  # listens on all addresses of this machine
SETTINGS = Path(__file__).parent / "jupyter_config"  # JupyterLab's defaults here: no news popup
STARTUP = Path(__file__).parent / "startup.py"  # what each kernel runs first


@dataclass(frozen=True)
class Server:
    """Where the server listens and what it shows."""

    folder: Path
    ip: str
    port: int
    page: str  # path of the page to open, such as /lab
    token: str  # "" where a password guards a public address

    @property
    def origin(self) -> str:
        name = socket.gethostname() if self.ip in EVERYWHERE else self.ip
        host = f"[{name}]" if ":" in name else name
        return f"http://{host}:{self.port}"

    @property
    def address(self) -> str:
        return f"{self.origin}{self.page}" + (f"?token={self.token}" if self.token else "")

    def command(self, browser: bool) -> list[str]:
        """The command line; the token is not on it, since every user of the machine can read those."""
        command = [
            *(sys.executable, "-m", "jupyterlab"),
            f"--ServerApp.root_dir={self.folder}",
            f"--ServerApp.ip={self.ip}",
            f"--ServerApp.port={self.port}",
            "--ServerApp.port_retries=0",
            f"--LabApp.default_url={self.page}",
            # Which notebooks were open is remembered for each folder: another clone's must not come up here.
            f"--LabApp.workspaces_dir={workspaces(self.folder)}",
        ]
        if not browser:
            command.append("--no-browser")
        if os.geteuid() == 0:
            command.append("--allow-root")
        return command

    def environment(self) -> dict[str, str]:
        paths = [str(SETTINGS), os.environ.get("JUPYTER_CONFIG_PATH", "")]
        env = {
            "PYTHONSTARTUP": str(STARTUP),
            **os.environ,  # a startup file of the learner's own wins
            "JUPYTER_CONFIG_PATH": os.pathsep.join(filter(None, paths)),
        }
        env.pop("JUPYTER_TOKEN", None)
        return {**env, "JUPYTER_TOKEN": self.token} if self.token else env


def workspaces(folder: Path) -> Path:
    """Where JupyterLab remembers what was open in `folder`."""
    return cache_directory() / "lab" / hashlib.sha256(str(folder).encode()).hexdigest()[:12]


def choose_folder(given: Path | None) -> Path:
    """The folder to serve: the one given, else the repository, else the current one.

    Raises FileNotFoundError when the one given is no folder.
    """
    if given is not None:
        if not given.is_dir():
            raise FileNotFoundError(f"{given} is no folder; give one that exists, or none for the repository")
        return given.resolve()
    try:
        folder = notebooks_folder()
    except FileNotFoundError:
        return Path.cwd()
    # a wheel carries notebooks inside the installation, where nobody should edit them
    return folder.parent if folder.name == "notebooks" else Path.cwd()


def first_page(folder: Path) -> str:
    """The page to open: where `folder` is the repository, a copy of the first notebook, else the launcher.

    Learners work on copies in `learn/`: empty, so that a prediction comes before its answer, and apart from
    the originals, so that neither the checks nor an update of the repository stumble over what they wrote.
    A copy that was changed is never touched.
    """
    notebooks = folder / "notebooks"
    if not (notebooks / "curriculum.toml").is_file():
        return "/lab"
    curriculum = load(notebooks)
    if any(not (notebooks / entry.path).is_file() for entry in curriculum.ready):
        return "/lab"  # an author's tree in which not all is built
    export(folder / COPIES, solutions=True, outputs=False, notebooks=notebooks, keep=True)
    return f"/lab/tree/{COPIES}/{curriculum.entries[0].path.as_posix()}"


def check_ip(ip: str) -> bool:
    """Whether `ip` is reachable from this machine only. Raises ValueError when it is public and unguarded."""
    if is_loopback(ip):
        return True
    if not has_password(jupyter_settings()):
        raise ValueError(
            f"--ip {ip or repr(ip)} would let everyone who reaches this machine run programs on it. Set a "
            f"password first: jupyter server password. Or stay on 127.0.0.1 and forward the port from the "
            f"other computer: ssh -L {FIRST_PORT}:127.0.0.1:{FIRST_PORT} {socket.gethostname()}"
        )
    return False


def jupyter_settings() -> Any:
    """What Jupyter's own configuration files say, as it will read them."""
    app = require("lab", "jupyter_server.serverapp").ServerApp()
    app.load_config_file()
    return app.config


def _set_to(settings: Any, *names: str) -> Iterator[Any]:
    """The values of a setting, under the names that Jupyter has had for it, in all classes that take it."""
    for group in ("PasswordIdentityProvider", "IdentityProvider", "ServerApp", "NotebookApp"):
        yield from (settings[group][name] for name in names if group in settings and name in settings[group])


def has_password(settings: Any) -> bool:
    """Whether a password is set, as by `jupyter server password`. Raises ValueError for an empty one."""
    matches = require("lab", "jupyter_server.auth").passwd_check
    found = [value for value in _set_to(settings, "hashed_password", "password") if value]
    for hashed in found:
        try:
            empty = matches(hashed, "")
        except Exception:  # no hash at all, which lets nobody in
            continue
        if empty:
            raise ValueError("Jupyter's password is empty: set another one by: jupyter server password")
    return bool(found)


def choose_token(settings: Any) -> str:
    """The token of a server on loopback: a new one, or what Jupyter's configuration says, which would win.

    Raises ValueError when that is empty and there is no password: every user of this machine could run
    programs as you.
    """
    password = has_password(settings)
    for token in _set_to(settings, "token"):
        if not token and not password:
            raise ValueError(
                "Jupyter's configuration sets an empty token and no password, so that every user of this "
                "machine could run programs as you: take the line with 'token' out of it (jupyter --paths "
                "says where it is), or set a password: jupyter server password"
            )
        return str(token)
    return secrets.token_hex(24)


def choose_port(ip: str, wanted: int | None) -> int:
    """A free port: the one wanted, or the first from 8888 on. Raises ValueError when there is none."""
    if wanted is not None and not 0 < wanted < 2**16:
        raise ValueError(f"port {wanted} does not exist; legal: 1 to 65535")
    ports = range(FIRST_PORT, FIRST_PORT + PORTS) if wanted is None else [wanted]
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    for port in ports:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("" if ip == "*" else ip, port))
            except OSError:
                continue
            return port
    if wanted is not None:
        raise ValueError(f"port {wanted} is taken; choose another, or leave --port out to get a free one")
    raise ValueError(
        f"the ports {FIRST_PORT} to {FIRST_PORT + PORTS - 1} are all taken; choose one with --port"
    )


def can_open_browser(platform: str, environ: Mapping[str, str]) -> bool:
    """Whether a browser that this process starts would appear before the learner."""
    if environ.get("BROWSER"):
        return True
    if platform == "darwin":
        return not environ.get("SSH_CONNECTION")
    wsl = "WSL_DISTRO_NAME" in environ and shutil.which("wslview") is not None
    return wsl or bool(environ.get("DISPLAY") or environ.get("WAYLAND_DISPLAY"))


def _die_with_parent() -> None:
    """In the new process: end when the parent is killed without a chance to say so (Linux only)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def start(server: Server, browser: bool, log: Path | None) -> subprocess.Popen[bytes]:
    """Start the server, with its output in `log` (None: on the terminal)."""
    sink = None if log is None else os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        # a session of its own: Ctrl-C reaches this process alone, which then ends the server in order
        return subprocess.Popen(
            server.command(browser),
            env=server.environment(),
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
    finally:
        if sink is not None:
            os.close(sink)


def wait_until_up(server: Server, process: subprocess.Popen[bytes], seconds: float = 60) -> bool:
    """Whether the server answers within the time; False at once when it ended."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        if _status(server, "/api") is not None:
            return True
        time.sleep(0.1)
    return False


def is_open(server: Server) -> bool:
    """Whether the server shows its files to who gives neither token nor password, whatever the reason."""
    return _status(server, "/api/contents") == 200


def _status(server: Server, page: str) -> int | None:
    """The status of a page that is asked for without a token; None when nobody answers."""
    host = ("::1" if server.ip == "::" else "127.0.0.1") if server.ip in EVERYWHERE else server.ip
    probe = Server(server.folder, host, server.port, page, "")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never through a proxy
    try:
        with opener.open(probe.address, timeout=2) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None


def stop(process: subprocess.Popen[bytes], seconds: float = 10) -> None:
    """End the server, which ends its kernels first; kill it if it does not."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _welcome(server: Server, log: Path | None) -> str:
    lines = ["", "JupyterLab is running. Open it at:", "", f"    {server.address}", ""]
    if os.environ.get("SSH_CONNECTION"):
        tunnel = f"ssh -L {server.port}:127.0.0.1:{server.port} {socket.gethostname()}"
        lines.append(f"From another computer, first run there:  {tunnel}")
    lines.append("Stop it with Ctrl-C." + (f" Its log: {log}" if log else ""))
    return "\n".join(lines)


def _raise_interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def main(argv: list[str]) -> int:
    """Serve until interrupted. Returns 0 after an orderly end, 1 when the server failed."""
    parser = argparse.ArgumentParser(prog="fmlab lab", description="Open JupyterLab on the first notebook.")
    parser.add_argument("folder", nargs="?", type=Path, help="folder to serve (default: the repository)")
    parser.add_argument("--port", type=int, help=f"default: the first free one from {FIRST_PORT} on")
    parser.add_argument("--ip", default="127.0.0.1", help="default: %(default)s, this machine only")
    parser.add_argument("--no-browser", action="store_true", help="only print the address")
    parser.add_argument("--verbose", action="store_true", help="show the server's own messages")
    args = parser.parse_args(argv)
    require("lab", "jupyterlab")
    private = check_ip(args.ip)
    folder = choose_folder(args.folder)
    token = choose_token(jupyter_settings()) if private else ""
    server = Server(folder, args.ip, choose_port(args.ip, args.port), first_page(folder), token)
    browser = not args.no_browser and can_open_browser(sys.platform, os.environ)
    log = None if args.verbose else _log_file(server.port)
    for name in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, _raise_interrupt)
    print(f"Starting JupyterLab in {folder} (a few seconds) ...", flush=True)
    process = start(server, browser, log)
    try:
        if not wait_until_up(server, process):
            return _failed(process, log)
        if is_open(server):
            raise ValueError(
                "the server asked for neither token nor password, and was ended: something in Jupyter's "
                "configuration lets everybody in (jupyter --paths says where it is)"
            )
        print(_welcome(server, log), flush=True)
        process.wait()
        return _failed(process, log) if process.returncode else 0
    except KeyboardInterrupt:
        print("\nStopping JupyterLab and its kernels ...", flush=True)
        return 0
    finally:
        stop(process)


def _log_file(port: int) -> Path:
    folder = Path(require("lab", "jupyter_core.paths").jupyter_runtime_dir())
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"fmlab-lab-{port}.log"


def _failed(process: subprocess.Popen[bytes], log: Path | None) -> int:
    if log is not None:
        print("\n".join(log.read_text(errors="replace").splitlines()[-20:]), file=sys.stderr)
    state = "did not answer in a minute" if process.poll() is None else f"ended with code {process.poll()}"
    print(f"JupyterLab {state}; 'fmlab lab --verbose' shows what it says", file=sys.stderr)
    return 1
