"""Fusion: which nodes run as one, and what that saves."""

from fmlab.compiler.fusion.fuse import CostModel, Fusion
from fmlab.compiler.fusion.kernel import FusedKernel, kernels

__all__ = ["CostModel", "FusedKernel", "Fusion", "kernels"]
