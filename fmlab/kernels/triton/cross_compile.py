"""Compile a kernel for GPUs that are not there: machine code, registers and on-chip memory, but no run.

    with count_bytes() as count:
        matmul(a, b)
    compile_for(count.launches[0], "sm_90a").registers

Triton brings the assembler of NVIDIA's tool kit and, for AMD, LLVM's: neither needs a GPU or its driver.
"""

import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend

from fmlab.kernels.triton import interpreter
from fmlab.kernels.triton.counting import Launch, Pointer

#: name -> (Triton's target, what it is)
TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), "A100"),
    "sm_90a": (GPUTarget("cuda", 90, 32), "H100, H200"),
    "gfx942": (GPUTarget("hip", "gfx942", 64), "MI300X"),
}
TYPES = {
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
}


@dataclass(frozen=True)
class Compiled:
    """A kernel as machine code.

    registers: of a thread. spilled: bytes of a thread's stack, where it keeps what fits in no register.
    shared: bytes of on-chip memory of a program. assembly: PTX, or AMD's. size: bytes of machine code.
    """

    kernel: str
    target: str
    registers: int
    spilled: int
    shared: int
    size: int
    assembly: str = field(repr=False)


def compile_for(launch: Launch, target: str, num_warps: int = 4) -> Compiled:
    """Compile the kernel of a counted launch for the types and constants of that launch.

    Raises ValueError for an unknown target; what the compiler refuses, it raises itself.
    """
    if target not in TARGETS:
        raise ValueError(f"no target {target!r}; there are: {', '.join(TARGETS)}")
    interpreter.refuse_environment()
    goal, _ = TARGETS[target]
    source = _source(launch, goal)
    made = triton.compile(source, target=goal, options={"num_warps": num_warps})
    kind = "ptx" if goal.backend == "cuda" else "amdgcn"
    text = made.asm[kind]
    binary = made.asm["cubin" if kind == "ptx" else "hsaco"]
    registers, spilled = _nvidia(binary) if kind == "ptx" else _amd(text)
    return Compiled(
        launch.kernel.__name__, target, registers, spilled, made.metadata.shared, len(binary), text
    )


def _source(launch: Launch, goal: GPUTarget) -> ASTSource:
    """Types, constants, and what is a multiple of 16: as Triton finds them at a launch on a GPU."""
    kernel, arguments = launch.kernel, dict(launch.arguments)
    if "DOT" in arguments:  # recorded as the interpreter's
        first = next(one.dtype for one in arguments.values() if isinstance(one, Pointer))
        arguments["DOT"] = _dot(first)
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    multiples = []
    for place, name in enumerate(kernel.parameters):
        value = arguments[name]
        if name in kernel.constants or (type(value) is int and value == 1):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, Pointer):
            signature[name] = f"*{TYPES[value.dtype]}"
            multiples += [place] * value.aligned
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            multiples += [place] * (value % 16 == 0)
    divisible = make_backend(goal).parse_attr("D")
    return ASTSource(kernel.compiled, signature, constants, {(place,): divisible for place in multiples})


def _dot(dtype: torch.dtype) -> Any:
    from fmlab.kernels.triton.launch import DOTS

    return DOTS[dtype]


def _nvidia(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread and bytes of its stack, read from the machine code by NVIDIA's cuobjdump."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(file)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found is not None, said
    return int(found[1]), int(found[2])


def _amd(assembly: str) -> tuple[int, int]:
    """Vector registers (with accumulators) of a thread, and the bytes of its spilled ones."""
    found = {
        name: re.search(rf"\.{name}:\s+(\d+)", assembly)
        for name in ("vgpr_count", "agpr_count", "vgpr_spill_count")
    }
    counts = {name: int(one[1]) if one is not None else 0 for name, one in found.items()}
    return counts["vgpr_count"], 4 * counts["vgpr_spill_count"]
