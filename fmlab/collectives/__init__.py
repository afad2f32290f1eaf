"""Collectives written on send and receive: schedules as data, proven, priced, run and drawn.

plan = schedule("all_reduce", "ring", 4)           the messages of an algorithm, step by step (data)
prove(plan)                                        each contribution arrives once: a proof without ranks
cost.seconds("all_reduce", 2**30, topology)        modelled time, with links that messages share
machine("h200").seconds("all_reduce", 2**30)       the same as fitted to quoted measurements
"""

from fmlab.collectives import cost
from fmlab.collectives.algorithms import ALGORITHMS, schedule
from fmlab.collectives.checked import Mismatch, checked
from fmlab.collectives.closed import closed_form
from fmlab.collectives.functions import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    reduce,
    reduce_scatter,
)
from fmlab.collectives.machines import Machine, machine, machine_names
from fmlab.collectives.measured import Measurement, bus_factor, measurements
from fmlab.collectives.probe import measure_links
from fmlab.collectives.proof import ScheduleError, prove
from fmlab.collectives.schedule import COLLECTIVES, Schedule, Send

__all__ = [
    "ALGORITHMS",
    "COLLECTIVES",
    "Machine",
    "Measurement",
    "Mismatch",
    "Schedule",
    "ScheduleError",
    "Send",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "bus_factor",
    "checked",
    "closed_form",
    "cost",
    "machine",
    "machine_names",
    "measure_links",
    "measurements",
    "prove",
    "reduce",
    "reduce_scatter",
    "schedule",
]
