"""Write docs/api: one page for each room of the package, with what it exports, from the source.

Nothing is imported: names come from `__all__`, signatures and docstrings from the files that define them.
With --check nothing is written, and the pages that do not agree with the source are named.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs" / "api"
ROOMS = (
    "fmlab",
    "fmlab.models",
    "fmlab.models.plan",
    "fmlab.models.attention",
    "fmlab.models.diffusion",
    "fmlab.objectives",
    "fmlab.data",
    "fmlab.parallel",
    "fmlab.compiler",
    "fmlab.frontends",
    "fmlab.backends",
    "fmlab.collectives",
    "fmlab.chips",
    "fmlab.sim",
    "fmlab.meter",
    "fmlab.kernels.triton",
    "fmlab.kernels.tiles",
    "fmlab.kernels.tiles.library",
    "fmlab.train",
    "fmlab.train.precision",
    "fmlab.planner",
    "fmlab.project",
    "fmlab.lab",
)
MADE = "<!-- made by scripts/api_reference.py -->"
Definition = ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


def module_file(module: str) -> Path | None:
    path = ROOT / module.replace(".", "/")
    candidates = (path / "__init__.py", path.with_suffix(".py"))
    return next((file for file in candidates if file.exists()), None)


def exported(tree: ast.Module) -> list[str]:
    """The names in `__all__`; without one, the public functions and classes defined here."""
    names = list(lazy(tree))
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(_is_name(target, "__all__") for target in node.targets):
            names += [item.value for item in ast.walk(node.value) if isinstance(item, ast.Constant)]
            return sorted({name for name in names if not name.startswith("__")})
    defined = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return [name for name in defined if not name.startswith("_")]


def lazy(tree: ast.Module) -> dict[str, str]:
    """Name -> module of what a package loads at the first use (`_LAZY`)."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(_is_name(target, "_LAZY") for target in node.targets):
            return dict(ast.literal_eval(node.value))
    return {}


def find(module: str, name: str) -> tuple[str, Definition | ast.Module] | None:
    """The module that defines `name`, and its definition, through any number of imports."""
    file = module_file(module)
    if file is None:
        return None
    tree = ast.parse(file.read_text())
    if name in lazy(tree):
        where = lazy(tree)[name]
        return find(where if where.startswith("fmlab") else f"{module}.{where}", name)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name and node in tree.body:
            return module, node
        if isinstance(node, ast.Assign) and any(_is_name(target, name) for target in node.targets):
            return module, node
        if isinstance(node, ast.AnnAssign) and _is_name(node.target, name):
            return module, node
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    own = node.module == module  # a module of this very package
                    found = None if own else find(node.module, alias.name)
                    return found or _as_module(f"{node.module}.{alias.name}")
    return _as_module(f"{module}.{name}")


def _as_module(module: str) -> tuple[str, ast.Module] | None:
    file = module_file(module)
    return None if file is None else (module, ast.parse(file.read_text()))


def _is_name(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def describe(name: str, module: str, node: Definition | ast.Module) -> Iterator[str]:
    """The lines about one name."""
    yield f"### `{name}`\n"
    if isinstance(node, ast.Module):
        yield f"The module `{module}`.\n"
        yield from documentation(node)
    elif isinstance(node, ast.FunctionDef):
        yield f"```python\n{signature(node)}\n```\n"
        yield from documentation(node)
    elif isinstance(node, ast.ClassDef):
        yield f"```python\n{class_signature(name, node)}\n```\n"
        yield from documentation(node)
        yield from methods(node)
    else:
        yield f"A value of `{module}`.\n"


def signature(node: ast.FunctionDef, skip_first: bool = False) -> str:
    arguments = ast.unparse(node.args)
    if skip_first:
        arguments = re.sub(r"^(self|cls)(, |$)", "", arguments)
    returns = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    return f"{node.name}({arguments}){returns}"


def class_signature(name: str, node: ast.ClassDef) -> str:
    """How the class is called: its __init__, or the fields of a dataclass."""
    for child in node.body:
        if isinstance(child, ast.FunctionDef) and child.name == "__init__":
            made = signature(child, skip_first=True).removesuffix(" -> None")
            return made.replace("__init__", name, 1)
    if any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
        fields = [ast.unparse(child) for child in node.body if isinstance(child, ast.AnnAssign)]
        return f"{name}(\n" + "".join(f"    {field},\n" for field in fields if "ClassVar" not in field) + ")"
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    return f"class {name}({bases})" if bases else f"class {name}"


def methods(node: ast.ClassDef) -> Iterator[str]:
    rows = []
    for child in node.body:
        if not isinstance(child, ast.FunctionDef) or child.name.startswith("_"):
            continue
        first = (ast.get_docstring(child) or "").split("\n\n")[0].replace("\n", " ")
        is_property = any("property" in ast.unparse(decorator) for decorator in child.decorator_list)
        shown = child.name if is_property else signature(child, skip_first=True)
        rows.append(f"- `{shown}`" + (f": {first}" if first else ""))
    if rows:
        yield "\n".join(rows) + "\n"


def documentation(node: ast.FunctionDef | ast.ClassDef | ast.Module) -> Iterator[str]:
    """The first paragraph as text, the rest as it stands in the source."""
    text = ast.get_docstring(node) or ""
    first, _, rest = text.partition("\n\n")
    if first:
        yield first + "\n"
    if rest:
        yield f"```text\n{rest}\n```\n"


def page(room: str) -> str:
    file = module_file(room)
    assert file is not None, room
    tree = ast.parse(file.read_text())
    lines = [f"# {room}\n", MADE + "\n", *documentation(tree)]
    for name in exported(tree):
        found = find(room, name)
        assert found is not None, f"{room} exports {name}, which is defined nowhere"
        lines += describe(name, *found)
    return "\n".join(lines).rstrip() + "\n"


def index() -> str:
    lines = ["# API reference\n", MADE + "\n", "What each room of the package exports, ground floor last.\n"]
    for room in ROOMS:
        file = module_file(room)
        assert file is not None, room
        first = (ast.get_docstring(ast.parse(file.read_text())) or "").split("\n\n")[0].replace("\n", " ")
        lines.append(f"- [{room}]({room}.md): {first}")
    return "\n".join(lines) + "\n"


def pages() -> dict[str, str]:
    """File name -> text of all pages."""
    return {"README.md": index(), **{f"{room}.md": page(room) for room in ROOMS}}


def main(argv: list[str]) -> int:
    wanted = pages()
    present = {file.name: file.read_text() for file in PAGES.glob("*.md")}
    if argv == ["--check"]:
        wrong = sorted(
            name for name in wanted.keys() | present.keys() if wanted.get(name) != present.get(name)
        )
        if wrong:
            print(f"docs/api is not what the source says ({', '.join(wrong)}); run scripts/api_reference.py")
        return int(bool(wrong))
    PAGES.mkdir(parents=True, exist_ok=True)
    for name in present.keys() - wanted.keys():
        (PAGES / name).unlink()
    for name, text in wanted.items():
        (PAGES / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
