"""Graphs that several ranks run: collectives put in, merged, and placed so that they overlap with work.

collective.py  a collective as two nodes, its start and its wait
gradients.py   data parallelism: sums of gradients
bucket.py      fewer, larger collectives
overlap.py     starts early, waits late; schedule.py finds the order
timeline.py    what of the communication is left to see (modelled)
"""

from fmlab.compiler.distributed.bucket import Bucket
from fmlab.compiler.distributed.gradients import InsertGradientSums
from fmlab.compiler.distributed.overlap import Overlap
from fmlab.compiler.distributed.timeline import OverlapTimeline, Span, overlap_timeline

__all__ = ["Bucket", "InsertGradientSums", "Overlap", "OverlapTimeline", "Span", "overlap_timeline"]
