"""A small language of patterns over graphs: operators, what they read, and names for what is found.

    Op(aten.mul.Tensor, Var("x"), Op(aten.rsqrt.default, Var("y")), swaps=True)

matches x * rsqrt(y) and rsqrt(y) * x. The same Var twice must be the same node both times.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import fx


@dataclass(frozen=True)
class Var:
    """Any node, found under `name`."""

    name: str


@dataclass(frozen=True)
class Number:
    """Any Python number, found under `name`."""

    name: str


class Op:
    """A call of one of `targets`; with `swaps` its two arguments may come in either order.

    target: an operator or a tuple of them. args: patterns, or plain values that must be equal. More arguments
    than patterns do not match, nor do keyword arguments other than None.
    """

    def __init__(self, target: Any, *args: Any, swaps: bool = False):
        self.targets = target if isinstance(target, tuple) else (target,)
        self.args, self.swaps = args, swaps


class OneOf:
    """The first of several patterns that matches."""

    def __init__(self, *patterns: Any):
        self.patterns = patterns


@dataclass
class Match:
    """What a pattern found: nodes and numbers by name, and the nodes inside, which the match replaces."""

    names: dict[str, Any] = field(default_factory=dict)
    inside: tuple[fx.Node, ...] = ()

    def __getitem__(self, name: str) -> Any:
        return self.names[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self.names.get(name, default)

    def read_elsewhere(self) -> list[fx.Node]:
        """Nodes inside, but the last one, that somebody outside of the match reads too."""
        inside = set(self.inside)
        return [node for node in self.inside[1:] if any(user not in inside for user in node.users)]


def find(pattern: Any, node: fx.Node) -> Match | None:
    """The first way in which `node` is the end of the pattern."""
    return next(_ways(pattern, node, Match()), None)


def _ways(pattern: Any, thing: Any, so_far: Match) -> Iterator[Match]:
    if isinstance(pattern, OneOf):
        for other in pattern.patterns:
            yield from _ways(other, thing, so_far)
    elif isinstance(pattern, Var):
        if isinstance(thing, fx.Node) and so_far.names.get(pattern.name, thing) is thing:
            yield Match({**so_far.names, pattern.name: thing}, so_far.inside)
    elif isinstance(pattern, Number):
        if isinstance(thing, int | float) and not isinstance(thing, bool):
            yield Match({**so_far.names, pattern.name: thing}, so_far.inside)
    elif isinstance(pattern, Op):
        yield from _calls(pattern, thing, so_far)
    elif not isinstance(thing, fx.Node) and _equal(pattern, thing):
        yield so_far


def _equal(pattern: Any, thing: Any) -> bool:
    if isinstance(pattern, list):  # fx has lists of its own
        return isinstance(thing, list | tuple) and list(thing) == pattern
    return bool(thing == pattern) and type(thing) is type(pattern)


def _calls(pattern: Op, thing: Any, so_far: Match) -> Iterator[Match]:
    if not isinstance(thing, fx.Node) or thing.target not in pattern.targets:
        return
    if len(thing.args) != len(pattern.args) or any(v is not None for v in thing.kwargs.values()):
        return
    orders = [thing.args, thing.args[::-1]] if pattern.swaps else [thing.args]
    for args in orders:
        yield from _all(pattern.args, args, Match(so_far.names, (*so_far.inside, thing)))


def _all(patterns: Any, things: Any, so_far: Match) -> Iterator[Match]:
    if not patterns:
        yield so_far
        return
    for first in _ways(patterns[0], things[0], so_far):
        yield from _all(patterns[1:], things[1:], first)
