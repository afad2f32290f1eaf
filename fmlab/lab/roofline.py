"""Operations on the rooflines of chips: counted work, a figure, and a panel.

    work = operations(lambda: model(ids, labels=ids).loss_sum.backward())      each operator's FLOPs and bytes
    split = on_roofline(work, chip("h100").roofline("bf16"))                   seconds, the part that computes
    fig, ax = roofline_figure({"H100": chip("h100").roofline("bf16")}, {"GPT-2": (190, 5e14)})
    roofline_panel()                                        what bounds this operation at this batch?

FLOPs are those of matrix products, convolutions and attention (torch's registry). Bytes are those of all
inputs and outputs of each operator, as if no cache kept anything and nothing were fused (fmlab.sim.charge).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from fmlab.chips import Roofline, chip, chips, dtype_name
from fmlab.lab.figures import PALETTE, figure
from fmlab.lab.panels import Panel, choices

TERA = 1e12
MARKERS = ("o", "s", "D", "^", "v", "P", "X")
TEXT = 2048  # tokens of a text, and of a cache, in the panel's attention
HEAD = 128  # numbers of an attention head there


@dataclass(frozen=True)
class Operation:
    """One call of an operator. bytes: of memory traffic. dtype: as "bf16"; "" where no FLOPs are counted."""

    name: str
    flops: int
    bytes: int
    dtype: str = ""


@dataclass(frozen=True)
class OnRoofline:
    """What a roofline says of a list of operations, one after the other (modelled).

    flops, bytes: of all. seconds: the sum of each one's least time. computing: of those seconds, the ones in
    operations that are bound by computing.
    """

    flops: int
    bytes: int
    seconds: float
    computing: float

    @property
    def intensity(self) -> float:
        """FLOPs a byte, all together."""
        return self.flops / self.bytes

    @property
    def rate(self) -> float:
        """FLOPs a second that is reached at most: less than the roofline at this intensity."""
        return self.flops / self.seconds


def on_roofline(work: Iterable[Operation], roof: Roofline) -> OnRoofline:
    """Add up what each operation takes at least. Raises ValueError when there is none."""
    work = list(work)
    if not work:
        raise ValueError("no operations were counted: the call did no work on tensors")
    seconds = [roof.seconds(one.flops, one.bytes) for one in work]
    computing = [
        time for one, time in zip(work, seconds, strict=True) if roof.bound(one.flops, one.bytes) == "compute"
    ]
    flops, nbytes = sum(one.flops for one in work), sum(one.bytes for one in work)
    return OnRoofline(flops, nbytes, sum(seconds), sum(computing))


def operations(call: Callable[[], object], fused_attention: bool = True) -> list[Operation]:
    """Run `call` and return each operator that did something, in order, with what it costs.

    On tensors of the meta device nothing is computed and nothing stored, so that models of any size can be
    counted. Views and allocations are left out.
    fused_attention: count attention as one operator that keeps its scores on the chip, as GPUs and CPUs run
        it; False: as the products, the softmax and the mask that it consists of.
    """
    with _one_attention() if fused_attention else nullcontext(), _count() as found:
        call()
    return found.operations


def _count() -> Any:
    """A context that writes down the cost of every operator."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    from fmlab.sim.charge import cost_of, tensors_in
    from fmlab.sim.plan import plan_of

    class Count(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.operations: list[Operation] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            outputs = func(*args, **kwargs)
            inputs = tensors_in(tree_leaves((args, kwargs)))
            cost = cost_of(plan_of(func), args, kwargs, inputs, outputs)
            if cost.flops or cost.bytes:
                name = _plain_name(str(func._overloadpacket))
                self.operations.append(Operation(name, cost.flops, cost.bytes, dtype_name(cost.dtype)))
            return outputs

    return Count()


def _plain_name(operator: str) -> str:
    name = operator.removeprefix("aten.")
    if "scaled_dot_product" in name:
        return "attention_backward" if name.endswith("backward") else "attention"
    return name


def _one_attention() -> Any:
    """A context in which attention is one operator on the meta device too, as it is on others."""
    import torch
    from torch.nn import functional
    from torch.overrides import TorchFunctionMode

    class OneAttention(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            fits = len(args) == 3 and args[0].is_meta and not kwargs.get("enable_gqa")
            if func is functional.scaled_dot_product_attention and fits:
                kwargs.pop("enable_gqa", None)
                one = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
                return one(*args, **kwargs)[0]
            return func(*args, **kwargs)

    return OneAttention()


def roofline_figure(
    roofs: Mapping[str, Roofline],
    points: Mapping[str, tuple[float, float] | Sequence[tuple[float, float]]] | None = None,
    title: str = "",
    intensities: tuple[float, float] = (0.1, 1e4),
    height: float = 2.8,
) -> tuple[Any, Any]:
    """Rooflines and what lies below them, on logarithmic axes: a figure and its axes, to be captioned.

    roofs: name -> roofline; a small dot marks its ridge.
    points: name -> (FLOPs a byte, FLOPs a second), or several of them.
    """
    if not roofs:
        raise ValueError("a roofline figure needs at least one roofline")
    fig, ax = figure(x="intensity [FLOP/B]", y="rate [TFLOP/s]", title=title, height=height)
    low, high = intensities
    for number, (name, roof) in enumerate(roofs.items()):
        corners = [low, *([roof.ridge] if low < roof.ridge < high else []), high]
        rates = [roof.attainable(one) / TERA for one in corners]
        colour = PALETTE[number % len(PALETTE)]
        ax.plot(corners, rates, color=colour, label=name)
        ax.plot(roof.ridge, roof.peak / TERA, ".", color=colour, markersize=9)
    for number, (name, given) in enumerate((points or {}).items()):
        many: Any = [given] if isinstance(given[0], int | float) else given
        style = {"marker": MARKERS[number % len(MARKERS)], "linestyle": "none", "markersize": 7}
        style |= {"color": "black", "markerfacecolor": "white", "markeredgewidth": 1.5}
        ax.plot([x for x, _ in many], [y / TERA for _, y in many], label=name, **style)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlim(low, high)
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return fig, ax


Work = tuple[float, float]
Count = Callable[[int, int], Work]


def linear(tokens: int, inputs: int, outputs: int, itemsize: int = 2) -> Work:
    """FLOPs and bytes of a linear layer: weights, inputs and outputs cross the memory once."""
    return 2 * tokens * inputs * outputs, itemsize * (tokens * inputs + inputs * outputs + tokens * outputs)


def pointwise(numbers: int, operations_each: float, itemsize: int = 2) -> Work:
    """FLOPs and bytes of a function of each number that reads and writes it once."""
    return operations_each * numbers, 2 * itemsize * numbers


def attention(queries: int, keys: int, width: int, read: int, fused: bool, itemsize: int = 2) -> Work:
    """FLOPs and bytes of attention without projections.

    queries: in all; keys: that each looks at; read: keys in all, each with its value.
    fused: the scores stay on the chip. Otherwise they are written, read by the softmax, written and read.
    """
    scores = 0 if fused else 4 * queries * keys * (width // HEAD)
    return 4 * queries * keys * width, itemsize * (2 * queries * width + 2 * read * width + scores)


# In a LayerNorm a number takes part in 7 operations: two sums, a difference, a square, and three that scale
# and shift it; in a GELU in 5, erf counted as one.
PANEL: dict[str, Count] = {
    "linear d to d": lambda n, d: linear(n, d, d),
    "linear d to 4d": lambda n, d: linear(n, d, 4 * d),
    "LayerNorm": lambda n, d: pointwise(n * d, 7),
    "GELU of 4d": lambda n, d: pointwise(n * 4 * d, 5),
    "attention, fused": lambda n, d: attention(n, min(n, TEXT), d, n, True),
    "attention, not fused": lambda n, d: attention(n, min(n, TEXT), d, n, False),
    "decoding attention": lambda n, d: attention(n, TEXT, d, n * TEXT, True),
}
CHIPS = tuple(name for name in chips() if "bf16" in chip(name).dtypes)
BATCHES = tuple(2**power for power in range(17))


def _draw(operation: str, tokens: int, width: int, on: str) -> tuple[Any, str]:
    roof = chip(on).roofline("bf16")
    work = {n: PANEL[operation](n, width) for n in BATCHES}
    others = [(f / b, roof.attainable(f / b)) for n, (f, b) in work.items() if n != tokens]
    flops, nbytes = work[tokens]
    here = (flops / nbytes, roof.attainable(flops / nbytes))
    points = {f"{tokens:,} tokens": here}
    fig, ax = roofline_figure({on: roof}, points, intensities=(0.5, 2e4), height=2.6)
    ax.plot(
        *zip(*[(x, y / TERA) for x, y in others], strict=True), ".", color=PALETTE[1], label="other batches"
    )
    ax.legend(loc="lower right")
    bound = roof.bound(flops, nbytes)
    limit = {"compute": "computing is the limit", "memory": "memory is the limit"}[bound]
    return fig, (
        f"{operation}, d = {width:,}, {tokens:,} tokens, {on} in bf16: {flops / nbytes:,.1f} FLOP/B, ridge "
        f"{roof.ridge:,.0f}: {limit}; at least {duration(roof.seconds(flops, nbytes))}, "
        f"{here[1] / roof.peak:.1%} of the peak"
    )


def duration(seconds: float) -> str:
    """0.123 µs, 12.3 µs, 12.3 ms or 1.23 s."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} µs"
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


def roofline_panel() -> Panel:
    """A panel with sliders for operation, batch, width and chip; all its figures are modelled.

    Worth finding: a linear layer needs about as many tokens as the ridge has FLOPs a byte, more when it is
    narrow; no batch makes LayerNorm or attention over a cache compute-bound; fusing does it for attention.
    """
    return Panel(
        "What bounds this operation at this batch?",
        _draw,
        kind="modelled",
        operation=choices("linear d to d", list(PANEL), "operation"),
        tokens=choices(64, BATCHES, "batch [tokens]"),
        width=choices(4096, (512, 1024, 2048, 4096, 8192, 16384), "width d [numbers]"),
        on=choices("h100", CHIPS, "chip"),
    )
