"""A program that runs and trains: one autograd.Function around its two graphs."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from fmlab.compiler.capture import Program
from fmlab.compiler.memory.place import PlacedRunner
from fmlab.compiler.runner import Runner


class Compiled(nn.Module):
    """Runs a program's graphs in the place of the function that it was captured from.

    Its parameters are those of the captured model, not copies. A call with other shapes, dtypes, modes or
    constants than at capture raises ValueError: the graphs do not hold for it.

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

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        flat = self.program.flat
        tensors = flat.tensors(args, kwargs)
        flat.check(tensors)
        if torch.is_autocast_enabled("cpu") != self.program.autocast:
            raise ValueError("autocast was in another state at capture; compile again for it")
        if self.run_backward is not None and torch.is_grad_enabled():
            results: Sequence[Tensor] = _TwoGraphs.apply(self, *tensors)
        else:
            with torch.no_grad():
                results = self.run_forward(list(tensors))[: len(self.program.results)]
        return self._nested(tensors, results)

    def _nested(self, tensors: Sequence[Tensor], results: Sequence[Tensor]) -> Any:
        found = self.program.found
        leaves = list(found.outputs)
        for place, index in found.passed.items():
            leaves[place] = tensors[index]
        for place, result in zip(self.program.results, results, strict=True):
            leaves[place] = result
        return pytree.tree_unflatten(leaves, _without_leftovers(found.spec))


class _TwoGraphs(torch.autograd.Function):
    """Forward: the forward graph. Backward: the backward graph."""

    @staticmethod
    def forward(ctx: Any, compiled: Compiled, *tensors: Tensor) -> tuple[Tensor, ...]:
        program = compiled.program
        made = compiled.run_forward(list(tensors))
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
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        compiled = ctx.compiled
        wanted = [d for d, yes in zip(gradients, compiled.program.differentiable, strict=True) if yes]
        tangents = [_laid_out(d, *like) for d, like in zip(wanted, ctx.expected, strict=True)]
        assert compiled.run_backward is not None
        inputs = [*ctx.saved_tensors, *tangents]
        del gradients, wanted, tangents
        if hasattr(ctx, "maybe_clear_saved_tensors"):  # unless the graph is to be kept for another backward
            ctx.maybe_clear_saved_tensors()  # so that each is freed after its last use, as in eager
        return (None, *compiled.run_backward(inputs))


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


def _without_leftovers(spec: pytree.TreeSpec) -> pytree.TreeSpec:
    """The structure of a result without what else rode along at capture, such as the masks in a State."""
    if spec.is_leaf():
        return spec
    children = (
        spec.children() if hasattr(spec, "children") else spec.children_specs
    )  # torch 2.9 has the latter
    return pytree.TreeSpec(spec.type, _plain(spec.context), [_without_leftovers(child) for child in children])


def _plain(context: Any) -> Any:
    if type(context) in (tuple, list):
        return type(context)(_plain(item) for item in context)
    if type(context) is dict:
        return {key: item for key, item in context.items() if not _holds_tensors(item)}
    return context


def _holds_tensors(thing: Any, depth: int = 3) -> bool:
    if isinstance(thing, Tensor):
        return True
    if depth == 0 or isinstance(thing, str | int | float | bool | torch.dtype | None):
        return False
    parts = [*thing.values()] if isinstance(thing, Mapping) else getattr(thing, "__dict__", {}).values()
    parts = thing if isinstance(thing, tuple | list | set) else parts
    return any(_holds_tensors(part, depth - 1) for part in parts)
