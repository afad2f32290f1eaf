"""A lesson-sized but real compiler over torch.fx: capture, passes, and a module that runs the result.

    program = capture(model, batch)          a forward and a backward graph of ATen operators
    fast = compile(model, batch)             the same after passes, as a module that trains
    print(program)                           the graphs as text
    PassManager(passes).steps(graphs)        one pass at a time, with a report of what changed
    compile(model, batch, passes=fusing_passes())     with fused groups in generated C++
    plan_memory(graph), recompute(program, bytes)     what is alive when, and keeping less of it
    Compiled(program, one_block=True)        intermediates in one block of memory
    CompiledAdamW(parameters)                an optimizer's step as one generated kernel
    InsertGradientSums(group), Bucket(bytes), Overlap()     graphs that several ranks run

torch differentiates and knows the shapes; what is here is what happens to a graph afterwards.
"""

from fmlab.compiler.capture import Eager, Program, capture
from fmlab.compiler.codegen import GenerateCpp, GenerateTriton, NoCompiler
from fmlab.compiler.compiled import Compiled
from fmlab.compiler.distributed import (
    Bucket,
    InsertGradientSums,
    Overlap,
    OverlapTimeline,
    Shard,
    Span,
    TensorParallel,
    check_collectives,
    local_part,
    overlap_timeline,
    shard_parameters,
)
from fmlab.compiler.errors import CaptureError, Line
from fmlab.compiler.flat import Input
from fmlab.compiler.fusion import CostModel, FusedKernel, Fusion, kernels
from fmlab.compiler.main import compile, default_passes, fusing_passes, optimize
from fmlab.compiler.memory import (
    InPlace,
    Lifetime,
    MemoryPlan,
    PlacedRunner,
    Recomputed,
    plan_memory,
    recompute,
)
from fmlab.compiler.optimizer import CompiledAdamW
from fmlab.compiler.passes import (
    Algebra,
    AttentionToSDPA,
    CommonSubexpressions,
    ConstantFolding,
    DeadCode,
    GraphPass,
    JoinSlices,
    Layout,
    MergeProducts,
    Norms,
    Pass,
    PassManager,
    Report,
    ShapePropagation,
    SplitBias,
    Step,
)
from fmlab.compiler.runner import Runner

__all__ = [
    "Algebra",
    "AttentionToSDPA",
    "Bucket",
    "CaptureError",
    "CommonSubexpressions",
    "Compiled",
    "CompiledAdamW",
    "ConstantFolding",
    "CostModel",
    "DeadCode",
    "Eager",
    "FusedKernel",
    "Fusion",
    "GenerateCpp",
    "GenerateTriton",
    "GraphPass",
    "InPlace",
    "Input",
    "InsertGradientSums",
    "JoinSlices",
    "Layout",
    "Lifetime",
    "Line",
    "MemoryPlan",
    "MergeProducts",
    "NoCompiler",
    "Norms",
    "Overlap",
    "OverlapTimeline",
    "Pass",
    "PassManager",
    "PlacedRunner",
    "Program",
    "Recomputed",
    "Report",
    "Runner",
    "ShapePropagation",
    "Shard",
    "Span",
    "SplitBias",
    "Step",
    "TensorParallel",
    "capture",
    "check_collectives",
    "compile",
    "default_passes",
    "fusing_passes",
    "kernels",
    "local_part",
    "optimize",
    "overlap_timeline",
    "plan_memory",
    "recompute",
    "shard_parameters",
]
