"""Passes over graphs, and their manager."""

from fmlab.compiler.passes.algebra import Algebra
from fmlab.compiler.passes.attention import AttentionToSDPA
from fmlab.compiler.passes.base import GraphPass, Pass, Report
from fmlab.compiler.passes.bias import SplitBias
from fmlab.compiler.passes.cleaning import CommonSubexpressions, ConstantFolding, DeadCode, ShapePropagation
from fmlab.compiler.passes.layout import Layout
from fmlab.compiler.passes.manager import PassManager, Step
from fmlab.compiler.passes.norms import Norms
from fmlab.compiler.passes.qkv import MergeProducts
from fmlab.compiler.passes.slices import JoinSlices

__all__ = [
    "Algebra",
    "AttentionToSDPA",
    "CommonSubexpressions",
    "ConstantFolding",
    "DeadCode",
    "GraphPass",
    "JoinSlices",
    "Layout",
    "MergeProducts",
    "Norms",
    "Pass",
    "PassManager",
    "Report",
    "ShapePropagation",
    "SplitBias",
    "Step",
]
