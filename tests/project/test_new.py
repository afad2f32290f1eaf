"""`fmlab new`: the project as its owner has it, from a folder that is not this repository's."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fmlab.cli import main
from fmlab.planner import OwnModels, gpt_shape
from fmlab.project import Target, new_project
from fmlab.project.create import package_name


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=280)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("new") / "owl"
    return new_project("Night-Owl", folder, Target(chip="trn1", chips=64, form="slurm"))


@pytest.mark.slow
@pytest.mark.launched
def test_a_new_project_passes_its_own_tests(project: Path) -> None:
    said = python(project, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    assert said.returncode == 0, said.stdout[-4000:]
    assert "9 passed" in said.stdout


def test_it_bears_its_own_name_everywhere(project: Path) -> None:
    files = [path for path in project.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    names = {str(path.relative_to(project)) for path in files}
    assert {".gitignore", "README.md", "pyproject.toml", "night_owl/model.py", "tests/test_model.py"} <= names
    for path in files:
        text = path.read_text()
        assert "my_model" not in text, path
        assert "my-model" not in text, path
    assert tomllib.loads((project / "pyproject.toml").read_text())["project"]["name"] == "Night-Owl"


def test_its_launch_files_start_its_own_program_on_whole_hosts(project: Path) -> None:
    settings = tomllib.loads((project / "launch" / "run.toml").read_text())
    assert (settings["model"], settings["backend"]) == ("full", "neuron")
    job = (project / "launch" / "job.sbatch").read_text()
    assert "--nodes=2" in job  # 32 cores of Trainium in a trn1.32xlarge
    assert "--nproc-per-node 32" in job
    assert "-m night_owl.train --config run.toml" in job
    assert f"{settings['steps'] * settings['batch_size'] * settings['seq_len'] / 7e9:.2f}" == "1.00"


@pytest.mark.slow
def test_its_program_trains_and_resumes_and_names_its_models(project: Path, tmp_path: Path) -> None:
    common = ("-m", "night_owl.train", "tiny", "--batch-size", "4", "--eval-every", "0", "--lr", "3e-3")
    first = python(project, *common, "--steps", "2", "--out", str(tmp_path / "run"))
    assert first.returncode == 0, first.stderr
    more = python(project, *common, "--steps", "3", "--out", str(tmp_path / "run"), "--resume")
    assert more.returncode == 0, more.stderr
    assert "3 steps" in more.stdout
    unknown = python(project, "-m", "night_owl.train", "giant")
    assert unknown.returncode == 2
    assert (
        unknown.stderr.strip() == "fmlab: train: there is no model 'giant' here; the models are: tiny, full"
    )


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("1st", "first a letter"),
        ("a b", "first a letter"),
        ("../up", "first a letter"),
        ("class", "Python has a use"),
        ("json", "Python has a use"),
        ("torch", "installed already"),
        ("fmlab", "installed already"),
    ],
)
def test_a_name_that_will_not_do_is_refused(name: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        package_name(name)


def test_what_cannot_be_started_leaves_nothing(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new", "owl", "--chip", "tpu-v5e", "--chips", "8"]) == 2
    assert "started by TorchTPU itself" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert main(["new", "owl", "--chip", "h1000"]) == 2
    assert "unknown chip 'h1000'" in capsys.readouterr().err
    assert main(["new", "owl", "--form", "kubernetes"]) == 2
    assert "which needs one" in capsys.readouterr().err
    (tmp_path / "owl").mkdir()
    assert main(["new", "owl"]) == 2
    assert "exists" in capsys.readouterr().err


def test_a_shape_of_another_model_is_refused() -> None:
    from torch import nn

    shape = gpt_shape(name="tiny", layers=2, hidden=8, heads=2, vocab=16)
    own = OwnModels("x.train", {"tiny": lambda: nn.Linear(4, 4)}, {"tiny": shape})
    with pytest.raises(ValueError, match=r"has 20 parameters, and its shape says 1,8"):
        own.shape("tiny")
    with pytest.raises(ValueError, match="give both"):
        OwnModels("x.train", {}, {"tiny": shape})
