"""`fmlab export`: clean copies, links that work, nothing of the learner's lost."""

import json
from pathlib import Path

import pytest

from fmlab.lab.export import export
from fmlab.storage import StorageError

V4 = {"nbformat": 4, "nbformat_minor": 5, "metadata": {}}


def _notebook(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    cells = [
        {"cell_type": "markdown", "id": "a", "metadata": {}, "source": text},
        {
            "cell_type": "code",
            "id": "b",
            "metadata": {},
            "source": "1+1",
            "execution_count": 1,
            "outputs": [
                {
                    "output_type": "execute_result",
                    "execution_count": 1,
                    "metadata": {},
                    "data": {"text/plain": "2"},
                }
            ],
        },
    ]
    path.write_text(json.dumps({**V4, "cells": cells}))


@pytest.fixture
def origin(tmp_path: Path) -> Path:
    folder = tmp_path / "notebooks"
    links = "[x](../solutions/0_start/9.1_example.ipynb) [web](https://a.org/b) [up](../../README.md)"
    _notebook(folder / "0_start/9.1_example.ipynb", links)
    _notebook(folder / "solutions/0_start/9.1_example.ipynb", "solved")
    (folder / "curriculum.toml").write_text((Path(__file__).parent / "fixtures/curriculum.toml").read_text())
    return folder


def test_links_follow_what_is_copied(origin: Path, tmp_path: Path) -> None:
    def text(folder: Path) -> str:
        notebook = json.loads((folder / "0_start/9.1_example.ipynb").read_text())
        return "".join(notebook["cells"][0]["source"])

    alone, both = tmp_path / "alone", tmp_path / "both"
    export(alone, notebooks=origin)
    assert text(alone) == "x [web](https://a.org/b) up"
    export(both, solutions=True, notebooks=origin)
    assert text(both) == "[x](../solutions/0_start/9.1_example.ipynb) [web](https://a.org/b) up"
    assert (both / "solutions/0_start/9.1_example.ipynb").exists()
    assert export(both, only=["9.1"], notebooks=origin) == [], "links to earlier copies stay"


def test_without_outputs(origin: Path, tmp_path: Path) -> None:
    export(tmp_path / "mine", outputs=False, notebooks=origin)
    cell = json.loads((tmp_path / "mine/0_start/9.1_example.ipynb").read_text())["cells"][1]
    assert cell["outputs"] == []
    assert cell["execution_count"] is None


def test_a_learners_changes_are_kept(origin: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    file = mine / "0_start/9.1_example.ipynb"
    assert export(mine, notebooks=origin) == [file]
    assert export(mine, notebooks=origin) == []
    _notebook(origin / "0_start/9.1_example.ipynb", "a newer lesson")
    assert export(mine, notebooks=origin) == [file], "our own older copy is updated"
    file.write_text("my answers")
    _notebook(origin / "0_start/9.1_example.ipynb", "newer still")
    with pytest.raises(ValueError, match=r"0_start/9\.1_example\.ipynb\n.*Nothing was written"):
        export(mine, solutions=True, notebooks=origin)
    assert file.read_text() == "my answers"
    assert not (mine / "solutions").exists()
    assert export(mine, keep=True, notebooks=origin) == []
    assert file.read_text() == "my answers"
    with pytest.raises(ValueError, match="Nothing was written"):
        export(mine, notebooks=origin)  # still known as changed
    export(mine, force=True, notebooks=origin)
    assert "newer still" in file.read_text()


def test_refusals(origin: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"9\.2: still to come; ready are: 9\.1"):
        export(tmp_path / "mine", only=["9.2"], notebooks=origin)
    with pytest.raises(ValueError, match=r"no notebook '7\.7'.*9\.1, 9\.2"):
        export(tmp_path / "mine", only=["7.7"], notebooks=origin)
    with pytest.raises(ValueError, match="folder of the originals"):
        export(origin / "0_start", notebooks=origin)
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(StorageError, match="file"):
        export(blocked / "mine", notebooks=origin)
    circle = tmp_path / "circle"
    circle.symlink_to("circle")
    with pytest.raises(StorageError, match="circle"):
        export(circle, notebooks=origin)
    assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize("text", ["[1]", "3", "null", "{", "[" * 100_000])
def test_a_ledger_that_is_none_of_ours_is_as_none(text: str, origin: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    export(mine, notebooks=origin)
    (mine / ".fmlab-export.json").write_text(text)
    assert export(mine, notebooks=origin) == [], "what is the same needs no word"
    _notebook(origin / "0_start/9.1_example.ipynb", "a newer lesson")
    (mine / ".fmlab-export.json").write_text(text)
    with pytest.raises(ValueError, match="Nothing was written"):
        export(mine, notebooks=origin)
