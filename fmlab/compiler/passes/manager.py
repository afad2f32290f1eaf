"""Runs passes over graphs one at a time, and shows what each did."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from fmlab.compiler.passes.base import Pass, Report


@dataclass(frozen=True)
class Step:
    """One pass over one graph."""

    graph: str
    report: Report

    def __str__(self) -> str:
        return f"{self.graph:8} {self.report}"


class PassManager:
    """Passes in their order. `run` does all of them; `steps` one for each `next`, to look in between.

    passes: those that work on source are for `capture(rewrites=...)`; the others for graphs.
    """

    def __init__(self, passes: Iterable[Pass]):
        self.passes = list(passes)

    @property
    def source(self) -> list[Pass]:
        """The passes that rewrite a function before it is differentiated."""
        return [each for each in self.passes if each.source]

    def steps(self, graphs: dict[str, fx.Graph]) -> Iterator[Step]:
        """Run the passes that work on graphs, each over every graph, one for each `next`."""
        for each in self.passes:
            for name, graph in graphs.items():
                if not each.source:
                    yield Step(name, each.run(graph))

    def run(self, graphs: dict[str, fx.Graph], show: bool = False) -> list[Step]:
        """Run all; with `show` print what each did and which lines of the graph went and came."""
        done = []
        for step in self.steps(graphs):
            done.append(step)
            if show:
                print(step)
                if step.report.changed:
                    print(indented(step.report.diff))
        return done


def indented(text: str) -> str:
    """Each line two spaces to the right."""
    return "\n".join(f"  {line}" for line in text.splitlines())


def total(steps: Sequence[Step]) -> tuple[int, int]:
    """Bytes read and written by all graphs before the first step and after the last one."""
    first: dict[str, Report] = {}
    last: dict[str, Report] = {}
    for step in steps:
        first.setdefault(step.graph, step.report)
        last[step.graph] = step.report
    return sum(r.bytes_before for r in first.values()), sum(r.bytes_after for r in last.values())
