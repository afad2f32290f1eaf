"""Graphs that several ranks run: collectives put in, merged, and placed so that they overlap with work.

collective.py  a collective as two nodes, its start and its wait
gradients.py   data parallelism: sums of gradients
bucket.py      fewer, larger collectives
overlap.py     starts early, waits late; schedule.py finds the order
timeline.py    what of the communication is left to see (modelled)
agree.py       that all ranks send the same

tensor_parallel.py  from matrices that are cut to the graph of each rank
placement.py        whole, cut, or a sum of parts
rules.py            from the placements of an operator's inputs to that of its result
propagation.py      the walk over a graph
"""

from fmlab.compiler.distributed.agree import check_collectives
from fmlab.compiler.distributed.bucket import Bucket
from fmlab.compiler.distributed.gradients import InsertGradientSums
from fmlab.compiler.distributed.overlap import Overlap
from fmlab.compiler.distributed.placement import Shard, local_part, shard_parameters
from fmlab.compiler.distributed.tensor_parallel import TensorParallel
from fmlab.compiler.distributed.timeline import OverlapTimeline, Span, overlap_timeline

__all__ = [
    "Bucket",
    "InsertGradientSums",
    "Overlap",
    "OverlapTimeline",
    "Shard",
    "Span",
    "TensorParallel",
    "check_collectives",
    "local_part",
    "overlap_timeline",
    "shard_parameters",
]
