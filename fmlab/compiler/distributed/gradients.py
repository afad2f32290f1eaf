"""Data parallelism as a pass: every parameter's gradient becomes its sum over ranks.

Each rank runs the same graphs on its own rows. The gradient of a sum is the sum of the gradients, so one
all-reduce for each gradient makes the step that of one device with all rows, as long as the loss is a sum, or
is divided by one number for all ranks (Li et al. 2020, arXiv:2006.15704, section 3).
"""

import math
from collections.abc import Collection

import torch
from torch import fx

from fmlab.compiler.distributed.collective import Group, following, group_name, insert_sum, summed_over
from fmlab.compiler.passes.base import GraphPass, Report, insert

aten = torch.ops.aten


class InsertGradientSums(GraphPass):
    """Sums the gradient of every parameter over the ranks of a group, right where the gradient is made.

    It sums and never averages. What the loss is divided by is the caller's to say, in one of two ways:

    - `divide_by` is 1 (default): the loss is a sum over targets, and the caller divides it by the count of
      all ranks' targets before backward(). Right for any distribution of targets over ranks.
    - `divide_by` is the number of ranks: the loss is a mean, over equally many targets on each rank. With
      unequal counts that is not the mean over all targets, and nothing here can notice.

    The division is of the gradients that come into the graph, a scalar for a scalar loss, so it costs nothing
    and keeps 16-bit sums small. Gradients of inputs that are no parameters are divided, but stay the rank's
    own.

    Args:
        group: see collective.group_name.
        divide_by: a number above 0.
        only: names of the parameters to sum; all of them if not given.
    """

    name = "gradient sums"
    claims = "each parameter's gradient is the sum over the group's ranks of those of their losses"

    def __init__(self, group: Group, divide_by: float = 1, only: Collection[str] | None = None):
        if not (math.isfinite(divide_by) and divide_by > 0):
            raise ValueError(f"divide_by is {divide_by}; legal: above 0, such as the number of ranks")
        self.group, self.divide_by = group, divide_by
        self.only = None if only is None else set(only)

    def apply(self, graph: fx.Graph, report: Report) -> None:
        module = graph.owning_module
        inputs = None if module is None else module.meta.get("gradients_of")
        if inputs is None:
            return  # not a backward graph
        assert module is not None
        self._check([entry.name for entry in inputs if entry.kind == "parameter"])
        output = next(node for node in graph.nodes if node.op == "output")
        gradients = list(output.args[0])
        name, sums = group_name(self.group), dict[fx.Node, fx.Node]()
        for place, (entry, gradient) in enumerate(zip(inputs, gradients, strict=True)):
            if entry.kind != "parameter" or (self.only is not None and entry.name not in self.only):
                continue
            if gradient is None:
                report.refused.append(f"{entry.name} has no gradient")
            elif name in summed_over(gradient):
                report.refused.append(f"{entry.name} is summed over {name} already")
            else:
                if gradient not in sums:  # two parameters may have one gradient
                    sums[gradient] = insert_sum(following(gradient), gradient, name)
                    report.made["sum"] += 1
                gradients[place] = sums[gradient]
        output.args = (tuple(gradients),)
        if sums and self.divide_by != 1:
            self._divide(graph, module.meta["tangents"], report)

    def _check(self, names: list[str]) -> None:
        unknown = sorted((self.only or set()) - set(names))
        if unknown:
            raise ValueError(f"no parameter is called {unknown[0]!r}; legal: {', '.join(names)}")

    def _divide(self, graph: fx.Graph, tangents: int, report: Report) -> None:
        """Divide what comes in: the graph is linear in it."""
        arriving = [node for node in graph.nodes if node.op == "placeholder"][-tangents:]
        for node in arriving:
            if users := list(node.users):
                divided = insert(following(arriving[-1]), aten.div.Tensor, node, self.divide_by)
                for user in users:
                    user.replace_input_with(node, divided)
                report.made[f"division by {self.divide_by:g}"] += 1
