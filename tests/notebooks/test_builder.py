"""The builder: one source, two executed notebooks, the same bytes each time; check finds each difference."""

import json
import shutil
from pathlib import Path

import pytest

from fmlab.lab import builder, guard
from fmlab.lab.builder import Form
from fmlab.lab.curriculum import load

FIXTURES = Path(__file__).parent / "fixtures"
SOURCE = "sources/0_start/9.1_example.py"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built") / "notebooks"
    shutil.copytree(FIXTURES, folder)
    assert builder.main(["build", "--folder", str(folder)]) == 0
    return folder


@pytest.fixture
def folder(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "notebooks"))


def _forms(folder: Path) -> list[Form]:
    return builder.forms_of(folder, load(folder).find("9.1"))


def _problems(folder: Path) -> str:
    curriculum = load(folder)
    return "\n".join([*builder.check(_forms(folder), curriculum), *builder.strays(folder, curriculum)])


def _edit(folder: Path, old: str, new: str, file: str = SOURCE) -> None:
    path = folder / file
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def test_the_built_example_is_clean(folder: Path) -> None:
    assert _problems(folder) == ""
    assert [problem for form in _forms(folder) for problem in guard.inspect(form.path)] == []


def test_both_forms(folder: Path) -> None:
    unsolved, solved = (json.loads(form.path.read_text(encoding="utf-8")) for form in _forms(folder))

    def cells(notebook: dict, key: str) -> list[dict]:
        return [cell for cell in notebook["cells"] if key in cell["metadata"].get("fmlab", {})]

    assert 'raise NotImplementedError("your code here")' in "".join(cells(unsolved, "exercise")[0]["source"])
    assert "SOLUTION" not in json.dumps(unsolved) + json.dumps(solved)
    assert cells(unsolved, "check")[0]["metadata"]["tags"] == ["check", "raises-exception"]
    assert cells(unsolved, "check")[0]["outputs"][0]["ename"] == "NotYet"
    assert cells(solved, "check")[0]["metadata"]["tags"] == ["check"]
    assert "✓ 9.1.1" in json.dumps(cells(solved, "check")[0]["outputs"], ensure_ascii=False)
    assert [cell["id"] for cell in unsolved["cells"]] == [cell["id"] for cell in solved["cells"]]


def test_building_again_changes_nothing(folder: Path) -> None:
    _edit(folder, 'print(f"{(time.perf_counter() - start) * 1e6:.0f} µs")', 'print("fast")')
    curriculum, form = load(folder), _forms(folder)[0]
    assert builder.build([form], curriculum) == [form.path]
    before = form.path.read_bytes()
    assert builder.build([form], curriculum) == []
    assert form.path.read_bytes() == before


def test_texts_change_without_running(folder: Path) -> None:
    _edit(folder, "A linear layer maps", "One linear layer maps")
    assert "differs from its source" in _problems(folder)
    assert len(builder.build(_forms(folder), load(folder), keep_outputs=True)) == 2
    assert _problems(folder) == ""
    _edit(folder, '    """Return the number', '    # a remark\n    """Give the number')
    assert len(builder.build(_forms(folder), load(folder), keep_outputs=True)) == 2
    _edit(folder, "Linear(300, 100)", "Linear(300, 200)")
    with pytest.raises(ValueError, match="its code changed"):
        builder.build(_forms(folder), load(folder), keep_outputs=True)


def test_check_finds_each_difference(folder: Path) -> None:
    unsolved, solved = _forms(folder)
    text = unsolved.path.read_text(encoding="utf-8")
    for old, new, found in [
        ('"raises-exception"', '"other"', "differs from its source"),
        ("torch.manual_seed(0)", "torch.manual_seed(1)", "differs from its source"),
        ('"id": "header"', '"id": "top"', "differs from its source"),
        ('"name": "python3"', '"name": "mine"', "differs from its source"),
        ('"execution_count": 3,', '"execution_count": null,', "never executed"),
        ('\n "nbformat": 4', '\n  "nbformat": 4', "written by another tool"),
    ]:
        assert old in text
        unsolved.path.write_text(text.replace(old, new), encoding="utf-8")
        assert found in _problems(folder), f"{old} → {new}"
    unsolved.path.unlink()
    solved.path.rename(solved.path.with_name("9.3_orphan.ipynb"))
    problems = _problems(folder)
    assert problems.count("missing; make it with") == 2
    assert "solutions/0_start/9.3_orphan.ipynb: not a ready notebook" in problems


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("# **You will learn** ", "# You learn ", r"the first cell must be a text cell that begins"),
        (
            'tags=["timing"]',
            'tags=["timings"]',
            r"9\.1_example\.py:\d+: unknown tags timings; legal are: raises",
        ),
        ("# %% uses=", "# %% use=", r"unknown use; legal are: check"),
        ('tags=["setup"]', "tags=[setup", r"9\.1_example\.py:\d+: cannot read 'tags=\[setup'"),
        ('tags=["setup"]', "tags=[setup]", r"9\.1_example\.py:\d+: cannot read 'tags=\[setup\]'"),
        ("    # END SOLUTION\n", "", r"do not pair up"),
        ("# %% check=", '# %% exercise="9.1.1"\n1\n# %% check=', r"exercise 9\.1\.1 is there already"),
        (
            '# %% exercise="9.1.1"',
            '# %% exercise="9.2.1"',
            r"exercise '9\.2\.1'; legal is \"9\.1\.<number>\"",
        ),
        (
            '# %% check="9.1.1"',
            '# %% check="9.1.2"',
            r"no exercise '9\.1\.2' above to check; there are: 9\.1\.1",
        ),
    ],
)
def test_a_bad_source_is_refused(folder: Path, old: str, new: str, message: str) -> None:
    _edit(folder, old, new)
    with pytest.raises(ValueError, match=message):
        builder.compose(_forms(folder)[0], load(folder))


@pytest.mark.parametrize("damage", [b"junk", b"", b"\xff\xfe", b"[]", b'{"cells": []}'])
def test_a_damaged_notebook_is_a_problem_of_its_own(folder: Path, damage: bytes) -> None:
    form = _forms(folder)[0]
    form.path.write_bytes(damage)
    assert f"{form.label}: not a notebook (" in _problems(folder)
    assert builder.main(["check", "--folder", str(folder)]) == 1


def test_a_failing_cell_stops_the_build(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _edit(folder, "layer(torch.ones(2, 100))", "layer(torch.ones(2, 300))")
    assert builder.main(["build", "--folder", str(folder), "--exercises-only", "9.1"]) == 1
    assert "tagged raises-exception and raised nothing" in capsys.readouterr().err


def test_magics_are_comments_in_the_source(tmp_path: Path) -> None:
    from fmlab.lab import percent

    path = tmp_path / "x.py"
    path.write_text("# %%\n# %load_ext fmlab.lab\n# %%ranks 4\nprint(rank)\n# !ls\n# 50 % of it\n")
    (cell,) = percent.read(path)
    assert cell.text(True) == "%load_ext fmlab.lab\n%%ranks 4\nprint(rank)\n!ls\n# 50 % of it"
    assert "# %%ranks 4" in cell.code(True)
