"""Fully sharded data parallelism by hand (Zhao et al. 2023, arXiv:2304.11277), parameter by parameter.

chunks.py    who holds which rows
sharded.py   one parameter, its shard and its whole
memory.py    memory that is given back while autograd keeps views of it
messages.py  a unit's all-gather and reduce-scatter
hooks.py     when they happen, in the forward and the backward pass
units.py     which parameters come and go together
build.py     from a model to divided units
record.py    what happened when
cost.py      what it must send and hold, from shapes
meta.py      a model that no rank could hold is filled shard by shard
states.py    the training step's side of it
"""

from fmlab.parallel.build import Build
from fmlab.parallel.fsdp.chunks import Chunks
from fmlab.parallel.fsdp.meta import check_meta, first_values, is_on_meta
from fmlab.parallel.fsdp.states import FullyShardedStates

__all__ = ["Chunks", "FullyShardedStates", "check_meta", "first_values", "is_on_meta", "states"]


def states(build: Build) -> FullyShardedStates:
    """Divide the model that `build` holds; what the other strategies left on this rank."""
    return FullyShardedStates(build)
