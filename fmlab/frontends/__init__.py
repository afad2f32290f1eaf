"""One GPT block seen by five front ends, and one data-parallel step as each of them states it.

    capture("torch.fx") · capture("torch.export") · capture("xla", python) · capture("tensorflow", python)
    capture("jax", python)

Each returns a `Captured`: the block as a `Graph` (one form for all) and as the framework's own text; the
block's output; the weights behind one step on two devices, and the program that ran it. All start from the
same arrays (spec.py), so that all can be held to `on_one_device`. torch_xla, TensorFlow and JAX run in a
process of an environment that has them: `python` is that environment's.

PyTorch's own step needs ranks: run `in_torch.data_parallel_step` on a pool of two.
"""

import json
import os
import subprocess
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["IN_A_PROCESS", "NAMES", "Captured", "Graph", "Node", "capture", "collectives"]

#: front end -> the module that a process of another environment runs
IN_A_PROCESS = {
    "xla": "fmlab.frontends.in_xla",
    "tensorflow": "fmlab.frontends.in_tensorflow",
    "jax": "fmlab.frontends.in_jax",
}
NAMES = ("torch.fx", "torch.export", *IN_A_PROCESS)
_LIMIT = 170.0  # seconds; importing TensorFlow or compiling for XLA takes some of them


@dataclass(frozen=True)
class Node:
    """One operation. inputs: names of nodes; shape: None where the front end does not know it."""

    name: str
    op: str
    inputs: tuple[str, ...] = ()
    shape: tuple[int, ...] | None = None
    dtype: str = ""


@dataclass(frozen=True)
class Graph:
    """The nodes of a captured program, each behind its inputs."""

    nodes: tuple[Node, ...]

    @property
    def counts(self) -> Counter[str]:
        """How often each operation stands in it; inputs and constants are none."""
        return Counter(node.op for node in self.nodes if not _given(node))

    @property
    def known_shapes(self) -> float:
        """The share of operations whose shape is known before the program runs, 0 to 1."""
        work = [node for node in self.nodes if not _given(node)]
        return sum(node.shape is not None for node in work) / max(1, len(work))

    def __str__(self) -> str:
        return "\n".join(
            f"{node.name} = {node.op}({', '.join(node.inputs)})"
            + ("" if node.shape is None else f"  {node.dtype}{list(node.shape)}")
            for node in self.nodes
        )

    @classmethod
    def of(cls, nodes: list[dict[str, Any]]) -> "Graph":
        """From what a front end's module found."""
        return cls(tuple(_node(**one) for one in nodes))


def _node(name: str, op: str, inputs: list[str], shape: list[int] | None, dtype: str) -> Node:
    return Node(name, op, tuple(inputs), None if shape is None else tuple(shape), dtype)


@dataclass(frozen=True)
class Captured:
    """What one front end made of the block.

    output: [rows, length, width]; updated: the weights behind the step on two devices, and program: what ran
    it, as text; both empty for PyTorch, whose ranks run it.
    """

    name: str
    versions: dict[str, str]
    graph: Graph
    text: str
    output: np.ndarray
    updated: Mapping[str, np.ndarray] = field(default_factory=dict)
    program: str = ""


def capture(name: str, python: Path | str | None = None) -> Captured:
    """The block as the front end `name` sees it; python: of the environment that has its framework.

    Raises ValueError for an unknown name or a missing `python`, and RuntimeError with its last words when
    the other process fails.
    """
    if name not in NAMES:
        raise ValueError(f"front end {name!r} is unknown; there are: {', '.join(NAMES)}")
    if name not in IN_A_PROCESS:
        return _in_torch(name)
    if python is None:
        raise ValueError(
            f"{name} needs an environment of its own; give its Python, such as "
            f"{'.venv-xla' if name == 'xla' else '.venv-frontends'}/bin/python (make lab-"
            f"{'xla' if name == 'xla' else 'frontends'} makes it)"
        )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [str(python), "-m", IN_A_PROCESS[name]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT, env=environment)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    return Captured(
        name,
        found["versions"],
        Graph.of(found["nodes"]),
        found["text"],
        np.array(found["output"], np.float32),
        {key: np.array(value, np.float32) for key, value in found["updated"].items()},
        found["program"],
    )


def _in_torch(name: str) -> Captured:
    import torch

    from fmlab.frontends import in_torch
    from fmlab.frontends.spec import batch

    x = torch.from_numpy(batch()[0])
    if name == "torch.fx":
        module = in_torch.by_fx()
        graph, text, run = module.graph, module.code, module
    else:
        program = in_torch.by_export()
        graph, text, run = program.graph, str(program), program.module()
    with torch.no_grad():
        output = run(x).numpy()
    versions = {"torch": str(torch.__version__)}
    return Captured(name, versions, Graph.of(in_torch.nodes(graph)), text.strip(), output)


def collectives(captured: Captured) -> int:
    """How many operations of the step's program talk to the other device."""
    by_xla = (" all-reduce(", " all-reduce-start(")
    words = (" = CollectiveReduceV2",) if captured.name == "tensorflow" else by_xla
    return sum(captured.program.count(word) for word in words)


def _given(node: Node) -> bool:
    """Whether a node computes nothing: an input or a constant."""
    return node.op.lower() in ("input", "const", "constant")
