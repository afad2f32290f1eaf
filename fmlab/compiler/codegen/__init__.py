"""Code generation: fused groups as C++."""

from fmlab.compiler.codegen.build import NoCompiler, build, cache_folder, compiler
from fmlab.compiler.codegen.generate import GenerateCpp, source

__all__ = ["GenerateCpp", "NoCompiler", "build", "cache_folder", "compiler", "source"]
