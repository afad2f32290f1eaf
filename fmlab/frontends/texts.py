"""The text of a front end, read back as a `Graph`: HLO, StableHLO, a lazy XLA graph, a jaxpr, or plain lines.

    read(text)          which of them it is, is found by its own words

What is read: HLO's ENTRY computation, StableHLO's @main, the last jaxpr of the text. Functions that it calls
stay calls ("call f"), and what lies in the braces of an operation, such as a loop's body, is part of it.
"""

import re
from collections.abc import Iterator

from fmlab.frontends import Graph, Node

#: What a text must hold to be of a language, in the order in which they are tried.
LANGUAGES = {
    "HLO": r"^(?:HloModule|ENTRY )",
    "StableHLO": r"\b(?:stablehlo|mhlo|chlo)\.|\bfunc\.func\b",
    "a jaxpr": r"\{ lambda\b",
    "a lazy XLA graph": r"^IR \{|, xla_shape=",
    "plain lines": r"^\s*\S+ = [\w.:-]+\(",
}


def read(text: str) -> Graph:
    """The graph of a front end's text.

    Raises ValueError where the text is of none of the LANGUAGES, or none of its lines is an operation.
    """
    readers = (_hlo, _stablehlo, _jaxpr, _lazy, _plain)
    for (language, sign), reader in zip(LANGUAGES.items(), readers, strict=True):
        if re.search(sign, text, re.MULTILINE):
            nodes = _known(reader(text))
            if not nodes:
                raise ValueError(f"this text looks like {language}, but no line of it is an operation")
            return Graph(tuple(nodes))
    raise ValueError(
        f"this text is no graph: it begins with {text.strip()[:40]!r}; what can be read: "
        f"{', '.join(LANGUAGES)} (name = op(inputs))"
    )


def _known(nodes: Iterator[Node]) -> list[Node]:
    """Nodes that read only nodes before them: other words of an operation's text are no inputs."""
    found: dict[str, Node] = {}
    for node in nodes:
        inputs = tuple(name for name in node.inputs if name in found)
        found[node.name] = Node(node.name, node.op, inputs, node.shape, node.dtype)
    return list(found.values())


def _sizes(text: str) -> tuple[int, ...] | None:
    """A shape as text, "4,8"; None where a size is not a number."""
    sizes = [size.strip() for size in text.split(",") if size.strip()]
    return tuple(int(size) for size in sizes) if all(size.isdigit() for size in sizes) else None


# ---- HLO -----------------------------------------------------------------------------------------------

_HLO = re.compile(
    r"^\s*(?:ROOT )?%?(?P<name>[\w.-]+) = (?P<type>\(.*?\)|\w+\[[^\]]*\](?:\{[^}]*\})?) "
    r"(?P<op>[a-z][\w-]*)\((?P<rest>.*)$"
)


def _hlo(text: str) -> Iterator[Node]:
    whole = "\nENTRY" not in f"\n{text}"
    inside = whole
    for line in text.splitlines():
        if line.startswith("ENTRY"):
            inside = True
        elif line.startswith("}") and not whole:
            inside = False
        elif inside and (match := _HLO.match(line)):
            op = {"parameter": "input"}.get(match["op"], match["op"])
            called = re.search(r"(?:calls|to_apply)=%?([\w.-]+)", match["rest"])
            if op == "call" and called:
                op = f"call {called[1]}"
            operands = "" if op in ("input", "constant") else _until_closed(match["rest"])
            operands = re.sub(r"\[[^\]]*\]|\{[^}]*\}", "", operands)  # their types
            inputs = tuple(re.findall(r"%?([\w.-]+)(?=\s*(?:,|$))", operands))
            kind = re.search(r"(\w+)\[([^\]]*)\]", match["type"])
            yield Node(match["name"], op, inputs, _sizes(kind[2]) if kind else None, kind[1] if kind else "")


def _until_closed(text: str) -> str:
    """What stands before the bracket that closes one opened before `text`."""
    depth = 1
    for place, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if depth == 0:
            return text[:place]
    return text


# ---- StableHLO -----------------------------------------------------------------------------------------

_MLIR = re.compile(r'^\s*%(?P<name>\w+)(?::\d+)? = "?(?P<op>[\w.]+)"?(?P<rest>.*)$')
_TENSOR = re.compile(r"tensor<((?:[\d?]+x)*)([a-zA-Z]\w*)")


def _stablehlo(text: str) -> Iterator[Node]:
    lines = iter(_main(text).splitlines())
    head = next(lines, "")
    for name, kind in re.findall(r"%(\w+): (tensor<[^>]*>)", head.partition("->")[0]):
        yield _of_type(name, "input", (), kind)
    depth, statement = 0, ""
    for line in lines:
        change = line.count("{") - line.count("}")
        if depth == 0 and _MLIR.match(line):
            statement = line
        elif statement and depth + change == 0:  # the end of one with a body: its type stands there
            statement += line
        depth += change
        match = _MLIR.match(re.sub(r" loc\(.*\)$", "", statement)) if depth == 0 else None
        if match:
            statement, op, rest = "", match["op"].rpartition(".")[2], match["rest"]
            called = re.search(r"@(\w+)", rest)
            kind = rest.rpartition(" : ")[2].rpartition("->")[2]
            what = f"call {called[1]}" if op == "call" and called else op
            yield _of_type(match["name"], what, tuple(re.findall(r"%(\w+)", rest)), kind)


def _main(text: str) -> str:
    """The function @main, or the first one: its head and what follows, to the brace that closes it."""
    heads = list(re.finditer(r"^.*\bfunc\.func\b.*$", text, re.MULTILINE))
    if not heads:
        return "\n" + text
    chosen = next((head for head in heads if "@main" in head[0]), heads[0])
    return chosen[0] + "\n" + _until_closed(text[chosen.end() + 1 :])


def _of_type(name: str, op: str, inputs: tuple[str, ...], kind: str) -> Node:
    match = _TENSOR.search(kind)
    if match is None:
        return Node(name, op, inputs)
    return Node(name, op, inputs, _sizes(match[1].replace("x", ",")), match[2])


# ---- jaxprs --------------------------------------------------------------------------------------------

_TYPED = re.compile(r"(\w+):(\w+)\[([^\]]*)\]")


def _jaxpr(text: str) -> Iterator[Node]:
    body = _last_jaxpr(text)
    head, _, equations = body.partition(" let")
    for name, dtype, shape in _TYPED.findall(head):
        yield Node(name, "input", (), _sizes(shape), dtype)
    for line in _balanced(equations):
        made, equals, right = line.partition(" = ")
        results = _TYPED.findall(made)
        if line.lstrip().startswith("in ") or not equals or not results:
            continue
        op = re.match(r"[\w-]+", right)
        if op is None:
            continue
        operands, called = right[op.end() :], None
        if operands.startswith("["):
            inner = _until_closed(operands[1:])
            called, operands = re.search(r"\bname=(\w+)", inner), operands[len(inner) + 2 :]
        what = f"call {called[1]}" if called else op[0]
        first, dtype, shape = results[0]
        inputs = tuple(re.findall(r"(?<![\w:.])(\w+)(?![\w:.\[])", operands))
        yield Node(first, what, inputs, _sizes(shape), dtype)
        for other, dtype, shape in results[
            1:
        ]:  # of several results each further one is picked from the first
            yield Node(other, "getitem", (first,), _sizes(shape), dtype)


def _last_jaxpr(text: str) -> str:
    """What is between the braces of the last jaxpr that lies in no other."""
    depth, start = 0, 0
    for place, letter in enumerate(text):
        if letter == "{":
            if depth == 0 and text.startswith("{ lambda", place):
                start = place + 1
            depth += 1
        elif letter == "}":
            depth -= 1
    return _until_closed(text[start:])


def _balanced(text: str) -> Iterator[str]:
    """Lines, joined until their brackets are closed."""
    line = ""
    for part in text.splitlines():
        line = f"{line} {part.strip()}" if line else part
        if all(line.count(a) == line.count(b) for a, b in ("[]", "{}", "()")):
            yield line
            line = ""


# ---- others --------------------------------------------------------------------------------------------


def _lazy(text: str) -> Iterator[Node]:
    from fmlab.frontends.in_xla import nodes

    yield from Graph.of(nodes(text)).nodes


_PLAIN = re.compile(r"^\s*(\S+) = ([\w.:-]+)\(([^)]*)\)(?:\s+(\w*)\[([^\]]*)\])?\s*$")


def _plain(text: str) -> Iterator[Node]:
    for line in text.splitlines():
        if match := _PLAIN.match(line):
            name, op, inputs, dtype, shape = match.groups()
            given = tuple(one.strip() for one in inputs.split(",") if one.strip())
            yield Node(name, op, given, None if shape is None else _sizes(shape), dtype or "")
