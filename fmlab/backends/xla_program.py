"""A program of the XLA compiler: as torch_xla noted it down, as HLO before, and as HLO after optimisation.

HLO is XLA's own language of some hundred operations. The compiler rewrites it: operations that read and write
the same elements become one fusion, whose intermediate results never reach memory.
"""

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from itertools import count
from pathlib import Path

import torch

from fmlab.backends.xla_environment import CAPTURED, capture_folder

# "%name = f32[4,4]{1,0} dot(…)", or with a tuple as its type
_INSTRUCTION = re.compile(
    r"^\s+(?:ROOT )?%?[\w.-]+ = (?:\(.*?\)|\w+\[[^\]]*\](?:\{[^}]*\})?) ([a-z][\w-]*)\("
)
#: what XLA calls the collectives
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
# Moves no data and computes nothing: inputs, outputs, views.
_FREE = {"parameter", "tuple", "get-tuple-element", "constant", "bitcast"}
_numbers = count()


@dataclass(frozen=True)
class HLO:
    """The text of one module of HLO, and what can be counted in it."""

    text: str

    @cached_property
    def operations(self) -> Counter[str]:
        """How often each operation stands in it, inside fusions too."""
        found = (_INSTRUCTION.match(line) for line in self.text.splitlines())
        return Counter(match[1] for match in found if match)

    @cached_property
    def kernels(self) -> int:
        """Pieces of work of the main computation: each reads its inputs from memory and writes its results
        there. What only names or views data is none.
        """
        return sum(number for name, number in self._entry.items() if name not in _FREE)

    @cached_property
    def _entry(self) -> Counter[str]:
        lines, inside = [], False
        for line in self.text.splitlines():
            if line.startswith("ENTRY"):
                inside = True
            elif inside and line.startswith("}"):
                break
            elif inside and (match := _INSTRUCTION.match(line)):
                lines.append(match[1])
        return Counter(lines)

    @property
    def size(self) -> int:
        """All operations."""
        return sum(self.operations.values())

    @property
    def fusions(self) -> Counter[str]:
        """How many fusions of each kind: kLoop runs over the elements of its result."""
        return Counter(re.findall(r" fusion\(.*?kind=(\w+)", self.text))

    @property
    def collectives(self) -> dict[str, int]:
        """How many of each collective, those that are there."""
        found = {name: self.operations[name] + self.operations[f"{name}-start"] for name in COLLECTIVES}
        return {name: number for name, number in found.items() if number}


@dataclass
class Program:
    """What `capture` found: one entry for each program that was compiled in the block."""

    before: list[HLO] = field(default_factory=list)
    after: list[HLO] = field(default_factory=list)


def ir(*tensors: torch.Tensor) -> str:
    """What was noted down for these tensors and has not run yet, an operation a line."""
    text: str = import_module("torch_xla")._XLAC._get_xla_tensors_text(list(tensors))
    return text.strip()


def hlo(*tensors: torch.Tensor) -> HLO:
    """The same as HLO, as the compiler would get it."""
    return HLO(import_module("torch_xla")._XLAC._get_xla_tensors_hlo(list(tensors)))


@contextmanager
def capture() -> Iterator[Program]:
    """Keep the programs that are compiled in the block, before and after optimisation.

    A program that was compiled before is not compiled again and does not appear. Raises ValueError unless
    `configure(capture=True)` was called before torch_xla started, and when the block compiled nothing.
    """
    folder = capture_folder()
    if folder is None:
        raise ValueError(
            "programs are kept only if that was switched on before torch_xla started: "
            "fmlab.backends.xla_environment.configure(capture=True)"
        )
    xla = import_module("torch_xla")
    name = f"{CAPTURED}{next(_numbers)}"
    xla.sync(wait=True)
    present = xla._XLAC._get_current_graph_name()
    xla._XLAC._set_current_graph_name(name)
    program = Program()
    try:
        yield program
        xla.sync(wait=True)
    finally:
        xla._XLAC._set_current_graph_name(present)
    program.before = _read(folder, f"*.{name}.*before_optimizations.txt")
    program.after = _read(folder, f"*.{name}.*after_optimizations.txt")
    if not program.before:
        raise ValueError(
            "nothing was compiled in this block: a process compiles each program once, and what ran here had "
            "been compiled before. Restart the kernel (or the process) to see it again."
        )


def _read(folder: Path, pattern: str) -> list[HLO]:
    return [HLO(path.read_text()) for path in sorted(folder.glob(pattern))]
