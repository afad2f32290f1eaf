"""What the ranks of a divided training step do, as data: kinds of blocks, chunks made of them, a program.

A stage of a pipeline is a run of blocks, and blocks of a kind do the same work. So each kind is traced once
(fmlab.sim.roles), and everything else is put together from traces: GPT-3 175B has three kinds of blocks.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from fmlab.sim.event import Event
from fmlab.sim.split import Split
from fmlab.sim.stages import Weight


@dataclass(frozen=True)
class Pass:
    """One direction of one block for one micro-batch.

    events: what it does; messages of the tensor group are among them (kind "collective", not priced)
    peak:   bytes above what is alive before it, at the worst moment
    again:  positions of the events that only make activations again (recompute)
    """

    events: tuple[Event, ...]
    peak: int
    again: frozenset[int] = frozenset()

    @cached_property
    def seconds(self) -> float:
        """Modelled time of its operations, messages not counted."""
        return sum(event.seconds for event in self.events if event.kind != "collective")

    @cached_property
    def again_seconds(self) -> float:
        """The share of `seconds` in which activations are made again."""
        return sum(self.events[i].seconds for i in self.again)

    @cached_property
    def model_flops(self) -> int:
        """FLOPs that the mathematics asks for: `flops` without what is made again.

        Fused attention makes its scores a second time in its backward pass: one product of its five.
        """
        hidden = sum(e.flops // 5 for e in self.events if e.name.endswith("attention_backward"))
        return self.flops - hidden - sum(self.events[i].flops for i in self.again)

    @cached_property
    def flops(self) -> int:
        """Floating point operations that it executes."""
        return sum(event.flops for event in self.events)

    @cached_property
    def messages(self) -> Counter[tuple[str, int]]:
        """How many messages of each (collective, payload in bytes) the tensor group sends."""
        return Counter((e.collective, e.payload_bytes) for e in self.events if e.kind == "collective")


@dataclass(frozen=True)
class BlockTrace:
    """A kind of block.

    name:    its class
    forward: one micro-batch
    first, later: backward passes of the first micro-batch, which makes the gradients, and of the others,
             which add to them
    saved:   bytes that the forward pass leaves alive: what autograd keeps, and the result
    result:  bytes of the activations it hands on, also those of the gradient that comes back
    """

    name: str
    forward: Pass
    first: Pass
    later: Pass
    saved: int
    result: int


@dataclass(frozen=True)
class Chunk:
    """A run of blocks on one stage.

    blocks:  indices in the model; traces: the kind of each
    weights: parameters on a rank, block by block; a tied one with the first block of the chunk that has it
    sends:   bytes of activations that go to the next chunk (0 after the last)
    receives: bytes that come from the chunk before (0 for the first)
    """

    blocks: range
    traces: tuple[BlockTrace, ...]
    weights: tuple[tuple[Weight, ...], ...]
    sends: int
    receives: int

    def numel(self) -> int:
        """Parameters on a rank."""
        return sum(weight.numel for block in self.weights for weight in block)

    def block_numel(self, at: int) -> int:
        """Parameters on a rank of the block at position `at` of the chunk."""
        return sum(weight.numel for weight in self.weights[at])


@dataclass(frozen=True)
class Tie:
    """A parameter that several chunks hold: its size on a rank, and the chunks; its gradients are summed."""

    name: str
    numel: int
    chunks: tuple[int, ...]


@dataclass(frozen=True)
class Program:
    """Everything that a replay needs to know of a model under a split.

    name:       the preset
    rows, seq_len: of one micro-batch
    chunks:     in the order of the model; chunk c runs on stage c % pipeline
    parameters: of the whole model, tied ones once
    layers:     how many of its blocks are layers
    """

    name: str
    split: Split
    rows: int
    seq_len: int
    attention: str
    chunks: tuple[Chunk, ...]
    ties: tuple[Tie, ...]
    parameters: int
    layers: int

    def of_stage(self, stage: int) -> list[Chunk]:
        """The chunks of a stage, first to last."""
        return list(self.chunks[stage :: self.split.pipeline])

    def numel(self, stage: int) -> int:
        """Parameters on a rank of a stage; one that two of its chunks share counts once."""
        shared = sum(
            tie.numel * (here - 1)
            for tie in self.ties
            if (here := sum(chunk % self.split.pipeline == stage for chunk in tie.chunks)) > 1
        )
        return sum(chunk.numel() for chunk in self.of_stage(stage)) - shared

    @property
    def kinds(self) -> list[BlockTrace]:
        """The different kinds of blocks, in order of appearance."""
        found = {id(trace): trace for chunk in self.chunks for trace in chunk.traces}
        return list(found.values())
