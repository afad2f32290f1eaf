"""What the compiler promises: fused parts, blocks of GPT-2 and of a UNet, memory, and the time to compile.

The GPT-2 block is one of GPT-2 124M over 4 x 256 tokens; the UNet block is a level of Stable Diffusion 1.5
at 0.3 of its width, with its transformer, over two images of 32x32. All in fp32, with torch's threads.
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from fmlab.bench import Result, interleaved
from fmlab.bench.compile_parts import measured, optimizer, parts
from fmlab.compiler import (
    Compiled,
    PassManager,
    Program,
    capture,
    compile,
    fusing_passes,
    kernels,
    optimize,
    plan_memory,
)
from fmlab.compiler import graph as g
from fmlab.compiler.codegen import NoCompiler, compiler
from fmlab.meter import peak_memory
from fmlab.models import GPT, UNet
from fmlab.models.attention import sdpa_core
from fmlab.models.diffusion.blocks import reset_like_torch
from fmlab.models.diffusion.unet import UNetLayer
from fmlab.models.diffusion.unet_layout import layout
from fmlab.models.gpt import GPTLayer
from fmlab.models.state import State


def run(quick: bool) -> Iterator[Result]:
    """Parts, then blocks end to end, memory and compile time; a line if there is no C++ compiler."""
    try:
        compiler()
    except NoCompiler as error:
        yield Result("compile: a C++ compiler", 0, "compilers", detail=str(error))
        return
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        pairs = 7 if quick else 25
        for part in parts(rows=256 if quick else 1024, vocabulary=50257):
            yield from measured(part, pairs, folder)
        yield from optimizer(2_359_296 if quick else 7_077_888, pairs, folder)
        for make in (gpt_block, unet_block):
            yield from _block(make(), folder, pairs=5 if quick else 15)
        yield _compile_time("gpt2-tiny" if quick else "gpt2")


# ---- blocks ------------------------------------------------------------------------------------------------


@dataclass
class Case:
    """A module and inputs for it; it gives one tensor."""

    name: str
    module: nn.Module
    inputs: Sequence[Tensor]


class _GPTBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            config = GPT.from_preset("gpt2").config
        self.layer = GPTLayer(config, 0, sdpa_core)
        for p in self.layer.parameters():
            nn.init.normal_(p, std=0.02)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.layer(State(hidden=hidden)).hidden


class _UNetBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            config = UNet.from_preset("sd-1.5", channels=(96, 192, 384, 384)).config
        part = next(part for part in layout(config) if part.kind == "down")
        self.layer = UNetLayer(part, config, sdpa_core)
        reset_like_torch(self.layer)

    def forward(self, hidden: Tensor, time: Tensor, text: Tensor) -> Tensor:
        return self.layer(State(hidden=hidden, time=time, encoder_hidden=text)).hidden


def gpt_block() -> Case:
    """A layer of GPT-2 124M over 4 x 256 tokens."""
    torch.manual_seed(0)
    return Case("GPT-2 block", _GPTBlock(), [torch.randn(4, 256, 768).requires_grad_()])


def unet_block() -> Case:
    """A level of the UNet over two images of 32x32."""
    torch.manual_seed(0)
    image = torch.randn(2, 96, 32, 32).contiguous(memory_format=torch.channels_last)
    inputs = [image.requires_grad_(), torch.randn(2, 384).requires_grad_(), torch.randn(2, 77, 768)]
    return Case("UNet block", _UNetBlock(), inputs)


def training(call: Callable[..., Tensor], case: Case) -> Callable[[], None]:
    """Forward and backward, gradients thrown away."""
    leaves = [x for x in (*case.module.parameters(), *case.inputs) if x.requires_grad]
    with torch.no_grad():
        d = torch.randn_like(case.module(*case.inputs))

    def step() -> None:
        torch.autograd.grad(call(*case.inputs), leaves, d)

    return step


def inference(call: Callable[..., Tensor], case: Case) -> Callable[[], None]:
    """Forward without gradients."""

    def step() -> None:
        with torch.no_grad():
            call(*case.inputs)

    return step


def _block(case: Case, folder: Path, pairs: int) -> Iterator[Result]:
    """End to end against eager and torch.compile; what was fused; the peak of memory."""
    program = capture(case.module, *case.inputs, rewrites=PassManager(fusing_passes(folder)).source)
    assert isinstance(program, Program)
    before = {name: g.moved_bytes(graph) for name, graph in program.graphs.items()}
    optimize(program, PassManager(fusing_passes(folder)))
    ours = Compiled(program)
    yield from _counts(case, program, before)
    theirs, why = _inductor(case)
    for when, timed in (("forward", inference), ("forward and backward", training)):
        name = f"compile: {case.name}, {when}"
        mine = timed(ours, case)
        ratio = interleaved(mine, timed(case.module, case), pairs, warmup=3)
        yield Result(f"{name}, against eager", ratio.median, "x", ">= 1.0", detail=str(ratio))
        if theirs is None:
            yield Result(f"{name}, against torch.compile", 0, "runs", detail=why)
            continue
        ratio = interleaved(mine, timed(theirs, case), pairs, warmup=3)
        yield Result(f"{name}, against torch.compile", ratio.median, "x", ">= 0.9", detail=str(ratio))
    yield from _memory(case, program, ours)


def _inductor(case: Case) -> tuple[Callable[..., Tensor] | None, str]:
    """The case under torch.compile, run once; or None and why it does not run here."""
    made = torch.compile(case.module)
    try:
        training(made, case)()
        inference(made, case)()
    except Exception as error:  # whatever stands in the way of its C++ is the row's text
        return None, f"torch.compile does not run here: {str(error).splitlines()[0][:200]}"
    return made, ""


def _counts(case: Case, program: Program, before: dict[str, int]) -> Iterator[Result]:
    for name, graph in program.graphs.items():
        groups = kernels(graph)
        generated = sum(kernel.code is not None for kernel in groups)
        nodes = sum(len(kernel.members) for kernel in groups)
        detail = f"{len(groups)} groups, {generated} in C++, of {nodes} operators"
        yield Result(f"compile: {case.name}, {name}, groups", len(groups), "groups", detail=detail)
        after = g.moved_bytes(graph)
        detail = (
            f"{before[name] / 2**20:.1f} MB before, {after / 2**20:.1f} after, products included; counted"
        )
        yield Result(
            f"compile: {case.name}, {name}, bytes moved", after / before[name], "x", "<= 1.0", detail=detail
        )


def _memory(case: Case, program: Program, ours: Compiled) -> Iterator[Result]:
    """The most bytes of tensors alive in a step, as fmlab.meter counts them, beside what was planned."""
    peaks = {}
    for side, call in (("eager", case.module), ("compiled", ours)):
        step = training(call, case)
        step()
        with peak_memory() as memory:
            step()
        peaks[side] = memory.peak
    planned = max(plan_memory(graph).peak for graph in program.graphs.values())
    detail = (
        f"{peaks['compiled'] / 2**20:.1f} MB against {peaks['eager'] / 2**20:.1f} MB; "
        f"the larger graph alone was planned to take {planned / 2**20:.1f} MB"
    )
    ratio = peaks["compiled"] / peaks["eager"]
    yield Result(
        f"compile: {case.name}, forward and backward, peak of tensors against eager",
        ratio,
        "x",
        "<= 1.0",
        detail=detail,
    )


def _compile_time(preset: str) -> Result:
    """From a model to two graphs in generated code, nothing built before."""
    torch.manual_seed(0)
    model = GPT.from_preset(preset)
    ids = torch.randint(0, 1000, (1, 64))
    with tempfile.TemporaryDirectory() as made:
        start = time.perf_counter()
        compiled = compile(model, kwargs=dict(input_ids=ids, labels=ids), passes=fusing_passes(Path(made)))
        seconds = time.perf_counter() - start
    assert isinstance(compiled, Compiled)
    groups = [kernel for graph in compiled.program.graphs.values() for kernel in kernels(graph)]
    detail = f"{len(groups)} groups, {sum(k.code is not None for k in groups)} in C++, built from nothing"
    return Result(f"compile: time to compile {preset}", seconds, "s", "<= 30", detail=detail)
