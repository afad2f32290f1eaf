"""`show_source`: the package's own code in the page, so that lessons show it instead of repeating it."""

import html
import inspect
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fmlab.extras import require

MAX_LINES = 30
REGION = re.compile(r"^\s*# region (.+?)\s*$")
END = re.compile(r"^\s*# endregion\b")
CODE_STYLE = (
    "background:#f7f7f7;color:#1a1a1a;border:1px solid #ddd;border-radius:4px;padding:8px 10px;"
    "font-size:12px;line-height:1.5;word-break:normal;overflow-wrap:anywhere;white-space:pre-wrap;margin:0"
)  # 106 columns on a laptop's page; what is longer wraps


@dataclass(frozen=True)
class SourceView:
    """Numbered lines of one file; shown highlighted in Jupyter and as plain text elsewhere."""

    place: str  # path from the package's parent, such as "fmlab/lab/source.py"
    lines: tuple[tuple[int, str], ...]

    @property
    def heading(self) -> str:
        return f"{self.place}, lines {self.lines[0][0]}–{self.lines[-1][0]}"  # noqa: RUF001

    @property
    def text(self) -> str:
        return textwrap.dedent("\n".join(line for _, line in self.lines))

    def __repr__(self) -> str:
        return f"{self.heading}\n{self.text}"

    def _repr_html_(self) -> str:
        pygments = require("lab", "pygments")
        lexer = require("lab", "pygments.lexers").PythonLexer(stripnl=False)
        formatter = require("lab", "pygments.formatters").HtmlFormatter(nowrap=True, noclasses=True)
        coloured = pygments.highlight(self.text, lexer, formatter).rstrip("\n").split("\n")
        rows = [
            f'<span class="fm-line" style="color:#767676;user-select:none">{number:4d}</span>  {line}'
            for (number, _), line in zip(self.lines, coloured, strict=True)
        ]
        title = f'<div style="font-size:12px"><code>{html.escape(self.heading)}</code></div>'
        return f'{title}<pre style="{CODE_STYLE}">' + "\n".join(rows) + "</pre>"


def show_source(obj: Any, region: str | None = None) -> SourceView:
    """Return the source of a function, class or module, or of a region marked in it, ready to display.

    A region is what stands between `# region NAME` and `# endregion` in the source of `obj`. At most 30 lines
    are shown: more raise ValueError that lists the regions to choose from, and so does an unknown region.
    """
    obj = inspect.unwrap(obj)
    name = getattr(obj, "__qualname__", getattr(obj, "__name__", repr(obj)))
    try:
        text, first = inspect.getsourcelines(obj)
        path = inspect.getsourcefile(obj)
    except (OSError, TypeError) as error:
        raise ValueError(f"{name} has no Python source to show: {error}") from None
    numbered = [(max(first, 1) + at, line.rstrip("\n")) for at, line in enumerate(text)]
    regions = _regions(numbered)
    if region is not None:
        if region not in regions:
            raise ValueError(f"no region {region!r} in {name}; it has: {', '.join(regions) or 'none'}")
        numbered = regions[region]
    shown = [(at, line) for at, line in numbered if not REGION.match(line) and not END.match(line)]
    while shown and not shown[-1][1].strip():
        shown.pop()
    if len(shown) > MAX_LINES:
        hint = (
            f"name one of its regions: {', '.join(regions)}"
            if regions
            else ("mark a part of it with '# region NAME' and '# endregion' and name that")
        )
        raise ValueError(f"{name} has {len(shown)} lines, more than the {MAX_LINES} that fit a page; {hint}")
    return SourceView(_place(path), tuple(shown))


def _regions(numbered: list[tuple[int, str]]) -> dict[str, list[tuple[int, str]]]:
    found: dict[str, list[tuple[int, str]]] = {}
    open_names: list[str] = []
    for at, line in numbered:
        if mark := REGION.match(line):
            open_names.append(mark[1])
            found[mark[1]] = []
        elif END.match(line) and open_names:
            open_names.pop()
        else:
            for name in open_names:
                found[name].append((at, line))
    return found


def _place(path: str | None) -> str:
    file = Path(path or "")
    for parent in file.parents:
        if not (parent / "__init__.py").exists():
            return file.relative_to(parent).as_posix() if file.parent != parent else "this notebook"
    return "this notebook"
