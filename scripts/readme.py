"""Write the table of notebooks and the learning paths into README.md, from notebooks/curriculum.toml.

Run it inside .venv after a change of the curriculum; with --check it only says whether they agree.
"""

import sys
from pathlib import Path

import made

from fmlab.lab.curriculum import Curriculum, load

ROOT = Path(__file__).resolve().parent.parent
PLATFORMS = {"any": "any laptop", "linux-x86_64": "Linux x86_64"}
PATHS = {
    "one hour": "the shortest way to real ranks, without exercises",
    "one day": "the spine: every idea once, without exercises",
    "porting": "for those who move a model to another chip",
    "everything": "in order",
}


def notebook_table(curriculum: Curriculum) -> str:
    """A table for each part; notebooks that are ready are links."""
    blocks = []
    for number, part in enumerate(curriculum.parts):
        rows = [f"**{number} {part.title}**", ""]
        rows += ["| Notebook | Question | Minutes | Runs on | Extras |", "|---|---|---|---|---|"]
        for entry in curriculum.entries:
            if entry.part != part.folder:
                continue
            mark = "\\*" if entry.spine else "†" if entry.side else ""
            name = f"[{entry.name}](notebooks/{entry.path.as_posix()})" if entry.ready else entry.name
            minutes = str(entry.minutes) if entry.ready else "to come"
            platform, extras = PLATFORMS[entry.platform], ", ".join(entry.needs)
            rows.append(f"| {name}{mark} | {entry.question} | {minutes} | {platform} | {extras} |")
        blocks.append("\n".join(rows))
    return "\n\n".join(blocks)


def path_list(curriculum: Curriculum) -> str:
    ready = {entry.number: entry.ready for entry in curriculum.entries}
    lines = []
    for name, what in PATHS.items():
        numbers = curriculum.paths[name]
        marked = [number if ready[number] else f"{number}°" for number in numbers]
        shown = "all of them" if name == "everything" else " · ".join(marked)
        lines.append(f"- **{name}**, {what}: {shown}")
    return "\n".join([*lines, "", "° to come"])


def generated(readme: str, curriculum: Curriculum) -> str:
    """`readme` with its tables made anew."""
    parts = {"notebooks": notebook_table(curriculum), "paths": path_list(curriculum)}
    return made.filled(readme, parts, "readme.py")


if __name__ == "__main__":
    path = ROOT / "README.md"
    wanted = generated(path.read_text(), load(ROOT / "notebooks"))
    sys.exit(made.main(path, wanted, "readme.py", sys.argv[1:]))
