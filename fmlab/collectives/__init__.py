"""Collectives written on send and receive: schedules as data, proven, priced, run and drawn."""

from fmlab.collectives.algorithms import ALGORITHMS, schedule
from fmlab.collectives.proof import ScheduleError, prove
from fmlab.collectives.schedule import COLLECTIVES, Schedule, Send

__all__ = ["ALGORITHMS", "COLLECTIVES", "Schedule", "ScheduleError", "Send", "prove", "schedule"]
