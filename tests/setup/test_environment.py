"""The decisions of the set-up: when it is needed, and how an environment comes about on a bare machine."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import commands
import environment
import fm
import install
import pytest
from environment import MAIN, XLA

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    folder = tmp_path / "a clone"
    folder.mkdir()
    for name in ("pyproject.toml", MAIN.constraints, XLA.constraints):
        (folder / name).write_text((ROOT / name).read_text())
    return folder


@pytest.mark.parametrize("kind", [MAIN, XLA], ids=lambda kind: kind.folder)
def test_the_stamp_changes_with_all_that_matters_and_nothing_else(
    kind: environment.Environment, clone: Path
) -> None:
    here = kind.at(clone)
    project = clone / "pyproject.toml"
    before = here.key("3.11.7")
    project.write_text(project.read_text().replace("line-length = 110", "line-length = 100"))
    assert here.key("3.11.7") == before, "a linter's setting needs no new installation"
    assert here.key("3.12.1") != before
    other = XLA if kind is MAIN else MAIN
    (clone / other.constraints).write_text("torch==2.8.0\n")
    assert here.key("3.11.7") == before, "the other environment's packages are its own"
    (clone / kind.constraints).write_text("torch==2.14.0\n")
    changed = here.key("3.11.7")
    assert changed != before
    project.write_text(project.read_text().replace('"tqdm>=4.66"', '"tqdm>=4.67"'))
    assert here.key("3.11.7") not in (before, changed)


def test_more_extras_than_asked_for_are_fine(tmp_path: Path) -> None:
    stamp = {"key": "k", "extras": ["hf", "lab"]}
    assert environment.complete(stamp, "k", ["lab"])
    assert not environment.complete(stamp, "k", ["lab", "test"])
    assert not environment.complete(stamp, "other", ["lab"])
    broken = tmp_path / "stamp.json"
    broken.write_text('{"key": "k", "ext')  # the machine went down while it was written
    assert environment.read_stamp(broken) == {}
    assert environment.read_stamp(tmp_path / "absent") == {}


@pytest.mark.parametrize("kind", [MAIN, XLA], ids=lambda kind: kind.folder)
def test_something_else_called_venv_is_never_deleted(kind: environment.Environment, tmp_path: Path) -> None:
    mine = tmp_path / kind.folder
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    with pytest.raises(install.SetupError, match="no virtual environment"):
        kind.at(tmp_path).discard("broken")
    assert (mine / "thesis.txt").exists()


def test_where_there_is_no_torch_xla_one_line_says_so(
    clone: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(environment.sys, "platform", "darwin")
    monkeypatch.setattr(environment.platform, "machine", lambda: "arm64")
    with pytest.raises(install.SetupError, match="linux-x86_64 only, and this is darwin-arm64"):
        XLA.at(clone).ensure(["xla"])
    assert MAIN.why_not() is None
    assert commands.run("lab-xla", []) == 2
    assert "Everything else works: make lab" in capsys.readouterr().err
    option, reason = commands._prepare_xla(strict=True)
    assert option == "--without-xla"
    assert "linux-x86_64 only" in reason


def test_a_python_that_torch_xla_has_no_package_for(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment.sys, "platform", "linux")
    monkeypatch.setattr(environment.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(environment.sys, "version_info", (3, 14, 0))
    assert "up to 3.13" in str(XLA.at(clone).why_not())


def test_the_disk_is_looked_at_before_gigabytes_are_loaded(
    clone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = environment.shutil.disk_usage(clone)
    monkeypatch.setattr(environment.shutil, "disk_usage", lambda _: usage._replace(free=4 * 2**30))
    monkeypatch.setattr(environment.Environment, "why_not", lambda self: None)
    with pytest.raises(install.SetupError, match=r"4\.0 GB are free .*\.venv-xla needs 9 GB"):
        XLA.at(clone).ensure(["xla"])
    assert not (clone / XLA.folder).exists()


def test_a_kernel_that_was_lost_with_the_lab_is_listed_again(clone: Path) -> None:
    here = XLA.at(clone)
    assert here._registered(["kernel"]), "there is no .venv yet to list it in"
    (clone / ".venv").mkdir()
    assert not here._registered(["kernel"])
    assert here._registered(["unit"]), "not asked for"
    here.kernel_file.parent.mkdir(parents=True)
    here.kernel_file.write_text("{}")
    assert here._registered(["kernel"])


def test_supported_pythons() -> None:
    assert [fm.supported((3, minor, 0)) for minor in (10, 11, 14, 15)] == [False, True, True, False]


def test_an_old_python_says_how_to_get_a_new_one() -> None:
    message = fm.too_old()
    assert "3.11 to 3.14" in message
    assert "apt install" in message
    assert "brew install" in message


def python_without(tmp_path: Path, *modules: str) -> str:
    """A Python, as Debian ships it, that lacks some modules and cannot make complete environments."""
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    for module in modules:
        (hidden / f"{module}.py").write_text(f"raise ModuleNotFoundError('No module named {module!r}')\n")
    wrapper = tmp_path / "a python"
    base = getattr(sys, "_base_executable", sys.executable)
    wrapper.write_text(
        f"""#!/bin/sh
if [ "$1 $2" = "-m venv" ] && [ "$3" != --without-pip ]; then
    echo "The virtual environment was not created successfully because ensurepip is not available." >&2
    exit 1
fi
PYTHONPATH={shlex.quote(str(hidden))} exec {shlex.quote(base)} "$@"
"""
    )
    wrapper.chmod(0o755)
    return str(wrapper)


def kinds(ways: list[list[list[str]]]) -> list[str]:
    return [" ".join(way[0][1:4] if len(way[0]) > 3 else way[0][1:]) for way in ways]


def test_without_ensurepip_the_way_round_is_taken(tmp_path: Path) -> None:
    python = python_without(tmp_path, "ensurepip", "virtualenv")
    ways = install.venv_commands(tmp_path / "v", install.Tools(uv=None), python)
    assert not any(kind == f"-m venv {tmp_path / 'v'}" for kind in kinds(ways))
    assert "-m venv --without-pip" in kinds(ways)


def test_uv_comes_first_where_it_is(tmp_path: Path) -> None:
    ways = install.venv_commands(tmp_path / "v", install.Tools(uv="/opt/uv"), sys.executable)
    assert ways[0][0][:2] == ["/opt/uv", "venv"]
    assert len(ways) > 1, "there must be a way left when uv fails"


@pytest.mark.slow
def test_a_virtual_environment_without_ensurepip(tmp_path: Path) -> None:
    """For real: the environment works and has pip, though this Python cannot make one the usual way."""
    python = python_without(tmp_path, "ensurepip", "virtualenv")
    refusal = subprocess.run([python, "-m", "venv", str(tmp_path / "x")], capture_output=True, text=True)
    assert refusal.returncode != 0
    venv = tmp_path / "with space" / ".venv"
    install.create_venv(venv, install.Tools(uv=None), python)
    inside = str(venv / "bin" / "python")
    assert install.quiet([inside, "-m", "pip", "--version"]) is not None
    assert install.quiet([inside, "-c", "import sys; print(sys.prefix)"]) == str(venv)


def test_nothing_works_and_the_fix_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    python = python_without(tmp_path, "ensurepip", "virtualenv", "pip")
    with pytest.raises(install.SetupError, match=r"apt install python3\.\d+-venv"):
        install.create_venv(tmp_path / ".venv", install.Tools(uv=None), python)
    assert not (tmp_path / ".venv").exists()


def test_pips_folders_of_wheels_are_passed_to_uv() -> None:
    assert install.find_links({"PIP_FIND_LINKS": "/a b"}) == ["--find-links", "/a", "--find-links", "b"]
    assert install.find_links({}) == []


def test_the_cpu_index_is_taken_only_where_it_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Answer:
        status = 200

        def __enter__(self) -> "Answer":
            return self

        def __exit__(self, *_: object) -> None:
            pass

    def opened(url: str, timeout: float) -> Answer:
        asked.append((url, timeout))
        return Answer()

    monkeypatch.setattr(install.urllib.request, "urlopen", opened)
    monkeypatch.setattr(install.sys, "platform", "linux")
    monkeypatch.setattr(install, "has_nvidia", lambda: False)
    index = install.cpu_index(ROOT)
    assert index is not None
    assert asked == [(f"{index}/torch/", 3.0)]

    monkeypatch.setattr(install, "has_nvidia", lambda: True)
    assert install.cpu_index(ROOT) is None
    monkeypatch.setattr(install, "has_nvidia", lambda: False)
    monkeypatch.setattr(install.sys, "platform", "darwin")
    assert install.cpu_index(ROOT) is None

    def refused(url: str, timeout: float) -> Answer:
        raise TimeoutError("no route")

    monkeypatch.setattr(install.sys, "platform", "linux")
    monkeypatch.setattr(install.urllib.request, "urlopen", refused)
    assert install.cpu_index(ROOT) is None


def test_a_failed_step_shows_what_it_said(tmp_path: Path) -> None:
    with pytest.raises(install.SetupError, match="no space left"):
        install.run([sys.executable, "-c", "print('no space left'); raise SystemExit(1)"], tmp_path)


def test_make_passes_options_on_from_a_path_with_a_space(clone: Path) -> None:
    (clone / "Makefile").write_text((ROOT / "Makefile").read_text())
    (clone / "scripts").mkdir()
    (clone / "scripts" / "fm.py").write_text("import sys, json; print(json.dumps(sys.argv[1:]))")
    command = [
        "make",
        "--no-print-directory",
        "lab",
        "ARGS=--port 9000 --no-browser",
        f"PYTHON={sys.executable}",
    ]
    # not the settings of the make that may be running this test
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    answer = subprocess.run(command, cwd=clone, capture_output=True, text=True, env=env)
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout) == ["lab", "--port", "9000", "--no-browser"]


def test_an_unknown_command_lists_the_legal_ones() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "fm.py"), "lob"]
    answer = subprocess.run(command, capture_output=True, text=True)
    assert answer.returncode == 2
    assert (
        "setup, lab, lab-xla, lab-frontends, check, test, soak, parity, audit, bench, clean" in answer.stderr
    )
