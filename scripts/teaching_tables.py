"""Write the tables of docs/teaching.md: syllabuses, and the mistakes that the exercises know.

Run it inside .venv after a change of the curriculum or of an exercise; with --check it only says whether they
agree.
"""

import sys
from pathlib import Path

import made

from fmlab.lab.curriculum import Curriculum, load
from fmlab.lab.exercises import find
from fmlab.lab.proof import cases

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "teaching.md"

THREE_HOURS = ("0.1", "0.2", "2.1", "2.2", "3.1")
#: week -> what it is about, its chapters
TEN_WEEKS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("A first model, a first proof", ("0.1", "0.2", "1.1")),
    ("Attention and the GPT", ("1.2", "1.3")),
    ("Families and objectives", ("1.4", "1.5", "1.6")),
    ("Adapting and serving", ("1.7", "1.8")),
    ("Chips and wires", ("1.9", "1.10")),
    ("From graphs to kernels", ("1.11", "1.12", "1.13", "1.14")),
    ("Numbers; the map; compute and memory", ("1.15", "0.3", "2.1")),
    ("Dividing data and states", ("2.2", "2.3", "2.4")),
    ("Dividing the model", ("2.5", "2.6", "2.7", "2.8", "2.9", "2.10")),
    ("Runs of one's own", ("3.1", "3.2", "3.3", "3.4", "3.5", "3.6", "3.7")),
)


def syllabuses(curriculum: Curriculum) -> str:
    """Three hours, one day and ten weeks, with the minutes of the chapters that are ready."""

    def row(what: str, numbers: tuple[str, ...]) -> str:
        entries = [curriculum.by_number[number] for number in numbers]
        ready = [entry for entry in entries if entry.ready]
        links = ", ".join(f"[{e.number}](../notebooks/{e.path.as_posix()})" for e in ready)
        return f"| {what} | {links} | {sum(entry.minutes for entry in ready)} |"

    head = ["| | Chapters | Minutes |", "|---|---|---:|"]
    spine = tuple(entry.number for entry in curriculum.entries if entry.spine)
    weeks = [row(f"week {at}: {what}", numbers) for at, (what, numbers) in enumerate(TEN_WEEKS, 1)]
    short = [row("**three hours**: from one process to a plan", THREE_HOURS)]
    day = [row("**one day**, or two of half speed: the spine", spine)]
    return "\n".join([*head, *short, *day, *weeks])


def mistakes(curriculum: Curriculum) -> str:
    """Every exercise of the chapters that are ready, with the hints that its wrong answers earn."""
    lines = ["| Exercise | Wrong answers, by their hints |", "|---|---|"]
    for entry in curriculum.ready:
        for case in cases(ROOT / "notebooks" / "sources" / entry.part / f"{entry.file}.py"):
            hints = dict.fromkeys(hint.replace("|", "\\|") for _, hint, _ in case.wrong)
            lines.append(f"| {case.id} {find(case.id).title} | {'; '.join(hints)} |")
    return "\n".join(lines)


def generated(text: str, curriculum: Curriculum) -> str:
    """The page with its tables made anew."""
    parts = {"syllabuses": syllabuses(curriculum), "mistakes": mistakes(curriculum)}
    return made.filled(text, parts, "teaching_tables.py")


if __name__ == "__main__":
    wanted = generated(PAGE.read_text(), load(ROOT / "notebooks"))
    sys.exit(made.main(PAGE, wanted, "teaching_tables.py", sys.argv[1:]))
