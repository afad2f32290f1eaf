"""Which names of the notebook a cell reads, and when they are sent."""

import ast
import types

import pytest
import torch

from fmlab._ranks import pickling
from fmlab._ranks.names import needed
from fmlab._ranks.sending import Sender


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("x = 1\nprint(x + y)", "y"),
        ("x = x + 1", "x"),
        ("x += 1", "x"),
        ("x: int = y", "y"),
        ("for i in data:\n    total = i\ntotal", "data total"),
        ("if c:\n    x = 1\nx", "c x"),
        ("try:\n    import fast as f\nexcept ImportError:\n    f = slow\nf", "slow f"),
        ("[a * k for a in rows if a]", "k rows"),
        ("def f(a, b=start):\n    c = a + g\n    return lambda: c + h", "start g h"),
        ("class A(Base):\n    size = width\n    def m(self):\n        return size2", "Base width size2"),
        ("with open(p) as file:\n    text = file.read()\ntext.data", "p"),
        ("import numpy as np\nfrom math import pi\nnp.sin(pi)", ""),
        ("(n := 3) + n", ""),
        ("try:\n    go()\nexcept ValueError as e:\n    e.args", "go"),
        ("def f():\n    return f()", ""),
        ("match point:\n    case [a, b]:\n        a + c", "point c"),
        ("del x\nx.attribute", "x"),
        ("f'{x:{width}}'", "x width"),
    ],
)
def test_names_a_cell_reads_before_it_assigned_them(source: str, names: str) -> None:
    assert needed(ast.parse(source)) == set(names.split())


def sent(sender: Sender, source: str) -> set[str]:
    data = sender.collect(ast.parse(source))
    return set(pickling.loads(data)) if data else set()


def test_a_name_is_sent_once_and_again_when_it_changed() -> None:
    ns: dict[str, object] = {"a": [1], "b": 2, "unused": object()}
    sender = Sender(ns)
    assert sent(sender, "a, b") == {"a", "b"}
    assert sent(sender, "a, b") == set()
    ns["a"] = [1]
    assert sent(sender, "a") == set()  # another list of the same content
    ns["a"].append(2)  # type: ignore[attr-defined]
    assert sent(sender, "0") == {"a"}  # what was sent is kept up to date


def test_the_side_that_assigned_last_owns_a_name() -> None:
    ns: dict[str, object] = {"w": torch.zeros(2), "n": 1}
    sender = Sender(ns)
    sender.note_assigned(["w", "new"])
    assert sent(sender, "w, n") == {"n"}
    ns["w"].add_(1)  # type: ignore[attr-defined]  # changed in place, not assigned
    assert sent(sender, "w") == set()
    ns["w"] = torch.ones(2)
    ns["new"] = 5
    assert sent(sender, "w + new") == {"w", "new"}
    ns["w"].add_(1)  # type: ignore[attr-defined]  # each side has its own tensor now
    assert sent(sender, "w") == set()


def test_functions_bring_the_names_they_read_and_see_those_of_the_rank() -> None:
    ns: dict[str, object] = {"__name__": "__main__", "factor": 3}
    exec("def inner(v): return v * factor + bias\ndef outer(v): return inner(v)", ns)
    sender = Sender(ns)
    data = sender.collect(ast.parse("outer(1)"))
    assert data is not None
    names = pickling.loads(data)
    assert set(names) == {"outer", "inner", "factor"}
    from fmlab._ranks.worker import NAMESPACE

    try:
        NAMESPACE.update(names, bias=10)
        assert NAMESPACE["outer"](1) == 13
        ns["factor"] = 4
        assert sent(sender, "outer(1)") == {"factor"}
    finally:
        for name in (*names, "bias"):
            NAMESPACE.pop(name)


def test_what_did_not_arrive_is_sent_again() -> None:
    sender = Sender({"a": 1})
    assert sent(sender, "a") == {"a"}
    sender.unsend()
    assert sent(sender, "a") == {"a"}


def test_packages_of_another_environment_are_installed_ones(tmp_path) -> None:
    """A .pth file adds them to the path; nobody wants them sent by value."""
    for folder, mine in (("lib/site-packages", False), ("lib/dist-packages", False), ("work", True)):
        module = types.ModuleType("some_package")
        module.__file__ = str(tmp_path / folder / "some_package.py")
        assert pickling._is_users(module) is mine
