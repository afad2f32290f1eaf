"""The first and the last cell of every notebook, made from the curriculum."""

import os
import re
from pathlib import Path

from fmlab.lab.curriculum import PLATFORMS, XLA_KERNEL, Curriculum, Entry

LEARN = "**You will learn** "
CHAPTER = re.compile(r"\[\[(\d+\.\d+)\]\]")


def linked(text: str, curriculum: Curriculum, entry: Entry, solved: bool) -> str:
    """A text cell with a link to the chapter in place of each [[1.9]]; its name where it is to come.

    Raises ValueError for a number that no chapter has.
    """
    return CHAPTER.sub(lambda found: _link(curriculum.find(found[1]), entry, solved), text)


def header(curriculum: Curriculum, entry: Entry, learn: str, solved: bool) -> str:
    """Title, the three lines (you will learn, you need, runs on), the question and the neighbours.

    `learn` is the source's first text cell, which begins with "**You will learn** ".
    """
    needs = [_link(curriculum.by_number[number], entry, solved) for number in entry.prerequisites]
    extras = "" if entry.needs == ("lab",) else f"; extras: {', '.join(entry.needs)}"
    if entry.kernel is XLA_KERNEL:
        extras = f"; kernel *{entry.kernel.title}*, which `make lab-xla` prepares"
    lines = [
        f"# {entry.name}" + (" (solutions)" if solved else ""),
        "",
        f"- {' '.join(learn.split())}",
        f"- **You need** {', '.join(needs) if needs else 'Python and the idea of a neural network'}.",
        f"- **Runs on** {PLATFORMS[entry.platform]}; {entry.minutes} minutes{extras}.",
        "",
        f"## {entry.question}",
        "",
        _neighbours(curriculum, entry, solved),
    ]
    return "\n".join(lines).rstrip()


def footer(curriculum: Curriculum, entry: Entry, solved: bool) -> str:
    """Links to the neighbours and to the other form of this notebook."""
    other = _relative(_place(entry, not solved), _place(entry, solved))
    link = f"[The exercises, unsolved]({other})" if solved else f"[Solutions of the exercises]({other})"
    return f"---\n{_neighbours(curriculum, entry, solved)}\n\n{link}"


def _neighbours(curriculum: Curriculum, entry: Entry, solved: bool) -> str:
    before, after = curriculum.neighbours(entry)
    words = []
    if before:
        words.append(f"← {_link(before, entry, solved)}")
    if after:
        words.append(f"{_link(after, entry, solved)} →")
    return " · ".join(words)


def _place(entry: Entry, solved: bool) -> Path:
    return Path("solutions") / entry.path if solved else entry.path


def _link(target: Entry, source: Entry, solved: bool) -> str:
    if not target.ready:
        return f"{target.name} (to come)"
    return f"[{target.name}]({_relative(_place(target, False), _place(source, solved))})"


def _relative(target: Path, source: Path) -> str:
    return Path(os.path.relpath(target, source.parent)).as_posix()
