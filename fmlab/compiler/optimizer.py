"""AdamW whose update is one generated kernel: what a few primitive operators become when they are fused.

Step by step in primitive operators an update reads and writes each number some thirty times; as one kernel it
reads the parameter, its gradient and two moments, and writes three of them.
"""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from fmlab.compiler.capture import Program, capture
from fmlab.compiler.codegen import GenerateCpp
from fmlab.compiler.fusion import FusedKernel, Fusion, kernels
from fmlab.compiler.main import optimize
from fmlab.compiler.passes import PassManager

DTYPES = (torch.float32, torch.float64)
OTHER_RULES = ("amsgrad", "maximize")  # switches of torch.optim.AdamW that are another update


def adamw_update(
    p: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    decay: Tensor,
    rate: Tensor,
    correction: Tensor,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> tuple[Tensor, Tensor, Tensor]:
    """New parameter and moments (Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2).

    Args:
        decay: 1 - lr * weight_decay. rate: lr / (1 - beta1^t). correction: 1 / sqrt(1 - beta2^t). Numbers of
            one step, as tensors without dims, so that a graph of this holds for every step.
    """
    mean = mean * betas[0] + gradient * (1 - betas[0])
    square = square * betas[1] + gradient * gradient * (1 - betas[1])
    return p * decay - rate * mean / (square.sqrt() * correction + eps), mean, square


class CompiledAdamW(Optimizer):
    """torch.optim.AdamW from generated code; its state has the same names, so that either loads the other's.

    Args:
        params: dense fp32 or fp64 tensors on the CPU, or groups of them.
        folder: where built files are kept; see GenerateCpp.

    A machine without a C++ compiler runs torch's operators: `generated` says which it is. Raises ValueError
    for settings out of range and for other parameters.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        folder: Path | None = None,
    ):
        for name, value, high in (
            ("lr", lr, float("inf")),
            ("beta1", betas[0], 1),
            ("beta2", betas[1], 1),
            ("eps", eps, float("inf")),
            ("weight_decay", weight_decay, float("inf")),
        ):
            if not 0 <= value < high:
                raise ValueError(f"{name} must be at least 0 and below {high}, got {value}")
        self.folder = folder
        self._updates: dict[Any, Update] = {}
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As of every optimizer; ValueError for parameters that it does not take."""
        super().add_param_group(param_group)
        for p in self.param_groups[-1]["params"]:
            dense = p.is_contiguous() or (p.dim() == 4 and p.is_contiguous(memory_format=torch.channels_last))
            if p.device.type != "cpu" or p.dtype not in DTYPES or not dense or p.dim() == 0:
                self.param_groups.pop()
                raise ValueError(
                    f"a parameter {list(p.shape)} of {p.dtype} on {p.device}: CompiledAdamW takes dense "
                    "fp32 or fp64 tensors of at least one dim on the CPU; use torch.optim.AdamW"
                )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As of every optimizer; ValueError for a state of another rule, before anything is loaded."""
        for group in state_dict["param_groups"]:
            asked = [name for name in OTHER_RULES if group.get(name)]
            if asked:
                raise ValueError(f"CompiledAdamW has no {asked[0]}; the state is of an optimizer with it")
        super().load_state_dict(state_dict)

    @property
    def generated(self) -> bool:
        """Whether every update so far runs generated code."""
        return bool(self._updates) and all(one.kernel.code is not None for one in self._updates.values())

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient, in place."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.numel():
                    self._step(p, group)
        return loss

    def _step(self, p: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        state["step"] += 1
        step, lr, (beta1, beta2) = int(state["step"]), float(group["lr"]), group["betas"]
        numbers = (
            1 - lr * group["weight_decay"],
            lr / (1 - beta1**step),
            (1 - beta2**step) ** -0.5,
        )
        if p.grad is None or p.grad.layout != torch.strided:
            raise ValueError("CompiledAdamW takes dense gradients; use torch.optim.SparseAdam")
        gradient = p.grad if p.grad.stride() == p.stride() else torch.empty_like(p).copy_(p.grad)
        given = [p.detach(), gradient, state["exp_avg"], state["exp_avg_sq"]]
        given += [torch.tensor(number, dtype=p.dtype) for number in numbers]
        key = (tuple(p.shape), tuple(p.stride()), p.dtype, (beta1, beta2), group["eps"])
        if key not in self._updates:
            self._updates[key] = Update(given, (beta1, beta2), group["eps"], self.folder)
        self._updates[key](given)
        # written to behind torch's back: a backward pass that needs the old values must notice
        increment_version([p, state["exp_avg"], state["exp_avg_sq"]])


class Update:
    """The kernel of one shape, called with the tensors of one parameter, whose memory the results take."""

    def __init__(self, given: list[Any], betas: tuple[float, float], eps: float, folder: Path | None):
        program = capture(partial(adamw_update, betas=betas, eps=eps), *given, backward=False)
        assert isinstance(program, Program)
        optimize(program, PassManager([Fusion(), GenerateCpp(folder)]))
        graph = program.forward.graph
        (self.kernel,) = kernels(graph)
        call = next(node for node in graph.nodes if isinstance(node.target, FusedKernel))
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        self.order = [inputs.index(node) for node in call.args]
        output = next(node for node in graph.nodes if node.op == "output")
        self.results = [0] * len(output.args[0])
        for place, node in zip((0, 2, 3), output.args[0], strict=True):  # parameter and moments
            assert isinstance(node, fx.Node)
            self.results[int(node.args[1])] = place  # type: ignore[arg-type]

    def __call__(self, given: list[Any]) -> None:
        inputs, out = [given[i] for i in self.order], [given[i] for i in self.results]
        if self.kernel.code is not None:
            self.kernel.code(inputs, out)  # type: ignore[call-arg]
            return
        for old, new in zip(out, self.kernel(*inputs), strict=True):
            old.copy_(new)
