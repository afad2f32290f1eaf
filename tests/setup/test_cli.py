"""`fmlab` itself: fast, readable, and clear about what the user can put right."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fmlab import cli, doctor


def fmlab(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "fmlab.cli", *argv], capture_output=True, text=True)


def test_help_lists_every_command() -> None:
    answer = fmlab("--help")
    assert answer.returncode == 0
    assert all(f"  {name} " in answer.stdout for name in cli.COMMANDS)
    assert max(map(len, answer.stdout.splitlines())) <= 80


def test_every_command_exists_and_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for name in cli.COMMANDS:
        with pytest.raises(SystemExit) as end:
            cli._load(name)(["--help"])
        assert end.value.code == 0, name
        assert capsys.readouterr().out.strip(), name


def test_version() -> None:
    assert fmlab("--version").stdout == "fmlab 0.1.0\n"


def test_an_unknown_command_lists_the_legal_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trian"]) == 2
    said = capsys.readouterr().err
    assert "trian" in said
    assert "train" in said


@pytest.mark.parametrize("kind", [ValueError, ImportError, OSError])
def test_a_users_error_is_one_line_and_debug_shows_where(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(argv: list[str]) -> int:
        raise kind("a bad\n  value")

    monkeypatch.setattr(cli, "_load", lambda name: command)
    assert cli.main(["bench"]) == 2
    assert capsys.readouterr().err == "fmlab: bench: a bad value\n"
    with pytest.raises(kind):
        cli.main(["--debug", "bench"])


def test_a_bug_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_load", lambda name: lambda argv: {}["missing"])
    with pytest.raises(KeyError):
        cli.main(["bench"])


def test_a_missing_extra_is_one_line_with_its_command() -> None:
    code = "import sys; sys.modules['jupyterlab'] = None; from fmlab.cli import main; sys.exit(main(['lab']))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert answer.returncode == 2
    assert answer.stderr.count("\n") == 1
    assert "pip install '.[lab]'" in answer.stderr


def test_doctor_for_a_program() -> None:
    answer = fmlab("doctor", "--json")
    facts = json.loads(answer.stdout)
    assert facts["hardware"]["cores"] >= 1
    assert facts["versions"]["torch"]
    assert {row["number"] for row in facts["notebooks"]} >= {"0.1", "3.7"}
    assert answer.returncode == 0 if facts["add"] is None else 1


def test_doctor_names_what_is_missing_and_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(doctor.EXTRAS, "hf", ("no_such_module",))
    facts = doctor.report()
    text = "\n".join(doctor.lines(facts))
    states = {row["number"]: row["runs"] for row in facts["notebooks"]}
    assert states["1.3"] == "needs the extra hf"
    assert states["0.1"] == "yes"
    assert "no_such_module" in text
    assert "hf" in facts["add"]
    assert facts["add"] in text


def test_doctor_says_how_to_get_the_environment_of_the_chapters_on_xla(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fmlab.lab import curriculum

    (tmp_path / "notebooks").mkdir()
    text = (curriculum.notebooks_folder() / "curriculum.toml").read_text()
    (tmp_path / "notebooks" / "curriculum.toml").write_text(text)
    monkeypatch.setattr(curriculum, "notebooks_folder", lambda: tmp_path / "notebooks")
    monkeypatch.setattr(doctor.sys, "platform", "linux")
    monkeypatch.setattr(doctor.platform, "machine", lambda: "x86_64")
    monkeypatch.setitem(doctor.EXTRAS, "xla", ("no_such_module",))

    def state() -> str:
        return next(str(row["runs"]) for row in doctor.report()["notebooks"] if row["number"] == "1.11")

    assert state() == "needs the environment for XLA: make lab-xla"
    assert "make lab-xla" in doctor.report()["add"]
    states = {row["runs"] for row in doctor.report()["notebooks"]} - {"yes", "to come", state()}
    assert doctor.main([]) == (1 if states else 0), "an environment that is optional is no fault"
    (tmp_path / ".venv-xla").mkdir()
    (tmp_path / ".venv-xla" / "fmlab-stamp.json").write_text("{}")
    assert state() == "yes", "in its own kernel"
    monkeypatch.setattr(doctor.platform, "machine", lambda: "aarch64")
    assert state() == "needs linux-x86_64"


def test_doctor_in_another_environment_speaks_of_pip() -> None:
    assert doctor.install_command(["lab", "hf"], None) == "pip install '.[hf,lab]' (in fmlab's folder)"
    own = Path(sys.prefix).parent if Path(sys.prefix).name == ".venv" else None
    if own is not None:
        assert doctor.install_command(["hf"], own) == 'make setup ARGS="--extras hf"'


def test_placeholder_packages_are_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch_neuronx": "1.0", "torch_xla": "2.9.0"}
    monkeypatch.setattr(doctor, "version_of", versions.get)
    assert [(item["stack"], item["state"]) for item in doctor._stacks()] == [
        ("torch_xla", "installed"),
        ("torch_neuronx", "placeholder"),
    ]


def test_doctor_without_the_lab_extra() -> None:
    hidden = ["jupyterlab", "IPython", "ipywidgets", "matplotlib", "nbclient", "nbformat", "transformers"]
    code = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {hidden!r}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name: None if name in {hidden!r} else find(name)
from fmlab.cli import main
sys.exit(main(["doctor"]))
"""
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert answer.returncode == 1, answer.stderr
    assert "needs the extra lab" in answer.stdout
    assert "To add what the notebooks lack" in answer.stdout
