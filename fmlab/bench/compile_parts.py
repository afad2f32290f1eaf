"""Fused parts of a training step in generated C++: against primitive operators, torch's own, and memory.

Every side writes to memory that was taken before; what taking it costs is a row of its own. Torch's layer
norm cannot write to given memory, so there both sides take theirs.
"""

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fmlab.bench import Ratio, Result, interleaved
from fmlab.compiler import (
    CostModel,
    Fusion,
    GenerateCpp,
    PassManager,
    Program,
    Runner,
    SplitBias,
    capture,
    optimize,
)
from fmlab.compiler import graph as g
from fmlab.compiler.fusion import FusedKernel
from fmlab.compiler.memory.place import way_to_write
from fmlab.compiler.optimizer import Update, adamw_update
from fmlab.meter import best_seconds

aten = torch.ops.aten
ALONE = CostModel(least_bytes=-1, least_nodes=1)  # a softmax is a kernel, though it is one operator
LONG_ENOUGH = 0.005  # seconds of a call that a clock and a busy machine can tell apart
Call = Callable[[], object]


@dataclass
class Part:
    """One part of a step. inputs: its tensors; those that require a gradient get one in its backward.

    primitive, compiled: the same function, in primitive operators and as one writes it. native: what torch
    has for its forward and its backward pass, each into given memory, or into its own if `allocates`.
    """

    name: str
    inputs: Sequence[Tensor]
    primitive: Callable[..., Tensor]
    compiled: Callable[..., Tensor]
    native: tuple[Call, Call]
    allocates: bool = False


# ---- the same functions in primitive operators -------------------------------------------------------------


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """GELU by its tanh approximation of x [n,d] + bias [d]."""
    h = x + bias
    return h * 0.5 * (1 + (math.sqrt(2 / math.pi) * (h + 0.044715 * h * h * h)).tanh())


def residual_norm(x: Tensor, update: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The stream x + update, all [n,d], and its layer norm."""
    total = x + update
    centred = total - total.mean(-1, keepdim=True)
    variance = (centred * centred).mean(-1, keepdim=True)
    return total, centred * (variance + 1e-5).rsqrt() * weight + bias


def softmax(x: Tensor) -> Tensor:
    """Over the last dim."""
    power = (x - x.amax(-1, keepdim=True).detach()).exp()
    return power / power.sum(-1, keepdim=True)


def cross_entropy(x: Tensor, labels: Tensor) -> Tensor:
    """Mean over the rows with a label other than -100."""
    shifted = x - x.amax(-1, keepdim=True).detach()
    scores = shifted - shifted.exp().sum(-1, keepdim=True).log()
    counts = labels != -100
    loss = -scores.gather(-1, labels.where(counts, 0).unsqueeze(-1)).squeeze(-1)
    return loss.where(counts, 0).sum(0) / counts.sum(0)


# ---- calls that are timed ----------------------------------------------------------------------------------


def prepared(graph: fx.Graph, inputs: Sequence[Tensor]) -> tuple[Call, list[Tensor]]:
    """(run a graph's operators one by one, each into memory taken now; the graph's results).

    Raises ValueError for an operator that cannot write to given memory.
    """
    values: dict[fx.Node, Any] = {}
    calls: list[tuple[Callable[..., Any], list[Any], dict[str, Any]]] = []
    given = iter(inputs)
    for node in graph.nodes:
        if node.op == "placeholder":
            values[node] = next(given)
        elif node.op == "call_function":
            args = fx.map_arg(node.args, values.__getitem__)
            kwargs = fx.map_arg(node.kwargs, values.__getitem__)
            values[node] = node.target(*args, **kwargs)
            _prepare(node, values[node], list(args), dict(kwargs), calls)
    output = next(node for node in graph.nodes if node.op == "output")

    def run() -> None:
        for target, args, kwargs in calls:
            target(*args, **kwargs)

    return run, [values[node] for node in output.args[0] if isinstance(node, fx.Node)]


def _prepare(node: fx.Node, made: Any, args: list[Any], kwargs: dict[str, Any], calls: list[Any]) -> None:
    if g.is_view(node) or node.target is operator.getitem or not node.all_input_nodes:
        return  # nothing to compute, or the same every time
    way = way_to_write(node)
    if isinstance(way, str):
        raise ValueError(f"{node.name} is no primitive operator for this purpose: {way}")
    outs = [made] if isinstance(made, Tensor) else list(made)
    if way.kind == "copy":
        calls.append((outs[0].copy_, args[:1], {}))
    elif way.kind == "zero":
        calls.append((outs[0].zero_, [], {}))
    elif way.kind == "kernel":
        calls.append((node.target.code, [args, outs], {}))  # type: ignore[union-attr]
    else:
        calls.append((way.target, args, {**kwargs, **dict(zip(way.names, outs, strict=True))}))


@dataclass
class Side:
    """One pass of a part: a call into memory taken before, one that takes its own, and its results."""

    call: Call
    allocating: Call
    results: list[Tensor]
    moved: int
    graph: fx.Graph


def sides(part: Part, generate: bool, folder: Path) -> tuple[Side, Side | None]:
    """Forward and, where an input requires a gradient, backward pass of a part; in generated code or not."""
    inputs = [x.detach().requires_grad_(x.requires_grad) for x in part.inputs]
    trained = any(x.requires_grad for x in inputs)
    program = capture(part.compiled if generate else part.primitive, *inputs, backward=trained)
    assert isinstance(program, Program)
    if generate:
        optimize(program, PassManager([SplitBias(), Fusion(ALONE), GenerateCpp(folder)]))
    with torch.no_grad():
        first = _side(program.forward, [x.detach() for x in inputs])
        if program.backward is None:
            return first, None
        results = len(program.results)
        saved = first.results[results:]
        tangents = [tangent(x) for x, d in zip(first.results, program.differentiable, strict=False) if d]
        return first, _side(program.backward, [*saved, *tangents])


def tangent(x: Tensor) -> Tensor:
    """A gradient for a result: the same numbers every time."""
    made = torch.randn(x.shape, generator=torch.Generator().manual_seed(9)) if x.dim() else torch.ones(())
    return made.to(x.dtype)


def _side(module: fx.GraphModule, inputs: list[Tensor]) -> Side:
    call, results = prepared(module.graph, inputs)
    runner = Runner(module)
    return Side(call, lambda: runner(list(inputs)), results, g.moved_bytes(module.graph), module.graph)


def kernel_bytes(graph: fx.Graph) -> tuple[int, int]:
    """(kernels, bytes that they read and write) of a graph."""
    nodes = [node for node in graph.nodes if isinstance(node.target, FusedKernel)]
    return len(nodes), sum(g.nbytes(n) + sum(map(g.nbytes, n.all_input_nodes)) for n in nodes)


def parts(rows: int, vocabulary: int) -> list[Part]:
    """Of a GPT-2 124M step over `rows` tokens; the softmax is that of its attention."""
    generator = torch.Generator().manual_seed(0)

    def made(*shape: int, trained: bool = True) -> Tensor:
        return torch.randn(shape, generator=generator).requires_grad_(trained)

    labels = torch.randint(0, vocabulary, (rows,), generator=generator)
    labels[::7] = -100
    x, bias = made(rows, 3072), made(3072)
    stream = [made(rows, 768), made(rows, 768), made(768), made(768)]
    scores, logits = made(12 * rows, 256), made(rows, vocabulary)
    return [
        Part(
            "bias+GELU",
            [x, bias],
            bias_gelu,
            lambda x, b: F.gelu(x + b, approximate="tanh"),
            _native_gelu(x.detach(), bias.detach()),
        ),
        Part(
            "residual+norm",
            stream,
            residual_norm,  # type: ignore[arg-type]
            lambda x, y, w, b: (total := x + y, F.layer_norm(total, (768,), w, b)),  # type: ignore[arg-type,return-value]
            _native_norm(*(x.detach() for x in stream)),
            allocates=True,
        ),
        Part("softmax", [scores], softmax, lambda x: x.softmax(-1), _native_softmax(scores.detach())),
        Part(
            "cross-entropy",
            [logits, labels],
            cross_entropy,
            F.cross_entropy,
            _native_cross_entropy(logits.detach(), labels),
        ),
    ]


# ---- torch's own -------------------------------------------------------------------------------------------


def _native_gelu(x: Tensor, bias: Tensor) -> tuple[Call, Call]:
    h, y, d = torch.empty_like(x), torch.empty_like(x), tangent(x)
    d_h, d_bias = torch.empty_like(x), torch.empty_like(bias)

    def forward() -> None:
        torch.add(x, bias, out=h)
        aten.gelu.out(h, approximate="tanh", out=y)

    def backward() -> None:
        aten.gelu_backward.grad_input(d, h, approximate="tanh", grad_input=d_h)
        torch.sum(d_h, 0, out=d_bias)

    return forward, backward


def _native_norm(x: Tensor, update: Tensor, weight: Tensor, bias: Tensor) -> tuple[Call, Call]:
    d, d_total = tangent(x), tangent(x)

    def forward() -> tuple[Tensor, ...]:
        total = x + update
        return total, *torch.native_layer_norm(total, (x.shape[-1],), weight, bias, 1e-5)

    total, _, mean, inverse = forward()

    def backward() -> tuple[Tensor, ...]:
        d_x, *others = aten.native_layer_norm_backward(
            d, total, (x.shape[-1],), mean, inverse, weight, bias, [True, True, True]
        )
        return d_x + d_total, *others

    return forward, backward


def _native_softmax(x: Tensor) -> tuple[Call, Call]:
    y, d, d_x = torch.empty_like(x), tangent(x), torch.empty_like(x)

    def forward() -> None:
        aten._softmax.out(x, -1, False, out=y)

    def backward() -> None:
        aten._softmax_backward_data.out(d, y, -1, x.dtype, grad_input=d_x)

    return forward, backward


def _native_cross_entropy(x: Tensor, labels: Tensor) -> tuple[Call, Call]:
    y, d_y, d_x = torch.empty_like(x), torch.empty_like(x), torch.empty_like(x)
    loss, count, d = torch.empty(()), torch.empty(()), torch.ones(())

    def forward() -> None:
        aten._log_softmax.out(x, -1, False, out=y)
        aten.nll_loss_forward.output(y, labels, None, 1, -100, output=loss, total_weight=count)

    def backward() -> None:
        aten.nll_loss_backward.grad_input(d, y, labels, None, 1, -100, count, grad_input=d_y)
        aten._log_softmax_backward_data.out(d_y, y, -1, x.dtype, out=d_x)

    return forward, backward


# ---- rows --------------------------------------------------------------------------------------------------


def stream(nbytes: int) -> Call:
    """The fastest of a copy and a sum of two tensors that read and write `nbytes` together."""
    n = max(1, nbytes // 12)
    a, b, c = torch.ones(n), torch.ones(n), torch.empty(n)
    source, target = torch.ones(nbytes // 8 + 1), torch.empty(nbytes // 8 + 1)

    def triad() -> None:
        torch.add(a, b, alpha=3.0, out=c)

    def copy() -> None:
        target.copy_(source)

    return copy if paired(copy, triad, pairs=5).median >= 1 else triad


def paired(a: Call, b: Call, pairs: int) -> Ratio:
    """interleaved(a, b), each called several times in a row where a call is too short for the clock."""
    times = max(1, min(50, round(LONG_ENOUGH / best_seconds(a, 3))))

    def several(call: Call) -> Call:
        def run() -> None:
            for _ in range(times):
                call()

        return run

    ratio = interleaved(several(a), several(b), pairs, warmup=1)
    return replace(ratio, seconds_a=ratio.seconds_a / times, seconds_b=ratio.seconds_b / times)


def measured(part: Part, pairs: int, folder: Path) -> Iterator[Result]:
    """A part's rows, forward and backward."""
    ours, steps = sides(part, True, folder), sides(part, False, folder)
    for when, fused, plain, native in zip(("forward", "backward"), ours, steps, part.native, strict=True):
        if fused is None or plain is None:
            continue
        name = f"compile: {part.name}, {when}"
        made, moved = kernel_bytes(fused.graph)
        ratio = paired(fused.call, plain.call, pairs)
        detail = (
            f"{made} kernel, {plain.moved / 2**20:.0f} MB moved before, {moved / 2**20:.0f} after; {ratio}"
        )
        yield Result(f"{name}, against primitive operators", ratio.median, "x", ">= 2.0", detail=detail)
        mine = fused.allocating if part.allocates else fused.call
        ratio = paired(mine, native, pairs)
        note = "both take their memory; " if part.allocates else ""
        yield Result(f"{name}, against torch's own", ratio.median, "x", ">= 0.9", detail=f"{note}{ratio}")
        yield limit(name, fused.call, moved, pairs)
        ratio = paired(fused.call, fused.allocating, pairs)
        yield Result(f"{name}, taking memory for its results too", ratio.median, "x", detail=str(ratio))


def limit(name: str, call: Call, moved: int, pairs: int) -> Result:
    """Time of a kernel over that of a copy or sum of as many bytes."""
    ratio = paired(call, stream(moved), pairs)
    rate = moved / ratio.seconds_a / 1e9
    detail = f"{rate:.1f} GB/s, a stream of as many bytes {moved / ratio.seconds_b / 1e9:.1f} GB/s; {ratio}"
    return Result(f"{name}, time over memory's limit", 1 / ratio.median, "x", "<= 1.5", detail=detail)


def optimizer(elements: int, pairs: int, folder: Path) -> Iterator[Result]:
    """AdamW over one tensor, in place."""
    shape = (elements // 768, 768)
    tensors = [torch.randn(shape).abs() for _ in range(4)]
    numbers = [torch.tensor(x) for x in (0.999, 1e-3, 1.5)]
    program = capture(adamw_update, *tensors, *numbers, backward=False)
    assert isinstance(program, Program)
    plain, _ = prepared(program.forward.graph, [*tensors, *numbers])
    moved_plain = g.moved_bytes(program.forward.graph)
    optimize(program, PassManager([Fusion(), GenerateCpp(folder)]))
    given = [*(x.clone() for x in tensors), *numbers]
    update = Update(given, (0.9, 0.999), 1e-8, folder)
    step = torch.tensor(10.0)

    def native() -> None:
        torch._fused_adamw_(
            [tensors[0]], [tensors[1]], [tensors[2]], [tensors[3]], [], [step],
            lr=1e-3, beta1=0.9, beta2=0.999, weight_decay=1e-2, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip

    def mine() -> None:
        update(given)

    made, moved = kernel_bytes(program.forward.graph)
    name = "compile: optimizer step"
    ratio = paired(mine, plain, pairs)
    detail = f"{made} kernel, {moved_plain / 2**20:.0f} MB moved before, {moved / 2**20:.0f} after; {ratio}"
    yield Result(f"{name}, against primitive operators", ratio.median, "x", ">= 2.0", detail=detail)
    ratio = paired(mine, native, pairs)
    yield Result(f"{name}, against torch's own", ratio.median, "x", ">= 0.9", detail=str(ratio))
    yield limit(name, mine, moved, pairs)
