"""The sequence of notebooks, read from `notebooks/curriculum.toml`: the one place that orders them."""

import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

PLATFORMS = {
    "any": "any laptop or Binder, CPU only (Linux, macOS; x86_64, arm64)",
    "linux-x86_64": "Linux on x86_64, CPU only",
}
STATUSES = ("ready", "to come")


@dataclass(frozen=True)
class Kernel:
    """A kernel as Jupyter lists it; scripts/environment.py registers them."""

    name: str
    title: str


KERNEL = Kernel("python3", "Python 3 (ipykernel)")
XLA_KERNEL = Kernel("fmlab-xla", "fmlab (XLA)")  # in .venv-xla, beside the environment of the lab


@dataclass(frozen=True)
class Entry:
    """One notebook of the sequence. `minutes` is a learner's time; `needs` are extras of the package."""

    number: str
    title: str
    file: str  # without folder and suffix: "0.1_welcome"
    part: str  # folder of its part: "0_start"
    question: str
    prerequisites: tuple[str, ...]
    minutes: int
    platform: str
    needs: tuple[str, ...]
    spine: bool  # on the one-day path
    side: bool  # optional side path
    status: str

    @property
    def ready(self) -> bool:
        return self.status == "ready"

    @property
    def name(self) -> str:
        return f"{self.number} {self.title}"

    @property
    def kernel(self) -> Kernel:
        """Which of Jupyter's kernels runs it: chapters that need the extra xla have one of their own."""
        return XLA_KERNEL if "xla" in self.needs else KERNEL

    @property
    def path(self) -> Path:
        """Relative to the notebooks folder."""
        return Path(self.part) / f"{self.file}.ipynb"


@dataclass(frozen=True)
class Part:
    """A folder of notebooks, such as "1 From models to bits"."""

    folder: str
    title: str


@dataclass(frozen=True)
class Curriculum:
    """All notebooks in their order, and the named paths through them."""

    parts: tuple[Part, ...]
    entries: tuple[Entry, ...]
    paths: dict[str, tuple[str, ...]]

    @cached_property
    def by_number(self) -> dict[str, Entry]:
        return {entry.number: entry for entry in self.entries}

    @property
    def ready(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.ready]

    def find(self, name: str) -> Entry:
        """The entry with this number or file name; ValueError lists the legal ones."""
        for entry in self.entries:
            if name in (entry.number, entry.file, f"{entry.file}.py", f"{entry.file}.ipynb"):
                return entry
        legal = ", ".join(entry.number for entry in self.entries)
        raise ValueError(f"no notebook {name!r} in the curriculum; the numbers are: {legal}")

    def neighbours(self, entry: Entry) -> tuple[Entry | None, Entry | None]:
        """The ready notebooks before and after `entry`."""
        at = self.entries.index(entry)
        before = [other for other in self.entries[:at] if other.ready]
        after = [other for other in self.entries[at + 1 :] if other.ready]
        return (before[-1] if before else None), (after[0] if after else None)


def notebooks_folder() -> Path:
    """The notebooks of this checkout, or the copy in a wheel; FileNotFoundError if there is neither."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package.parent / "notebooks", package / "_notebooks"):
        if (folder / "curriculum.toml").is_file():
            return folder
    raise FileNotFoundError(
        "the notebooks are not installed with this copy of fmlab; get them with the source: "
        "clone the repository and run 'pip install -e .' in it"
    )


def environment_python(folder: str) -> Path | None:
    """The Python of another environment of this checkout, ".venv-xla" or ".venv-frontends"; None where it is
    not there or not complete."""
    try:
        environment = notebooks_folder().parent / folder
    except FileNotFoundError:
        return None
    return environment / "bin" / "python" if (environment / "fmlab-stamp.json").exists() else None


def load(folder: Path | None = None) -> Curriculum:
    """Read and validate `curriculum.toml` in `folder` (default: the notebooks that come with the package).

    Raises ValueError that names the entry and what is legal.
    """
    path = (folder or notebooks_folder()) / "curriculum.toml"
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # not TOML, or not UTF-8
        raise ValueError(f"{path} cannot be read: {error}") from None
    parts = tuple(Part(item["folder"], item["title"]) for item in raw["part"])
    entries = tuple(_entry(item, path) for item in raw["notebook"])
    paths = {name: tuple(numbers) for name, numbers in raw["paths"].items()}
    paths["one day"] = tuple(entry.number for entry in entries if entry.spine)
    paths["everything"] = tuple(entry.number for entry in entries)
    curriculum = Curriculum(parts, entries, paths)
    _validate(curriculum, path)
    return curriculum


def _entry(item: dict[str, Any], path: Path) -> Entry:
    keys = set(Entry.__dataclass_fields__)
    defaults = {"prerequisites": [], "platform": "any", "needs": ["lab"], "spine": False, "side": False}
    values = {**defaults, "status": "to come", **item}
    if set(values) != keys:
        wrong = ", ".join(sorted(set(values) ^ keys))
        raise ValueError(f"{path}: notebook {item.get('number', '?')}: unknown or missing keys: {wrong}")
    values["prerequisites"] = tuple(values["prerequisites"])
    values["needs"] = tuple(values["needs"])
    return Entry(**values)


def _validate(curriculum: Curriculum, path: Path) -> None:
    def refuse(entry: Entry, what: str) -> None:
        raise ValueError(f"{path}: notebook {entry.number}: {what}")

    folders = [part.folder for part in curriculum.parts]
    seen: list[str] = []
    for entry in curriculum.entries:
        if entry.number in seen:
            refuse(entry, "this number stands twice")
        if entry.part not in folders:
            refuse(entry, f"part {entry.part!r} is none of {', '.join(folders)}")
        if not entry.file.startswith(f"{entry.number}_"):
            refuse(entry, f"file {entry.file!r} must begin with {entry.number}_")
        if entry.platform not in PLATFORMS:
            refuse(entry, f"platform {entry.platform!r} is none of {', '.join(PLATFORMS)}")
        if entry.status not in STATUSES:
            refuse(entry, f"status {entry.status!r} is none of {', '.join(STATUSES)}")
        if not entry.question.endswith("?"):
            refuse(entry, "the question must end with a question mark")
        if not 5 <= entry.minutes <= 90:
            refuse(entry, f"{entry.minutes} minutes; a notebook takes 5 to 90")
        if late := [number for number in entry.prerequisites if number not in seen]:
            refuse(entry, f"prerequisites {', '.join(late)} do not come before it")
        seen.append(entry.number)
    for name, numbers in curriculum.paths.items():
        if unknown := [number for number in numbers if number not in seen]:
            raise ValueError(f"{path}: path {name!r} names unknown notebooks: {', '.join(unknown)}")
        if list(numbers) != sorted(numbers, key=seen.index):
            raise ValueError(f"{path}: path {name!r} is not in the order of the sequence")
