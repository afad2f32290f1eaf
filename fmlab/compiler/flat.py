"""A function or model as a flat function of tensors: parameters and buffers first, then the arguments.

A graph takes tensors, in an order. The parameters are fetched from the modules at every call, so an optimizer
that updates them in place, or a new tensor in their place, is seen; tied ones are one input.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from fmlab.compiler.errors import CaptureError


@dataclass(frozen=True)
class Input:
    """One tensor that goes into a graph.

    kind: "parameter", "buffer" or "argument". differentiable: whether it gets a gradient.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    differentiable: bool

    def check(self, tensor: object) -> None:
        """Raise ValueError unless `tensor` is of the kind that the graph was captured for."""
        if type(tensor) not in (Tensor, nn.Parameter):
            raise ValueError(f"{self.kind} {self.name} must be a plain tensor, got {type(tensor).__name__}")
        assert isinstance(tensor, Tensor)
        now = (tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad)
        then = (self.shape, self.dtype, self.device, self.differentiable)
        if now != then:
            what = ("shape", "dtype", "device", "requires_grad")
            changed = [
                f"{name} {new}, captured {old}"
                for name, new, old in zip(what, now, then, strict=True)
                if new != old
            ]
            raise ValueError(f"{self.kind} {self.name} has {'; '.join(changed)}; compile again for it")
        if tuple(tensor.stride()) != self.stride and self.kind != "argument":
            raise ValueError(
                f"{self.kind} {self.name} has strides {tuple(tensor.stride())}, captured {self.stride}; "
                "compile again for it"
            )


class Flat:
    """`fn(*args, **kwargs)` as a function of a list of tensors.

    Modules that a plain function refers to by name count: their parameters are inputs too.
    Raises ValueError for example inputs without a tensor, where there are no parameters either.
    """

    def __init__(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]):
        self.fn = fn
        self.module = fn if isinstance(fn, nn.Module) else _Closure(fn)
        self.parameters = dict(self.module.named_parameters())
        self.buffers = dict(self.module.named_buffers())
        self.leaves, self.spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        self.places = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)]
        self.constants = {i: leaf for i, leaf in enumerate(self.leaves) if not isinstance(leaf, Tensor)}
        self.training = [module.training for module in self.module.modules()]
        self.inputs = [
            *(_describe(name, "parameter", p) for name, p in self.parameters.items()),
            *(_describe(name, "buffer", b) for name, b in self.buffers.items()),
            *(_describe(str(i), "argument", self.leaves[i]) for i in self.places),
        ]
        if not self.inputs:
            raise ValueError("there is no tensor among the inputs, and no parameter: nothing to capture")
        self._homes = [self._home(name) for name in (*self.parameters, *self.buffers)]
        for entry, tensor in zip(self.inputs, self.tensors(args, kwargs), strict=True):
            entry.check(tensor)

    def _home(self, name: str) -> tuple[nn.Module, str]:
        owner, _, leaf = name.rpartition(".")
        return self.module.get_submodule(owner), leaf

    def tensors(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The tensors of a call, in the graph's order. Raises ValueError for another structure."""
        leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        if spec != self.spec:
            raise ValueError(f"the arguments are nested otherwise than at capture: {spec}, then {self.spec}")
        for i, constant in self.constants.items():
            if isinstance(leaves[i], Tensor) or leaves[i] != constant:
                raise ValueError(
                    f"argument {i} is {leaves[i]!r} and was {constant!r} at capture, where it became part of "
                    "the graph; compile again for it"
                )
        return [getattr(owner, leaf) for owner, leaf in self._homes] + [leaves[i] for i in self.places]

    def check(self, tensors: Sequence[Tensor]) -> None:
        """Raise ValueError unless shapes, dtypes, gradients and train/eval modes are those of the capture."""
        for entry, tensor in zip(self.inputs, tensors, strict=True):
            entry.check(tensor)
        if [module.training for module in self.module.modules()] != self.training:
            raise ValueError("a module was in another mode (train or eval) at capture; compile again for it")

    def call(self, tensors: Sequence[Tensor]) -> Any:
        """fn with these tensors in the places of parameters, buffers and arguments."""
        names = [*self.parameters, *self.buffers]
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors[len(names) :], strict=True):
            leaves[place] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        given = dict(zip(names, tensors, strict=False))
        held = dict(given)  # functional_call writes what the modules hold afterwards back to it
        result = functional_call(self.module, held, args, kwargs)
        for name in names:
            if held[name] is not given[name]:
                raise CaptureError(
                    "state",
                    f"{name} is set to another tensor: a graph has no effects",
                    "return the new value and store it outside of the function",
                )
        return result


class _Closure(nn.Module):
    """A plain function, and the modules that it refers to."""

    def __init__(self, fn: Callable[..., Any]):
        super().__init__()
        self.fn = fn
        bound = getattr(fn, "__self__", None)
        named = {"self": bound} if isinstance(bound, nn.Module) else {}
        if inspect.isfunction(inspect.unwrap(fn)):
            known = inspect.getclosurevars(inspect.unwrap(fn))
            named |= {**known.globals, **known.nonlocals}
        for name, value in named.items():
            if isinstance(value, nn.Module):
                self.add_module(name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)


def _describe(name: str, kind: str, x: Tensor) -> Input:
    return Input(name, kind, tuple(x.shape), tuple(x.stride()), x.dtype, x.device, x.requires_grad)
