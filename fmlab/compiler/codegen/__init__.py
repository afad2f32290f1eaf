"""Code generation: fused groups as C++, built with the system's compiler, or as Triton."""

from fmlab.compiler.codegen.build import NoCompiler, build, cache_folder, compiler
from fmlab.compiler.codegen.generate import GenerateCpp, source
from fmlab.compiler.codegen.triton_generate import GenerateTriton, TritonGroup

__all__ = [
    "GenerateCpp",
    "GenerateTriton",
    "NoCompiler",
    "TritonGroup",
    "build",
    "cache_folder",
    "compiler",
    "source",
]
