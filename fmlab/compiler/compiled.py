"""A program that runs and trains: one autograd.Function around its two graphs."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from fmlab.compiler import graph as g
from fmlab.compiler.capture import Program, autocast_state, root
from fmlab.compiler.memory.place import PlacedRunner
from fmlab.compiler.runner import Runner


class Compiled(nn.Module):
    """Runs a program's graphs in the place of the function that it was captured from.

    Its parameters are those of the captured model, not copies. A call with other shapes, dtypes, modes or
    constants than at capture raises ValueError: the graphs do not hold for it. So does one where a number
    that the function reads, a module or its hooks changed since. Arguments in another memory order are
    copied.

    Args:
        one_block: run each graph with its intermediates in one block of memory, see PlacedRunner.
    """

    def __init__(self, program: Program, one_block: bool = False):
        super().__init__()
        runner = PlacedRunner if one_block else Runner
        self.program = program
        self.model = program.flat.module  # so that parameters(), state_dict() and .train() find it
        self.run_forward = runner(program.forward)
        self.run_backward = None if program.backward is None else runner(program.backward)
        self.shared = _results_in_saved_memory(program)
        self._in_order = any("as_strided" in name for name in g.counts(program.forward.graph))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        flat = self.program.flat
        tensors = flat.tensors(args, kwargs)
        flat.check(tensors, self._in_order)
        if self.program.found.guards is not None:
            self.program.found.guards.check()
        if (casts := autocast_state(flat)) != self.program.autocast:
            raise ValueError(
                f"autocast is {casts}, and was {self.program.autocast} at capture; compile again for it"
            )
        if self.run_backward is not None and torch.is_grad_enabled():
            results: Sequence[Tensor] = _TwoGraphs.apply(self, *tensors)
        else:
            with torch.no_grad():
                results = self.run(self.run_forward, flat.laid_out(tensors))[: len(self.program.results)]
        return self._nested(tensors, results)

    def run(self, runner: Runner, inputs: list[Tensor]) -> Sequence[Any]:
        """Run a graph as it stands: autocast has had its say at capture, and must not cast again."""
        with ExitStack() as off:
            for kind in self.program.autocast:
                if kind != "meta" and torch.is_autocast_enabled(kind):
                    off.enter_context(torch.autocast(kind, enabled=False))
            return runner(inputs)

    def _nested(self, tensors: Sequence[Tensor], results: Sequence[Tensor]) -> Any:
        found = self.program.found
        leaves = list(found.outputs)
        for place, index in found.passed.items():
            leaves[place] = tensors[index]
        for place, result in zip(self.program.results, results, strict=True):
            leaves[place] = result
        return pytree.tree_unflatten(leaves, found.spec)


class _TwoGraphs(torch.autograd.Function):
    """Forward: the forward graph. Backward: the backward graph."""

    @staticmethod
    def forward(ctx: Any, compiled: Compiled, *tensors: Tensor) -> tuple[Tensor, ...]:
        program = compiled.program
        made = compiled.run(compiled.run_forward, program.flat.laid_out(tensors))
        results, saved = made[: len(program.results)], made[len(program.results) :]
        ctx.save_for_backward(*saved)
        ctx.compiled = compiled
        ctx.set_materialize_grads(False)
        ctx.expected = [
            (x.shape, x.stride(), x.dtype, x.device)
            for x, differentiable in zip(results, program.differentiable, strict=True)
            if differentiable
        ]
        plain = [x for x, d in zip(results, program.differentiable, strict=True) if not d]
        ctx.mark_non_differentiable(*plain)
        ctx.watched = [(x, x._version) for x in (results[k].detach() for k in compiled.shared)]
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        compiled = ctx.compiled
        if any(x._version != version for x, version in ctx.watched):
            raise RuntimeError(
                "a result was changed in place, and the backward graph needs what it was; change a .clone()"
            )
        wanted = [d for d, yes in zip(gradients, compiled.program.differentiable, strict=True) if yes]
        tangents = [_laid_out(d, *like) for d, like in zip(wanted, ctx.expected, strict=True)]
        assert compiled.run_backward is not None
        inputs = [*ctx.saved_tensors, *tangents]
        del gradients, wanted, tangents
        if hasattr(ctx, "maybe_clear_saved_tensors"):  # unless the graph is to be kept for another backward
            ctx.maybe_clear_saved_tensors()  # so that each is freed after its last use, as in eager
        return (None, *compiled.run(compiled.run_backward, inputs))


def _laid_out(
    gradient: Tensor | None,
    shape: torch.Size,
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """The gradient in the memory order that the graph was captured for: zeros where there is none."""
    if gradient is not None and gradient.stride() == tuple(stride):
        return gradient
    laid = torch.empty_strided(shape, stride, dtype=dtype, device=device)
    return laid.zero_() if gradient is None else laid.copy_(gradient)


def _results_in_saved_memory(program: Program) -> list[int]:
    """Which results lie in memory that is kept for the backward graph, as tensors of their own.

    torch notices a change of a tensor that was saved, but not one through another tensor of the same memory.
    """
    if program.backward is None:
        return []
    output = next(node for node in program.forward.graph.nodes if node.op == "output")
    results = list(output.args[0])[: len(program.results)]
    kept = {root(node) for node in program.saved}
    return [k for k, node in enumerate(results) if root(node) in kept and node not in program.saved]
