"""What a rank prints and shows: streams that send text to the parent, results as MIME bundles."""

import base64
import contextlib
import io
import sys
from collections.abc import Callable
from typing import Any

Bundle = dict[str, str]  # MIME type → text, pictures in base64, as Jupyter wants them

_TEXT_METHODS = {
    "text/html": "_repr_html_",
    "text/markdown": "_repr_markdown_",
    "text/latex": "_repr_latex_",
    "image/svg+xml": "_repr_svg_",
}


class Stream(io.TextIOBase):
    """A standard stream of a rank: whole lines are sent at once, the rest on flush."""

    encoding = "utf-8"
    errors = "strict"

    def __init__(self, name: str, fd: int, send: Callable[[tuple[str, str, str]], None]) -> None:
        self.name = f"<{name}>"
        self._kind, self._fd, self._send = name, fd, send
        self._rest = ""

    def fileno(self) -> int:
        return self._fd

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self._rest += text
        if "\n" in text:
            lines, _, self._rest = self._rest.rpartition("\n")
            self._send(("text", self._kind, lines + "\n"))
        return len(text)

    def flush(self) -> None:
        if self._rest:
            text, self._rest = self._rest, ""
            self._send(("text", self._kind, text))


def bundle(obj: Any) -> Bundle:
    """The rich forms of `obj`: its repr always, and whatever Jupyter display methods it has."""
    out: Bundle = {"text/plain": repr(obj)}
    with contextlib.suppress(Exception):  # a display method that fails leaves the plain form
        made = getattr(obj, "_repr_mimebundle_", lambda **_: None)(include=None, exclude=None)
        out.update(made[0] if isinstance(made, tuple) else made or {})
    for mime, method in _TEXT_METHODS.items():
        with contextlib.suppress(Exception):
            text = getattr(obj, method)() if not isinstance(obj, type) else None
            if text:
                out.setdefault(mime, text)
    with contextlib.suppress(Exception):
        png = _png(obj)
        if png:
            out.setdefault("image/png", base64.b64encode(png).decode())
    return out


def _png(obj: Any) -> bytes | None:
    if isinstance(obj, type):
        return None
    if "matplotlib.figure" in sys.modules and isinstance(obj, sys.modules["matplotlib.figure"].Figure):
        buffer = io.BytesIO()
        obj.savefig(buffer, format="png", bbox_inches="tight")
        return buffer.getvalue()
    made = getattr(obj, "_repr_png_", lambda: None)()
    return made[0] if isinstance(made, tuple) else made


def open_figures() -> list[Any]:
    """Figures a cell left open in pyplot, closed here, as the inline backend of Jupyter does."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is None:
        return []
    figures = [pyplot.figure(number) for number in pyplot.get_fignums()]
    pyplot.close("all")
    return figures
