"""Plain values as YAML: mappings, lists, texts and numbers, in block form."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

#: a text that needs no quotes: YAML reads it as this text
_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9/._-]*")
_WORDS = {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}


def yaml_text(value: Mapping[str, Any]) -> str:
    """A document, each line ended."""
    return "".join(f"{line}\n" for line in _lines(value))


def _lines(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield from _entry(f"{_scalar(name)}:", each)
        return
    for each in value:
        if _is_block(each):
            first, *others = _lines(each)
            yield f"- {first}"
            yield from _indented(others)
        else:
            yield from _entry("-", each)


def _entry(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, str) and _stands_as_lines(value):
        # "|" keeps line breaks and one at the end; "|-" none at the end
        yield f"{name} |" if value.endswith("\n") else f"{name} |-"
        yield from _indented(value.removesuffix("\n").split("\n"))
    elif _is_block(value):
        yield name
        yield from _indented(_lines(value))
    else:
        yield f"{name} {_scalar(value)}"


def _indented(lines: Iterable[str]) -> Iterator[str]:
    return (f"  {line}" if line else "" for line in lines)


def _is_block(value: Any) -> bool:
    return isinstance(value, Mapping | list) and bool(value)


def _scalar(value: Any) -> str:
    """JSON's form, which YAML reads too, or a text without quotes."""
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    # what cannot be seen is written by its number: YAML's \U knows more than JSON's \u
    return "".join(
        each if each.isprintable() else f"\\U{ord(each):08x}"
        for each in json.dumps(value, ensure_ascii=False)
    )


def _stands_as_lines(text: str) -> bool:
    """Whether YAML reads a text of several lines, indented, as this text."""
    lines = text.removesuffix("\n").split("\n")
    return (
        "\n" in text
        and bool(lines[0] and lines[-1])
        and not lines[0][0].isspace()
        and all(line.isprintable() for line in lines)
    )
