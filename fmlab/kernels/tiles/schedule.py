"""When each instruction runs: engines work at the same time, each through its own instructions in order.

An instruction starts when its engine is free and what it waits for is ready. What another instruction reads
is ready a latency after its engine is free again (the pipeline has to drain): without dependencies engines
run back to back, with them they do not.

Transfers wait in two queues, loads and stores, each in order. One that may start takes the DMA engines that
are free first; its bytes begin to move 1.3 us later, while earlier transfers still move theirs.
"""

from collections.abc import Sequence

from fmlab.kernels.tiles.core import Core
from fmlab.kernels.tiles.machine import ENGINES, Instruction


class Clock:
    """Walks a program in the order of time."""

    def __init__(self, core: Core, program: Sequence[Instruction]) -> None:
        self.core, self.program = core, program
        self.ready: list[float | None] = [None] * len(program)
        self.engine_free = dict.fromkeys(ENGINES, 0.0)
        self.port_free: dict[str, float] = {}
        self.dma_free = [0.0] * core.dma_engines
        self.dma_busy = 0.0  # seconds, over all DMA engines

    def run(self) -> None:
        """Give every instruction its start and end. The next one is always the one that can start first."""
        queues = {name: [one for one in self.program if one.engine == name] for name in ENGINES}
        heads = dict.fromkeys(ENGINES, 0)
        for _ in self.program:
            starts = {}
            for name, queue in queues.items():
                at = self._earliest(queue[heads[name]]) if heads[name] < len(queue) else None
                if at is not None:
                    starts[name] = at
            name = min(starts, key=lambda one: starts[one])
            self._place(queues[name][heads[name]], starts[name])
            heads[name] += 1

    def _earliest(self, one: Instruction) -> float | None:
        """When it can start; None while what it waits for has no time yet."""
        at = self.engine_free[one.engine]
        for number in one.waits_for:
            ready = self.ready[number]
            if ready is None:
                return None
            at = max(at, ready)
        return max([at, *(self.port_free.get(port, 0.0) for port in one.ports)])

    def _place(self, one: Instruction, start: float) -> None:
        if one.parts:
            self._place_transfer(one, start)
            return
        one.start, one.end = start, start + one.cycles / self.core.clock(one.engine)
        self.engine_free[one.engine] = one.end
        self.port_free.update(dict.fromkeys(one.ports, one.end))
        key = "tensor latency" if one.engine == "tensor" else "result latency"
        self.ready[one.number] = one.end + self.core.figures[key].value / self.core.clock(one.engine)

    def _place_transfer(self, one: Instruction, start: float) -> None:
        first = sorted(range(len(self.dma_free)), key=lambda engine: self.dma_free[engine])[: one.parts]
        begins = [max(start + self.core.dma_latency, self.dma_free[engine]) for engine in first]
        for engine, begin in zip(first, begins, strict=True):
            self.dma_free[engine] = begin + one.part_seconds
        self.dma_busy += one.parts * one.part_seconds
        one.start, one.end = min(begins), max(begins) + one.part_seconds
        self.engine_free[one.engine] = start
        self.ready[one.number] = one.end


def schedule(core: Core, program: Sequence[Instruction]) -> dict[str, float]:
    """Set start and end of every instruction. Returns how many seconds each engine was busy; "dma": the mean
    over the DMA engines."""
    clock = Clock(core, program)
    clock.run()
    busy = {name: 0.0 for name in ENGINES if name not in ("load", "store")}
    for one in program:
        if one.engine in busy:
            busy[one.engine] += one.end - one.start
    return {"dma": clock.dma_busy / core.dma_engines, **busy}
