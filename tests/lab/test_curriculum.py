"""The sequence: valid, ordered by curriculum.toml alone, and its links lead to what is there."""

from dataclasses import replace
from pathlib import Path

import pytest

from fmlab.lab import navigation
from fmlab.lab.curriculum import Entry, load, notebooks_folder

TOML = (notebooks_folder() / "curriculum.toml").read_text(encoding="utf-8")


def test_the_sequence() -> None:
    curriculum = load()
    assert len(curriculum.entries) == 35
    assert curriculum.paths["one hour"] == ("0.1", "0.2", "2.2")
    assert curriculum.paths["one day"] == tuple(entry.number for entry in curriculum.entries if entry.spine)
    assert len(curriculum.paths["everything"]) == 35
    assert curriculum.find("2.10").title == "Failure lab"
    assert curriculum.find("1.3_gpt.ipynb") is curriculum.find("1.3")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('number = "0.2"', 'number = "0.1"', "notebook 0.1: this number stands twice"),
        ('prerequisites = ["0.1"]', 'prerequisites = ["2.2"]', "prerequisites 2.2 do not come before it"),
        ('part = "0_start"', 'part = "zero"', "part 'zero' is none of 0_start, 1_models"),
        ('status = "ready"', 'status = "soon"', "status 'soon' is none of ready, to come"),
        ("minutes = 25", "minutes = 200", "200 minutes"),
        ('title = "Welcome"', 'titel = "Welcome"', "notebook 0.1: unknown or missing keys: titel, title"),
        ('["0.1", "0.2", "2.2"]', '["0.2", "0.1", "2.2"]', "not in the order of the sequence"),
        ('["0.1", "0.2", "2.2"]', '["0.1", "8.8"]', "unknown notebooks: 8.8"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in TOML
    (tmp_path / "curriculum.toml").write_text(TOML.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


def test_links_lead_to_ready_notebooks_only() -> None:
    curriculum = load()
    entry = curriculum.find("1.3")
    top = navigation.header(curriculum, entry, "**You will learn** much.", solved=False)
    before, after = curriculum.neighbours(entry)
    assert isinstance(before, Entry)
    assert isinstance(after, Entry)

    def link(other: Entry) -> str:
        near = other.path.parent == entry.path.parent
        return f"[{other.name}]({other.path.name if near else f'../{other.path.as_posix()}'})"

    assert f"← {link(before)}" in top
    assert f"{link(after)} →" in top
    assert "extras: lab, hf" in top
    solved = navigation.footer(curriculum, entry, solved=True)
    assert f"(../../{entry.path.as_posix()})" in solved
    late = next(one for one in curriculum.entries if one.prerequisites)
    waiting = [
        replace(one, status="to come") if one.number in late.prerequisites else one
        for one in curriculum.entries
    ]
    curriculum = replace(curriculum, entries=tuple(waiting))
    assert "(to come)" in navigation.header(curriculum, late, "**You will learn** x.", solved=False)


def test_shorter_paths_lead_past_the_next_notebook() -> None:
    curriculum = load()

    def foot(number: str) -> str:
        return navigation.footer(curriculum, curriculum.find(number), solved=False)

    hour, porting = (curriculum.find(number) for number in ("2.2", "1.9"))
    assert f"Shorter paths: *one hour* → [{hour.name}](../{hour.path.as_posix()})" in foot("0.2")
    assert f"*porting* → [{porting.name}](../{porting.path.as_posix()})" in foot("0.2")
    assert "*one hour* ends here" in foot("2.2")
    assert "Shorter paths" not in foot("0.1")  # the next notebook is next on every path
    assert "Shorter paths" not in foot("1.1")  # on no shorter path
