"""Memory: what is alive when, where it lies, and what may be computed again instead of kept."""

from fmlab.compiler.memory.in_place import InPlace
from fmlab.compiler.memory.place import PlacedRunner
from fmlab.compiler.memory.plan import Lifetime, MemoryPlan, plan_memory
from fmlab.compiler.memory.recompute import Recomputed, recompute

__all__ = ["InPlace", "Lifetime", "MemoryPlan", "PlacedRunner", "Recomputed", "plan_memory", "recompute"]
