"""The first and the last cell of every notebook, made from the curriculum."""

import os
import re
from pathlib import Path

from fmlab.lab.curriculum import PLATFORMS, XLA_KERNEL, Curriculum, Entry

LEARN = "**You will learn** "
CHAPTER = re.compile(r"\[\[(#?)(\d+\.\d+)\]\]")


def linked(text: str, curriculum: Curriculum, entry: Entry, solved: bool) -> str:
    """A text cell with links: [[1.9]] becomes the chapter's name, [[#1.9]] its number; no link while it is to
    come.

    Raises ValueError for a number that no chapter has.
    """

    def link(found: re.Match[str]) -> str:
        target = curriculum.find(found[2])
        if not found[1]:
            return _link(target, entry, solved)
        return f"[{target.number}]({_way(target, entry, solved)})" if target.ready else target.number

    return CHAPTER.sub(link, text)


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
    """Links to the neighbours, to what is next on shorter paths, and to the other form of this notebook."""
    other = _relative(_place(entry, not solved), _place(entry, solved))
    link = f"[The exercises, unsolved]({other})" if solved else f"[Solutions of the exercises]({other})"
    lines = (_neighbours(curriculum, entry, solved), _shorter_paths(curriculum, entry, solved), link)
    return "---\n" + "\n\n".join(line for line in lines if line)


def _neighbours(curriculum: Curriculum, entry: Entry, solved: bool) -> str:
    before, after = curriculum.neighbours(entry)
    words = []
    if before:
        words.append(f"← {_link(before, entry, solved)}")
    if after:
        words.append(f"{_link(after, entry, solved)} →")
    return " · ".join(words)


def _shorter_paths(curriculum: Curriculum, entry: Entry, solved: bool) -> str:
    """Where the README's shorter paths go on from here, if not with the next notebook."""
    following = curriculum.neighbours(entry)[1]
    words = []
    for name, numbers in curriculum.paths.items():
        if name == "everything" or entry.number not in numbers:
            continue
        rest = [curriculum.by_number[number] for number in numbers[numbers.index(entry.number) + 1 :]]
        after = next((other for other in rest if other.ready), None)
        if after != following:
            words.append(f"*{name}* " + (f"→ {_link(after, entry, solved)}" if after else "ends here"))
    return f"Shorter paths: {' · '.join(words)}" if words else ""


def _place(entry: Entry, solved: bool) -> Path:
    return Path("solutions") / entry.path if solved else entry.path


def _link(target: Entry, source: Entry, solved: bool) -> str:
    if not target.ready:
        return f"{target.name} (to come)"
    return f"[{target.name}]({_way(target, source, solved)})"


def _way(target: Entry, source: Entry, solved: bool) -> str:
    return _relative(_place(target, False), _place(source, solved))


def _relative(target: Path, source: Path) -> str:
    return Path(os.path.relpath(target, source.parent)).as_posix()
