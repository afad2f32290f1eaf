"""Counts of what really happened, most as a context manager around any code.

    with traffic() as sent: ...            payload bytes and calls of every collective
    with link_traffic() as links: ...      bytes of messages, by sender and receiver
    with wire() as line: ...               bytes that crossed this process's own TCP sockets (Linux)
    with peak_memory() as memory: ...      the most bytes of tensors that were alive at once
    with saved_activations(model) as s:    bytes that autograd keeps for the backward pass
    with flops() as work: ...              floating point operations, by operator and by module
    graph_depth(loss)                      operations that had to wait for one another
    best_seconds(call)                     the least time of a few calls
    with FlightRecorder() as flight: ...   the last collectives of a rank, for when a run has gone wrong
    verdict(read_dumps(folder))            what the recorders of all ranks say: who is missing, who differs
    stragglers(read_dumps(folder))         how long each rank kept the others waiting
    measure_machine()                      what this machine can do at most
    measure_chip()                         the same as a chip of fmlab.chips, to set beside an H100

They watch the calling thread only and slow it down, so measure times without them; but for the flight
recorder, which sees all threads and may stay on.
"""

from fmlab.meter.activations import SavedActivations, saved_activations
from fmlab.meter.compute import Flops, flops
from fmlab.meter.flight import Dump, FlightEntry, FlightRecorder, keep_recording, read_dumps
from fmlab.meter.flight_stragglers import Stragglers, Waiting, stragglers
from fmlab.meter.flight_verdict import Verdict, verdict
from fmlab.meter.graph import graph_depth
from fmlab.meter.links import LinkTraffic, link_traffic
from fmlab.meter.machine import Machine, best_seconds, measure_chip, measure_machine, read_bandwidth
from fmlab.meter.memory import PeakMemory, peak_memory
from fmlab.meter.traffic import Collective, Traffic, traffic
from fmlab.meter.wire import Wire, wire

__all__ = [
    "Collective",
    "Dump",
    "FlightEntry",
    "FlightRecorder",
    "Flops",
    "LinkTraffic",
    "Machine",
    "PeakMemory",
    "SavedActivations",
    "Stragglers",
    "Traffic",
    "Verdict",
    "Waiting",
    "Wire",
    "best_seconds",
    "flops",
    "graph_depth",
    "keep_recording",
    "link_traffic",
    "measure_chip",
    "measure_machine",
    "peak_memory",
    "read_bandwidth",
    "read_dumps",
    "saved_activations",
    "stragglers",
    "traffic",
    "verdict",
    "wire",
]
