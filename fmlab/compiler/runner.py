"""A graph as a function: one line of Python a node, and every intermediate freed after its last use."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx


class Runner:
    """Runs a graph. `source` is the Python text that does it.

    Call it with a list of inputs: the list is emptied, so that inputs nobody else holds are freed as well.
    """

    def __init__(self, module: fx.GraphModule):
        self._names: dict[str, Any] = {}
        self._targets: dict[Any, str] = {}
        self.source = "\n".join(self._lines(module))
        space = dict(self._names)
        exec(compile(self.source, "<graph>", "exec"), space)
        self._run: Callable[[list[Any]], Sequence[Any]] = space["run"]

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        return self._run(inputs)

    def _lines(self, module: fx.GraphModule) -> list[str]:
        from fmlab.compiler.memory.in_place import check  # it knows groups, which run by this class

        nodes = list(module.graph.nodes)
        check(nodes)
        last = {}  # node -> the last node that reads it
        for node in nodes:
            last[node] = node
            for source in node.all_input_nodes:
                last[source] = node
        inputs = [node.name for node in nodes if node.op == "placeholder"]
        lines = ["def run(inputs):", f"    [{', '.join(inputs)}] = inputs", "    inputs.clear()"]
        for node in nodes:
            if node.op == "output":
                lines.append(f"    return {self._text(node.args[0])}")
                continue
            if node.op == "get_attr":
                lines.append(f"    {node.name} = {self._constant(_attribute(module, str(node.target)))}")
            elif node.op == "call_function":
                lines.append(f"    {node.name} = {self._call(node)}")
            done = [
                other.name for other in dict.fromkeys([*node.all_input_nodes, node]) if last[other] is node
            ]
            if done:
                lines.append(f"    del {', '.join(done)}")
        return lines

    def _call(self, node: fx.Node) -> str:
        if node.target is operator.getitem:
            return f"{self._text(node.args[0])}[{node.args[1]!r}]"
        if node.target not in self._targets:
            self._targets[node.target] = self._constant(node.target)
        arguments = [self._text(a) for a in node.args]
        if places := node.meta.get("overwrites"):
            outs = [self._over(node, places.get(k), x) for k, x in enumerate(node.meta["val"])]
            code = self._constant(node.target.code)  # type: ignore[union-attr]
            return f"{code}([{', '.join(arguments)}], [{', '.join(outs)}])"
        arguments += [f"{key}={self._text(a)}" for key, a in node.kwargs.items()]
        return f"{self._targets[node.target]}({', '.join(arguments)})"

    def _over(self, node: fx.Node, place: int | None, like: Any) -> str:
        """The memory of input `place`, in the shape of a result; or that there is none."""
        if place is None:
            return "None"
        return f"{self._text(node.args[place])}.as_strided({tuple(like.shape)}, {tuple(like.stride())})"

    def _text(self, argument: Any) -> str:
        if isinstance(argument, fx.Node):
            return argument.name
        if isinstance(argument, tuple | list):
            return f"[{', '.join(map(self._text, argument))}]"
        if argument is None or isinstance(argument, bool | int | str):
            return repr(argument)
        return self._constant(argument)

    def _constant(self, thing: Any) -> str:
        name = f"c{len(self._names)}_"
        self._names[name] = thing
        return name


def _attribute(module: fx.GraphModule, path: str) -> Any:
    found: Any = module
    for part in path.split("."):
        found = getattr(found, part)
    return found
