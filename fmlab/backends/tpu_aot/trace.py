"""One training step as a graph: forward, backward and AdamW's update, traced by torch, without a number.

The graph is functional (nothing is written in place) and takes what a step takes: weights, AdamW's two
moments, the count of updates, the batch. It returns the loss and the new state.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._decomp import core_aten_decompositions
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, functionalize
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map

Loss = Callable[[nn.Module, Any], Tensor]
Tensors = list[Tensor]


@dataclass(frozen=True)
class AdamW:
    """The optimizer in the traced step. Its numbers change no size; matrices decay, vectors do not."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1

    def update(
        self, weight: Tensor, grad: Tensor, first: Tensor, second: Tensor, count: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The new (weight, first moment, second moment); count [] is the number of updates with this one."""
        first = first * self.beta1 + grad * (1 - self.beta1)
        second = second * self.beta2 + grad * grad * (1 - self.beta2)
        decay = self.weight_decay if weight.dim() >= 2 else 0.0
        root = (second / (1 - self.beta2**count)).sqrt() + self.eps
        return (
            weight * (1 - self.lr * decay) - self.lr * (first / (1 - self.beta1**count)) / root,
            first,
            second,
        )


@dataclass(frozen=True)
class TracedStep:
    """A training step.

    graph:      ATen operators; its inputs are `inputs` in order, its outputs the loss and the new state
    inputs:     shapes and dtypes, as fake tensors: weights, first and second moments, count, buffers, batch
    state:      how many of the first inputs are the state that a step replaces (and may overwrite)
    parameters: how many numbers are trained; tied weights count once
    """

    graph: GraphModule
    inputs: tuple[Tensor, ...]
    state: int
    parameters: int

    @property
    def operators(self) -> int:
        """Operators of the graph."""
        return sum(node.op == "call_function" for node in self.graph.graph.nodes)

    @property
    def state_bytes(self) -> int:
        """Bytes of weights and optimizer state."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.inputs[: self.state])


def trace_step(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    loss: Loss,
    precision: str = "bf16",
    optimizer: AdamW | None = None,
) -> TracedStep:
    """Trace `loss(model, batch)`, its backward and the update.

    model: on any device, the meta device too: only its shapes are read, and it is left as it is.
    batch: likewise; a dict of tensors, as the model takes it.
    loss:  gives the scalar to go down, from (model, batch), with no host read.
    precision: "bf16" runs the forward pass under autocast, the weights stay in fp32; "fp32" does not.

    The operators are those that torch.compile would see, with attention by its formula (scores held in full),
    not by a fused kernel. Raises ValueError for an unknown precision, or a step that reads a number on the
    host.
    """
    if precision not in ("fp32", "bf16"):
        raise ValueError(f"precision must be fp32 or bf16, got {precision!r}")
    optimizer = optimizer or AdamW()
    step = _Step(model, loss)
    names = [name for name, p in step.named_parameters() if p.requires_grad]
    parameters = dict(step.named_parameters())
    fixed = {name: tensor for name, tensor in {**parameters, **dict(step.named_buffers())}.items()}
    fixed = {name: tensor for name, tensor in fixed.items() if name not in names}
    keys = list(batch)
    n = len(names)

    def whole(*flat: Tensor) -> Tensors:
        weights = [weight.detach().requires_grad_() for weight in flat[:n]]
        firsts, seconds, count = flat[n : 2 * n], flat[2 * n : 3 * n], flat[3 * n] + 1
        rest = flat[3 * n + 1 :]
        state = dict(zip(names, weights, strict=True)) | dict(zip(fixed, rest[: len(fixed)], strict=True))
        of_batch = dict(zip(keys, rest[len(fixed) :], strict=True))
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"), sdpa_kernel(SDPBackend.MATH):
            value = functional_call(step, state, (of_batch,))
        gradients = torch.autograd.grad(value, weights, allow_unused=True)
        with torch.no_grad():
            new = [
                (weight, first, second)
                if grad is None
                else optimizer.update(weight, grad, first, second, count)
                for weight, grad, first, second in zip(weights, gradients, firsts, seconds, strict=True)
            ]
        return [value.detach(), *(column[i] for i in range(3) for column in new), count]

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, _as_compiling():
        trained = [_fake(parameters[name]) for name in names]
        inputs = (
            *trained,
            *(torch.zeros_like(weight) for weight in trained),
            *(torch.zeros_like(weight) for weight in trained),
            torch.zeros(()),
            *(_fake(tensor) for tensor in fixed.values()),
            *(_fake(batch[key]) for key in keys),
        )
        graph = _traced(whole, inputs)
    return TracedStep(graph, inputs, 3 * n + 1, sum(weight.numel() for weight in trained))


class _Step(nn.Module):
    """The model and its loss as one module, so that torch can swap the weights for the graph's inputs."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        return self.loss(self.model, batch)


@contextmanager
def _as_compiling() -> Iterator[None]:
    """`torch.compiler.is_compiling()` holds: models leave out kernels that are made for a CPU alone."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def _traced(whole: Callable[..., Tensors], inputs: tuple[Tensor, ...]) -> GraphModule:
    """Twice: autograd's work is written down first, then in-place operators are turned into plain ones."""
    try:
        with_writes = make_fx(whole, tracing_mode="fake")(*inputs)
    except (RuntimeError, torch._subclasses.fake_tensor.DataDependentOutputException) as error:
        if "data-dependent" in str(error).lower() or "DataDependent" in type(error).__name__:
            raise ValueError(
                f"the step reads a number of a tensor on the host, so that no one program does it: {error}; "
                "`fmlab preflight` says where"
            ) from error
        raise
    graph = make_fx(
        functionalize(with_writes), decomposition_table=dict(core_aten_decompositions()), tracing_mode="fake"
    )(*inputs)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def _fake(tensor: Tensor) -> Tensor:
    """A fake tensor of the same shape and dtype on the CPU; called inside the mode."""
    fake: Tensor = torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device="cpu")
    return fake


def real_inputs(step: TracedStep, model: nn.Module, batch: Mapping[str, Tensor]) -> list[Tensor]:
    """The graph's inputs with numbers: this model's weights, moments of zero, this batch. For comparisons."""
    wrapped = _Step(model, lambda m, b: torch.zeros(()))
    trained = [p.detach() for p in wrapped.parameters() if p.requires_grad]
    frozen = [p.detach() for p in wrapped.parameters() if not p.requires_grad]
    zeros = tree_map(torch.zeros_like, [trained, trained])
    values = tree_leaves(
        [trained, zeros, torch.zeros(()), frozen, list(wrapped.buffers()), list(batch.values())]
    )
    assert [tuple(v.shape) for v in values] == [tuple(i.shape) for i in step.inputs]
    return values
