"""ZeRO by hand: data ranks divide the optimizer's state (stage 1), gradients too (2), parameters too (3).

partition.py    parameters end to end in vectors, of which each rank owns an equal slice
owned.py        a slice as the optimizer sees it: fp32 masters, in the host's memory if asked
summing.py      gradients reduce-scattered while the backward pass goes on (stages 1 and 2)
divided.py      the training states of stages 1 and 2
gathering.py    parameters gathered and given up, as autograd functions (stage 3)
blockwise.py    the training states of stage 3: what happens around each block
whose.py        which modules hold a parameter, which blocks run it
memory.py       bytes that a rank holds: the paper's table, and a count
cost.py         bytes that a step sends

Rajbhandari et al. 2019, arXiv:1910.02054; offload: Ren et al. 2021, arXiv:2101.06840.
"""

from fmlab.parallel.build import Build
from fmlab.parallel.states import States
from fmlab.parallel.zero.blockwise import DividedParameters
from fmlab.parallel.zero.cost import sent_bytes
from fmlab.parallel.zero.divided import DividedStates, WholeParameters
from fmlab.parallel.zero.memory import HeldBytes, K, StateBytes, held_bytes, state_bytes
from fmlab.parallel.zero.partition import Flat, Slices

__all__ = [
    "DividedParameters",
    "DividedStates",
    "Flat",
    "HeldBytes",
    "K",
    "Slices",
    "StateBytes",
    "WholeParameters",
    "held_bytes",
    "sent_bytes",
    "state_bytes",
    "states",
]


def states(build: Build) -> States:
    """The states of a layout with zero above 0."""
    return DividedParameters(build) if build.layout.zero == 3 else WholeParameters(build)
