"""The rules of the house, read from the source: who imports whom, what loads when, what may be written."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "fmlab"

# Ground floor first. A module may import from its own room and from rooms on floors below.
FLOORS = [
    {"extras", "interactive", "addresses", "entered", "stacks", "torchrun", "rendezvous"},
    {"meter", "chips", "kernels", "storage"},
    {"models", "data", "objectives", "collectives", "compiler", "backends", "frontends"},
    {"sim", "_ranks"},
    {"ranks"},
    {"parallel"},
    {"train"},
    {"planner"},
    {"project"},
    {"lab"},
    {"bench"},
    {"doctor"},
    {"cli"},
]
# Same floor, but still allowed: the only sideways views.
SIDEWAYS = {
    ("models", "kernels"),
    ("collectives", "meter"),
    ("collectives", "chips"),
    ("frontends", "backends"),  # XLA's lazy device is one of the front ends that are compared
    ("meter", "chips"),  # this machine, measured, is a chip like the others
    ("objectives", "data"),
    ("objectives", "models"),  # the noise schedule and what a diffusion model predicts
}

CORE = {"torch", "numpy", "safetensors", "tokenizers", "cloudpickle", "tyro", "tqdm", "psutil", "fmlab"}
# Triton compiles functions together with the names in their module, so that these must import it when loaded.
# They are loaded at the first use of a kernel, by fmlab/kernels/triton/__init__.py.
TRITON = PACKAGE / "kernels" / "triton"
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if not {"__pycache__", "template"} & set(path.parts))


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def floor(name: str) -> int:
    return next((level for level, rooms in enumerate(FLOORS) if name in rooms), -1)


def imports(tree: ast.AST, where: Path) -> Iterator[str]:
    """Dotted names of all modules imported anywhere in the tree, relative imports resolved."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = where.relative_to(ROOT).with_suffix("").parts[: -node.level]
                base = ".".join([*package, *filter(None, [base])])
            yield base
            if base == "fmlab":
                yield from (f"fmlab.{alias.name}" for alias in node.names)


def top_level(tree: ast.Module) -> ast.Module:
    """Only what runs when the module is imported: no function bodies, nothing for type checkers alone."""

    class Prune(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
            return None

        visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]

        def visit_If(self, node: ast.If) -> ast.AST | None:
            return None if "TYPE_CHECKING" in ast.unparse(node.test) else self.generic_visit(node)

    return Prune().visit(ast.parse(ast.unparse(tree)))


def violations(path: Path) -> Iterator[str]:
    """Imports of this module from its own floor or one above, as sentences."""
    here, where = room(path), path.relative_to(ROOT)
    if floor(here) < 0:
        yield f"{where}: room {here!r} stands on no floor; add it to FLOORS"
    for name in imports(ast.parse(path.read_text()), path):
        parts = name.split(".")
        if parts[0] != "fmlab" or len(parts) < 2 or parts[1] in (here, "__version__", "Ranks", "RankError"):
            continue
        if floor(parts[1]) >= floor(here) and (here, parts[1]) not in SIDEWAYS:
            yield f"{where} imports {name}, which is not on a floor below {here}"


def test_rooms_import_only_from_floors_below() -> None:
    modules = [path for path in MODULES if room(path) != "__init__"]
    assert len(modules) > 50
    assert not [text for path in modules for text in violations(path)]


def test_a_view_upwards_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "fmlab"
    (package / "models").mkdir(parents=True)
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    monkeypatch.setitem(globals(), "PACKAGE", package)
    module = package / "models" / "new.py"
    module.write_text("def f():\n    from fmlab.train import loop\n    from fmlab.kernels import tiles\n")
    assert len(list(violations(module))) == 1
    module.write_text("from ..parallel import Layout\n")
    assert len(list(violations(module))) == 1


def test_optional_packages_are_imported_where_used() -> None:
    found = []
    for path in MODULES:
        for name in imports(top_level(ast.parse(path.read_text())), path) if room(path) != "lab" else ():
            package = name.split(".")[0]
            if package == "triton" and path.parent == TRITON and path.stem != "__init__":
                continue
            if package not in CORE and package not in sys.stdlib_module_names:
                found.append(
                    f"{path.relative_to(ROOT)} imports {package} when loaded; use fmlab.extras.require"
                )
    assert not found


def test_importing_fmlab_loads_nothing_heavy() -> None:
    code = "import fmlab, fmlab.cli, sys; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert not {"torch", "numpy", "IPython", "matplotlib", "transformers", "tyro"} & set(loaded.split())


def test_rooms_below_the_lab_need_no_extra() -> None:
    """Import every module below lab/ in an interpreter where the optional packages cannot be found."""
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in MODULES
        if room(path) not in ("lab", "__init__")
        and path.stem != "__main__"
        and (path.parent != TRITON or path.stem == "__init__")
    ]
    code = f"""
import importlib, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {sorted(OPTIONAL)!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
for name in {names!r}:
    importlib.import_module(name)
"""
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr


OPTIONAL = {"jupyterlab", "IPython", "ipywidgets", "matplotlib", "nbformat", "nbclient", "transformers"}
OPTIONAL |= {"tensorboard", "deepspeed", "torch_xla", "datasets", "pytest", "triton"}
OPTIONAL |= {"jax", "libtpu", "torchax", "torch_tpu", "torch_neuronx"}


def tracked() -> list[Path]:
    command = ["git", "-C", str(ROOT), "ls-files", "-z"]
    answer = subprocess.run(command, capture_output=True, text=True)
    if answer.returncode != 0:
        pytest.skip("not a git checkout: there is no list of tracked files")
    files = [ROOT / name for name in answer.stdout.split("\0") if name]
    return [path for path in files if path.is_file()]


def test_files_are_short() -> None:
    # a notebook's source is a text to read, kept short by rules of its own
    code = [path for path in tracked() if path.suffix == ".py" and "sources" not in path.parts]
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in code}
    long = {name: number for name, number in lines.items() if number > 400}
    assert not long, f"more than 400 lines; cut them by idea: {long}"


# Written in pieces, so that this file does not contain what it forbids.
FORBIDDEN = [
    r"(?<![\w.~-])/(?:work|root|home/\w+|Users/\w+)/[\w.-]",  # places of one machine
    "pypi" + r"\.org",
    "files.python" + "hosted",
    "registry." + "npmjs",
    "deb." + "debian",
    r"download\.py" + r"torch\.org",
]


def test_no_machine_places_and_no_package_hosts() -> None:
    found = []
    for path in tracked():
        where = path.relative_to(ROOT).as_posix()
        if where == "binder/requirements.txt":  # the one place that names the index of CPU builds
            continue
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            found += [
                f"{where}:{number}: {line.strip()[:100]}" for rule in FORBIDDEN if re.search(rule, line)
            ]
    assert not found, "\n".join(found)


def test_the_repository_is_small() -> None:
    size = sum(path.stat().st_size for path in tracked())
    assert size < 30 * 2**20, f"{size / 2**20:.0f} MB are tracked; the limit is 30 MB"
