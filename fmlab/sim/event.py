"""One thing that a simulated chip did, as `fmlab.sim.trace.record` writes it down and a replay reads it."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["compute", "collective", "copy"]
Phase = Literal["", "forward", "backward", "optimizer"]


@dataclass(frozen=True)
class Event:
    """An operation of one device, with what was charged for it. All times are modelled seconds.

    kind:             "compute" for an operation on the device; "copy" for a transfer between the device and
                      its host; "collective" for a message to other ranks
    name:             the operator ("aten::mm"), "host read", or the collective ("all_reduce")
    seconds:          modelled duration on its stream
    flops:            floating point operations, by torch's registry (a multiply-add is two); 0 for pointwise
    bytes:            bytes charged to the device's memory (or to the host link, for a copy)
    dtype:            element type that set the peak ("bfloat16", as torch spells it)
    stream:           number of the stream; 0 is the default one
    live_bytes_after: bytes allocated on the device once the operation has its outputs
    module:           path of the module that ran it ("blocks.3.attention"), "" outside any
    shape:            shape of the first output (for a collective: of the tensor it was called with)
    start:            modelled time at which it began, on the clock of its device
    device:           index of the device
    phase:            part of the training step, "" where none is running
    bound:            what limited it: "compute", "memory", "overhead" (launch), "link", or "" for nothing
    collective:       for a collective, its kind as fmlab.collectives names it ("all_reduce", "all_gather",
                      "reduce_scatter", "broadcast", "all_to_all", "send", "recv", "barrier"); else ""
    group:            for a collective, the global ranks that take part, in the group's order
    payload_bytes:    for a collective, bytes of the whole tensor: what each rank contributes for all_reduce,
                      broadcast, all_to_all and send/recv; the gathered tensor for all_gather; the tensor
                      before it is scattered for reduce_scatter
    after:            positions, in the same trace, of events on other streams that had to end first;
                      events of one stream follow one another in any case
    """

    kind: Kind
    name: str
    seconds: float
    flops: int = 0
    bytes: int = 0
    dtype: str = ""
    stream: int = 0
    live_bytes_after: int = 0
    module: str = ""
    shape: tuple[int, ...] = ()
    start: float = 0.0
    device: int = 0
    phase: Phase = ""
    bound: str = ""
    collective: str = ""
    group: tuple[int, ...] = ()
    payload_bytes: int = 0
    after: tuple[int, ...] = ()

    @property
    def end(self) -> float:
        """Modelled time at which it ended."""
        return self.start + self.seconds
