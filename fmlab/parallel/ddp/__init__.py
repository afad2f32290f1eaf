"""Data parallelism by hand: whole replicas, different rows, gradients summed while they are still being made.

buckets.py   which gradients travel together
reducer.py   gradient hooks that send a bucket as soon as it is full
replicas.py  replicas that start equal, and the proof that they are
engine.py    the training step
cost.py      what it must cost: payload and bytes on the wire
timeline.py  what happened when, and how much communication was hidden
"""

from fmlab.parallel.ddp.buckets import Bucket, plan_buckets
from fmlab.parallel.ddp.cost import expected_payload, ring_bytes
from fmlab.parallel.ddp.engine import DataParallel
from fmlab.parallel.ddp.reducer import Reducer
from fmlab.parallel.ddp.timeline import Event, Timeline

__all__ = [
    "Bucket",
    "DataParallel",
    "Event",
    "Reducer",
    "Timeline",
    "expected_payload",
    "plan_buckets",
    "ring_bytes",
]
