"""Fully sharded data parallelism by hand (Zhao et al. 2023, arXiv:2304.11277), parameter by parameter.

chunks.py    who holds which rows
sharded.py   one parameter, its shard and its whole
memory.py    memory that is given back while autograd keeps views of it
messages.py  a unit's all-gather and reduce-scatter
hooks.py     when they happen, in the forward and the backward pass
build.py     from a model to units
states.py    the training step's side of it
"""

from fmlab.parallel.build import Build
from fmlab.parallel.fsdp.chunks import Chunks
from fmlab.parallel.fsdp.states import FullyShardedStates

__all__ = ["Chunks", "FullyShardedStates", "states"]


def states(build: Build) -> FullyShardedStates:
    """Divide the model that `build` holds; what the other strategies left on this rank."""
    return FullyShardedStates(build)
