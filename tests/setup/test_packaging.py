"""The package outside this repository, and the files that speak of it: wheel, README, Binder, constraints."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pin
import pytest
import readme
import teaching_tables

from fmlab.lab.curriculum import load

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    answer = subprocess.run([str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True)
    assert answer.returncode == 0, f"{command}\n{answer.stdout}\n{answer.stderr}"
    return answer.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=ROOT)
    return next(folder.glob("*.whl"))


def test_the_wheel_has_the_package_with_its_data_and_no_tests(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    for data in ("data/cards/python-docs.md", "_notebooks/curriculum.toml", "_data/published/runs.csv"):
        assert f"fmlab/{data}" in names
    assert any(name.endswith("labconfig/default_setting_overrides.json") for name in names)
    tops = {name.split("/")[0] for name in names}
    assert tops == {"fmlab", "fmlab-0.1.0.dist-info"}


def test_the_wheel_works_without_the_repository(wheel: Path, tmp_path: Path) -> None:
    """In a new environment that borrows the installed dependencies, but not this repository."""
    venv = tmp_path / "new env"
    run(sys.executable, "-m", "venv", "--without-pip", venv)
    python = venv / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    here = Path(pytest.__file__).parents[1]
    # a .pth file would also run the .pth files there, and with them the editable install of this repository
    (site / "zz_borrowed.pth").write_text(f"{here}\n")
    env = {**os.environ, "PYTHONSAFEPATH": "1"}
    where = run(python, "-c", "import fmlab; print(fmlab.__file__)", cwd=tmp_path, env=env)
    assert str(venv) in where
    assert run(venv / "bin" / "fmlab", "--version", cwd=tmp_path, env=env) == "fmlab 0.1.0\n"
    said = run(venv / "bin" / "fmlab", "doctor", cwd=tmp_path, env=env)
    assert "none: installed as a package" in said
    assert "mean of" in run(venv / "bin" / "fmlab", "plan", "validate", cwd=tmp_path, env=env)
    run(venv / "bin" / "fmlab", "export", tmp_path / "mine", cwd=tmp_path, env=env)
    assert list((tmp_path / "mine").rglob("*.ipynb"))


SNIPPETS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_each_snippet_of_the_readme_runs_on_its_own(number: int, tmp_path: Path) -> None:
    script = tmp_path / "snippet.py"
    script.write_text(SNIPPETS[number])
    said = run(sys.executable, script, cwd=tmp_path)
    for promised in re.findall(r"print\(.*\)  # (.*)", SNIPPETS[number]):
        assert promised in said


def test_the_readme_has_snippets_and_its_commands_exist() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(SNIPPETS) >= 4
    from fmlab.cli import COMMANDS

    shell = "\n".join(re.findall(r"```\n(.*?)```", text, re.DOTALL))
    named = set(re.findall(r"^fmlab ([a-z-]+)", shell, re.MULTILINE))
    named |= set(re.findall(r"`(?:\.venv/bin/)?fmlab ([a-z-]+)", text))
    assert {"train", "doctor"} <= named <= set(COMMANDS)
    targets = set(re.findall(r"^([a-z-]+(?: [a-z-]+)*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    known = {name for line in targets for name in line.split()}
    assert set(re.findall(r"`?make ([a-z-]+)", text)) <= known


def test_the_readme_agrees_with_the_curriculum() -> None:
    text = (ROOT / "README.md").read_text()
    assert text == readme.generated(text, load(ROOT / "notebooks")), "run: python scripts/readme.py"


def test_the_page_for_teachers_agrees_with_curriculum_and_exercises() -> None:
    text = (ROOT / "docs" / "teaching.md").read_text()
    assert text == teaching_tables.generated(text, load(ROOT / "notebooks")), (
        "run: python scripts/teaching_tables.py"
    )


def test_links_of_the_documents_lead_somewhere() -> None:
    broken = []
    for document in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        prose = re.sub(r"`[^`\n]*`", "", document.read_text())  # name[grid](arguments) is no link
        for target in re.findall(r"\]\(([^)#\s]+)\)", prose):
            if "://" not in target and not (document.parent / target).exists():
                broken.append(f"{document.name}: {target}")
    assert not broken


def test_every_requirement_is_pinned_once_and_for_any_machine() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.!]+( ; .+)?", line) for line in lines), (
        "no paths, no local versions"
    )
    names = [line.split("==")[0].lower() for line in lines]
    assert len(names) == len(set(names))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [
        *project["dependencies"],
        *(
            text
            for name in extras
            if name not in ("xla", "frontends", "tpu-aot", "all")
            for text in extras[name]
        ),
    ]
    for requirement in wanted:
        name = re.split(r"[<>=\[ ]", requirement)[0].lower().replace("_", "-")
        assert name in names, f"{name} is not in constraints.txt; run scripts/pin.py"


def test_pinning_keeps_markers_and_drops_local_versions() -> None:
    freeze = "torch==2.13.0+cpu\nsoupsieve==5.0\n-e /somewhere\n# a note\n"
    present = [
        "# header",
        'soupsieve==4.1 ; python_full_version >= "3.11.5"',
        'appnope==1.0 ; sys_platform == "darwin"',
    ]
    assert pin.pins(freeze, "\n".join(present)) == [
        'appnope==1.0 ; sys_platform == "darwin"',
        'soupsieve==5.0 ; python_full_version >= "3.11.5"',
        "torch==2.13.0",
    ]


def test_binder_takes_the_tested_pytorch() -> None:
    requirements = (ROOT / "binder" / "requirements.txt").read_text()
    pinned = re.search(r"^torch==\S+", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert pinned[0] in requirements.splitlines()
    for name in ("postBuild", "start"):
        assert os.access(ROOT / "binder" / name, os.X_OK), f"binder/{name} must be executable"


def test_binder_files_are_understood(tmp_path: Path) -> None:
    """repo2docker writes its recipe from them, without a container engine."""
    shutil.copytree(ROOT / "binder", tmp_path / "repo" / "binder")
    command = [sys.executable, "-m", "repo2docker", "--no-build", "--debug", str(tmp_path / "repo")]
    answer = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    said = answer.stdout + answer.stderr
    assert answer.returncode == 0, said
    for part in ("python-3.12", "binder/requirements.txt", "binder/postBuild", "binder/start"):
        assert part.removeprefix("python-") in said, f"{part} is not in the recipe"
