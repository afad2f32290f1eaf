"""The examples as their readers have them: the built wheel in an environment of its own, nothing of this
repository on the path."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted(path.parent.name for path in (ROOT / "examples").glob("*/README.md"))


def run(*command: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    answer = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=280
    )
    assert answer.returncode == 0, f"{command}\n{answer.stdout[-6000:]}\n{answer.stderr[-3000:]}"
    return answer.stdout


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the wheel, which borrows what else is installed here."""
    folder = tmp_path_factory.mktemp("examples")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=ROOT)
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv")
    python = folder / "venv" / "bin" / "python"
    wheel = next(folder.glob("*.whl"))
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    # not by addsitedir: that would run the .pth files there, and with them this repository's own
    (site / "zz_borrowed.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n")
    return python


@pytest.mark.slow
@pytest.mark.launched
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_passes_its_own_tests_with_the_wheel(python: Path, name: str, tmp_path: Path) -> None:
    if name == "hf-to-layout":
        pytest.importorskip("transformers", reason="needs: pip install '.[hf]'")
    project = tmp_path / name
    project.mkdir()
    shutil.copytree(ROOT / "examples" / name, project, dirs_exist_ok=True)
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    where = run(python, "-c", "import fmlab; print(fmlab.__file__)", cwd=project, env=env)
    assert str(python.parents[1]) in where
    said = run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=project, env=env)
    assert " passed" in said
    assert "failed" not in said


def test_there_are_these_examples() -> None:
    names = ["hf-to-layout", "my-model-plan", "parity-in-my-ci", "port-tpu", "port-trainium", "slurm-k8s"]
    assert names == EXAMPLES


@pytest.mark.slow
@pytest.mark.launched
def test_the_guide_runs_from_top_to_bottom(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "bring-your-own-model.md").read_text()
    script = tmp_path / "guide.py"
    script.write_text("\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)))
    said = run(sys.executable, script, cwd=tmp_path)
    assert "legal are 1, 2, 3, 4, 6, 12" in said
    assert 'Rule(r"blocks\\.\\d+\\.mlp\\.down\\.weight", "row")' in said
