"""The map of chapter 0.3: whose time and whose memory is a training step, layer by layer of the stack?

    kind_of("aten::addmm"), layer_of("aten::addmm")     "products", "kernels"
    with memory_line() as line: ...                     bytes alive after every operator
    on_chip("h100", "gpt2", 8, 1024)                    a step on a simulated chip: time and memory by layer

Figures of such steps are in fmlab.lab.map_view.

A layer owns the time and the memory that it could make smaller: a small operator is the graph's, because a
compiler could fuse it, and a matrix product is its kernel's. What is said of chips is modelled.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from fmlab.chips import chip
from fmlab.lab.overlap import Overlap
from fmlab.meter import peak_memory
from fmlab.models import GPT
from fmlab.sim.simulated import Execution, Simulated
from fmlab.sim.trace import Trace, record

BUCKET = 25 * 2**20  # bytes of gradients that travel together, torch's default
LAUNCH = 5e-6  # seconds that Python takes to issue one operator; our assumption, of the usual size
REPLICAS = 8  # chips, each with its copy of the model, that add up their gradients
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
_CONVERSIONS = {"_to_copy", "to"}


@dataclass(frozen=True)
class Layer:
    """A layer of the stack. time, memory: what of a step it could make smaller; chapters that go into it."""

    name: str
    does: str
    time: str
    memory: str
    chapters: tuple[str, ...]


STACK = (
    Layer(
        "front end",
        "runs your Python, calls operators",
        "the chip waits for Python",
        "nothing",
        ("1.11", "1.12"),
    ),
    Layer("graph", "keeps, joins, orders operators", "small operators", "activations", ("1.13", "2.1")),
    Layer("kernels", "compute one operator, in tiles", "products, attention", "nothing", ("1.9", "1.14")),
    Layer("bits", "how wide a number is", "conversions", "16-bit copies of weights", ("1.15",)),
    Layer(
        "states",
        "what must survive the step",
        "the update",
        "weights, gradients, moments",
        ("2.1", "2.3"),
    ),
    Layer("wires", "add up gradients of all ranks", "messages in the open", "nothing", ("1.10", "2.2")),
)
#: What an operator does -> the layer that could make it cheaper.
KINDS = {
    "products": "kernels",
    "attention": "kernels",
    "small operators": "graph",
    "conversions": "bits",
    "update": "states",
}


# region kinds
def kind_of(operator: str, phase: str = "") -> str:
    """What an operator such as "aten::addmm" does: one of KINDS. phase: "optimizer" within an update."""
    name = operator.rpartition("::")[2]
    if phase == "optimizer" or "adam" in name:
        return "update"
    if name in _PRODUCTS:
        return "products"
    if "attention" in name:
        return "attention"
    return "conversions" if name in _CONVERSIONS else "small operators"


def layer_of(operator: str, phase: str = "") -> str:
    """The layer of the stack that could make an operator cheaper."""
    return KINDS[kind_of(operator, phase)]


# endregion


# region step
def train_step(model: nn.Module, optimizer: Optimizer, ids: Tensor, labels: Tensor, bf16: bool) -> None:
    """What every training loop repeats: forward, backward, update. ids, labels: [b,l]."""
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=bf16):  # narrower numbers, if asked for
        loss = model(ids, labels=labels).loss_sum / labels.numel()  # forward
    loss.backward()  # backward
    optimizer.step()  # update
    optimizer.zero_grad()  # and forget the gradients


# endregion


@contextmanager
def memory_line() -> Iterator[list[int]]:
    """Bytes of the tensors made in the block that are alive, after each operator that runs in it."""
    line: list[int] = []
    with peak_memory() as memory:

        class After(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                result = func(*args, **(kwargs or {}))
                line.append(memory.live)
                return result

        with After():
            yield line


@dataclass(frozen=True)
class OnChip:
    """One training step on one of REPLICAS simulated chips; all of it modelled.

    trace:   what the chip did; seconds: until all of it was done
    issued:  seconds after which Python had given it all its work (0 for a graph): what a stop-watch shows
             that does not wait
    lines:   bytes by line of the ledger, when most were in use
    copies:  bytes of 16-bit copies of weights among its activations
    parameters, tokens: of the model, and of the chip's batch
    """

    chip: str
    trace: Trace
    seconds: float
    issued: float
    lines: Mapping[str, int]
    copies: int
    parameters: int
    tokens: int

    @property
    def waiting(self) -> float:
        """Seconds in which gradients travel and nothing hides it: a ring all-reduce of fp32 gradients in
        buckets, over all links of the chip, without latency (fmlab.lab.overlap)."""
        backward = [event for event in self.trace if event.phase == "backward"]
        spent = max(event.end for event in backward) - min(event.start for event in backward)
        return Overlap(
            self.parameters,
            self.tokens,
            REPLICAS,
            buckets=math.ceil(4 * self.parameters / BUCKET),
            flops=4 * self.parameters * self.tokens / spent,
            link=chip(self.chip).link_bandwidth,
            latency=0.0,
        ).waiting

    # region layers
    @cached_property
    def time(self) -> dict[str, float]:
        """Seconds by layer; they add up to the step."""
        found = {layer.name: 0.0 for layer in STACK}
        for event in self.trace:
            found[layer_of(event.name, event.phase)] += event.seconds
        found["front end"] = self.seconds - self.trace.busy()
        found["wires"] = self.waiting
        return found

    @cached_property
    def memory(self) -> dict[str, float]:
        """Bytes by layer at the fullest moment."""
        states = ("parameters", "gradients", "optimizer states")
        found = {layer.name: 0.0 for layer in STACK}
        found["states"] = sum(self.lines[line] for line in states)
        found["graph"] = self.lines["activations"] - self.copies
        found["bits"] = self.copies
        return found

    # endregion

    @property
    def step(self) -> float:
        """Seconds of the step, waiting for the other replicas included."""
        return sum(self.time.values())

    def bound(self) -> dict[str, float]:
        """Seconds of the chip's own work by what limits them: "compute" or "memory"."""
        found = {"compute": 0.0, "memory": 0.0}
        for event in self.trace:
            ridge = self.trace.chip.roofline(event.dtype).ridge if event.flops and self.trace.chip else 0.0
            computing = bool(event.flops) and event.flops >= ridge * event.bytes
            found["compute" if computing else "memory"] += event.seconds
        return found


def on_chip(name: str, preset: str, rows: int, length: int, execution: Execution | None = None) -> OnChip:
    """A later step of a GPT on the simulated chip `name`, in bf16 autocast with AdamW, on shapes alone.

    execution: "eager", operator by operator, each of which the chip is given LAUNCH seconds after the one
        before; "compiled", as a whole graph; by default as the chip's software works.
    Raises ValueError for an unknown chip or preset, SimOutOfMemory for a step that does not fit.
    """
    from fmlab.sim import simulate

    eager = (execution or ("compiled" if chip(name).compiler == "static-shape" else "eager")) == "eager"
    device = simulate(name, dry=True, execution=execution, launch_overhead=LAUNCH if eager else 0.0)[0]
    with torch.device("sim"):
        model = GPT.from_preset(preset)
        ids = torch.zeros(rows, length, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    _make_moments(model, optimizer)
    copies: list[int] = []
    model.head.register_forward_pre_hook(lambda *_: copies.append(_copies(device, model)))
    device.reset()
    with record(device) as trace:
        train_step(model, optimizer, ids, ids, bf16=True)
        device.flush()
        issued = device.clock.host
    lines, parameters = dict(device.memory.peak_lines), model.num_parameters()
    return OnChip(name, trace, device.seconds, issued, lines, copies[0], parameters, ids.numel())


def _make_moments(model: nn.Module, optimizer: Optimizer) -> None:
    """What AdamW makes in its first step and keeps, without a forward and a backward pass."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def _copies(device: Simulated, model: nn.Module) -> int:
    """Bytes of converted weights that are alive."""
    shapes = {tuple(parameter.shape) for parameter in model.parameters()}
    blocks = [block for block in device.memory.blocks() if layer_of(block.op) == "bits"]
    return sum(block.size for block in blocks if block.shape in shapes)


def shares(parts: Mapping[str, float]) -> dict[str, float]:
    """Parts in percent of their sum."""
    whole = sum(parts.values())
    return {name: 100 * part / whole for name, part in parts.items()}
