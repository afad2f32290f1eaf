"""One simulated chip: its figures, its memory, its clock, and what was charged to it so far."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from fmlab.chips import Chip, Roofline
from fmlab.sim.charge import Cost, cost_of
from fmlab.sim.clock import Clock, StreamState
from fmlab.sim.event import Event, Kind, Phase
from fmlab.sim.fuse import Graph, Kernel
from fmlab.sim.memory import Memory, block_of
from fmlab.sim.plan import Plan
from fmlab.sim.where import WHERE

Execution = Literal["eager", "compiled"]
_LONGEST_GRAPH = 100_000  # operators noted before they are run in any case


@dataclass(frozen=True)
class Settings:
    """How a chip is simulated; see `fmlab.sim.simulate` for what each means."""

    execution: Execution
    achievable: bool = False
    launch_overhead: float = 0.0
    compile_seconds: float = 0.0
    host_bandwidth: float | None = None
    assumed_flops: Mapping[str, float] = field(default_factory=dict)
    dry: bool = False


@dataclass
class Totals:
    """What a chip did since it was made or since `reset`: operators (kernels, when compiled), FLOPs, bytes of
    its memory traffic, modelled seconds of its operations by what limited them, messages, host reads, graphs
    compiled."""

    operators: int = 0
    kernels: int = 0
    flops: int = 0
    bytes: int = 0
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    host_reads: Counter[str] = field(default_factory=Counter)
    messages: Counter[str] = field(default_factory=Counter)
    compiles: int = 0


class Simulated:
    """A simulated chip under a device index: `device` is torch.device("sim", index) where torch has one.

    chip: its figures; settings: how it is simulated; memory: what lies in it; clock: modelled time; totals:
    what was charged. `seconds` is the modelled time at which all work given so far is done.
    """

    def __init__(self, chip: Chip, index: int, settings: Settings, capacity: int | None) -> None:
        self.chip, self.index, self.settings = chip, index, settings
        self.device: torch.device = torch.device("cpu")  # until the device is registered
        self.memory = Memory(f"sim:{index} ({chip.title})", capacity)
        self.clock = Clock()
        self.totals = Totals()
        self.trace: list[Event] | None = None
        self.network: Any = None  # prices messages; see fmlab.sim.network
        self.under_way: dict[int, Any] = {}  # block -> message into it that no stream waits for yet
        self.compiled = settings.execution == "compiled"
        self.forbid_host_reads = False
        self.bandwidth = chip.memory_bandwidth
        self._rooflines: dict[str, Roofline] = {}
        self._graph = Graph()
        self._known_graphs: set[int] = set()

    def __repr__(self) -> str:
        return f"Simulated({self.memory.name}, {self.settings.execution}{', dry' * self.settings.dry})"

    # region figures
    def roofline(self, dtype: str) -> Roofline:
        """The roofline for operands of a dtype. Raises ValueError where no source gives a rate for it and
        none is assumed."""
        roofline = self._rooflines.get(dtype)
        if roofline is None:
            roofline = self._rooflines[dtype] = self._find_roofline(dtype)
        return roofline

    def _find_roofline(self, dtype: str) -> Roofline:
        from fmlab.chips import dtype_name as short

        assumed = self.settings.assumed_flops
        for name in (dtype, short(dtype)):
            if name in assumed:
                return Roofline(assumed[name], self.bandwidth)
        try:
            return self.chip.roofline(dtype, achievable=self.settings.achievable)
        except ValueError as error:
            has = next((name for name in ("bf16", "fp16", "fp32") if name in self.chip.dtypes), "")
            has = has and f" (precision={has!r})"
            raise ValueError(
                f"{error}. A matrix product in {dtype} cannot be timed on {self.chip.name}: compute in a "
                f"dtype that it has{has}, or state an assumption, "
                f"simulate({self.chip.name!r}, assumed_flops={{{short(dtype)!r}: ...}}) in FLOP/s"
            ) from None

    # endregion

    # region charge
    def charge(
        self, plan: Plan, args: Sequence[Any], kwargs: dict[str, Any], inputs: list[Tensor], outputs: Any
    ) -> None:
        """Charge an operator that ran: eagerly at once, compiled when its graph is closed."""
        if plan.free:
            return
        if self.under_way:
            self._await_messages(inputs)
        cost = cost_of(plan, args, kwargs, inputs, outputs)
        totals = self.totals
        totals.operators += 1
        stream = self.clock.current
        module, phase = WHERE.here()
        if self.compiled:
            info = (module, phase, self.memory.live)
            self._graph.add(plan, cost, args, kwargs, inputs, outputs, stream.number, info)
            if len(self._graph.items) > _LONGEST_GRAPH:
                self.flush()
            return
        shape = _shape_of(outputs if plan.returns else inputs)
        overhead = self.settings.launch_overhead
        self._execute(plan.name, cost, stream, module, phase, shape, self.memory.live, overhead)

    def _await_messages(self, inputs: list[Tensor]) -> None:
        for tensor in inputs:
            block = block_of(tensor)
            arrival = None if block is None else self.under_way.pop(block.serial, None)
            if arrival is not None:
                arrival.wait()

    def _execute(
        self,
        name: str,
        cost: Cost,
        stream: StreamState,
        module: str,
        phase: Phase,
        shape: tuple[int, ...],
        live: int,
        overhead: float,
    ) -> None:
        totals = self.totals
        moved = cost.read + cost.written
        seconds, bound = moved / self.bandwidth, "memory" if moved else ""
        if cost.flops:
            computing = cost.flops / self.roofline(cost.dtype).peak
            if computing >= seconds:
                seconds, bound = computing, "compute"
        idle_until = stream.ready
        start = self.clock.run(stream, seconds, overhead)
        if overhead and start > idle_until and start == self.clock.host and overhead > seconds:
            bound = "overhead"  # the device had nothing to do while the host was still issuing
        totals.kernels += 1
        totals.flops += cost.flops
        totals.bytes += moved
        if seconds:
            totals.seconds[bound] += seconds
        if self.trace is not None:
            self._record(
                "compute", name, start, seconds, stream, module, phase, shape, live, bound,
                flops=cost.flops, bytes=moved, dtype=cost.dtype,
            )  # fmt: skip

    def _record(
        self,
        kind: Kind,
        name: str,
        start: float,
        seconds: float,
        stream: StreamState,
        module: str,
        phase: Phase,
        shape: tuple[int, ...],
        live: int,
        bound: str,
        **more: Any,
    ) -> int:
        trace = self.trace
        assert trace is not None
        trace.append(
            Event(
                kind, name, seconds, stream=stream.number, live_bytes_after=live, module=module, shape=shape,
                start=start, device=self.index, phase=phase, bound=bound, after=stream.take_after(), **more,
            )
        )  # fmt: skip
        stream.last = len(trace) - 1
        return stream.last

    # endregion

    # region copies and host reads
    def copy(self, name: str, size: int, shape: tuple[int, ...], to_host: bool, wait: bool = True) -> None:
        """A transfer between this chip and its host, or another chip's memory by way of it.

        It takes size / host_bandwidth, or no time where none was given. The host waits for what it reads.
        """
        self._copy(name, size, shape)
        if to_host and wait:
            self.host_read(name, transfer=False)

    def _copy(self, name: str, size: int, shape: tuple[int, ...]) -> None:
        bandwidth = self.settings.host_bandwidth
        seconds = size / bandwidth if bandwidth else 0.0
        stream, (module, phase) = self.clock.current, WHERE.here()
        self.between(lambda: self._move(name, seconds, stream, module, phase, size, shape))

    def _move(
        self,
        name: str,
        seconds: float,
        stream: StreamState,
        module: str,
        phase: Phase,
        size: int,
        shape: tuple[int, ...],
    ) -> None:
        start = self.clock.run(stream, seconds)
        self.totals.seconds["link"] += seconds
        if self.trace is not None:
            bound = "link" if seconds else ""
            self._record(
                "copy",
                name,
                start,
                seconds,
                stream,
                module,
                phase,
                shape,
                self.memory.live,
                bound,
                bytes=size,
            )

    def host_read(self, name: str, transfer: bool = True) -> None:
        """The host needs a number from the device: it waits for all work that the stream was given.

        Raises RuntimeError inside a step that was compiled as one graph.
        """
        if self.forbid_host_reads:
            raise RuntimeError(
                f"{name}: the host reads a number inside a step that is compiled as one graph "
                "(fullgraph=True); keep the decision on the device (torch.where), or read after the step"
            )
        self.totals.host_reads[name] += 1
        if transfer:
            self._copy(name, 0, ())
        self.flush()
        self.clock.synchronize(self.clock.current)

    # endregion

    # region graphs
    def between(self, call: Callable[[], None]) -> None:
        """Do something on the clock after all operators issued so far: now, or when their graph is closed."""
        if self.compiled and self._graph.items:
            self._graph.mark(call)
        else:
            call()

    def flush(self) -> None:
        """Close the graph and charge its kernels (compiled execution only)."""
        if not self._graph.items:
            return
        self._compile(self._graph.signature())
        for item in self._graph.close():
            if not isinstance(item, Kernel):
                item()
                continue
            last = item.nodes[-1]
            module, phase, live = last.info
            stream = self.clock.stream(last.stream)
            self._execute(item.name, item.cost, stream, module, phase, last.shape, live, 0.0)

    def _compile(self, signature: int) -> None:
        if signature in self._known_graphs:
            return
        self._known_graphs.add(signature)
        self.totals.compiles += 1
        seconds = self.settings.compile_seconds
        if not seconds:
            return
        self.clock.host += seconds
        self.totals.seconds["compile"] += seconds
        if self.trace is not None:
            stream, start = self.clock.streams[0], self.clock.host - seconds
            self._record(
                "compute", "compile", start, seconds, stream, "", "", (), self.memory.live, "overhead"
            )

    def forget_programs(self) -> None:
        """Every graph is new again, as in a process that has just started."""
        self.flush()
        self._known_graphs.clear()

    # endregion

    # region time
    def synchronize(self) -> None:
        """The host waits for all streams."""
        self.flush()
        self.clock.synchronize()

    @property
    def seconds(self) -> float:
        """Modelled seconds after which all work given so far is done."""
        self.flush()
        return self.clock.now

    def reset(self) -> None:
        """Clock at zero, totals empty, and the peak of memory counted anew; tensors stay."""
        self.flush()
        self.clock = Clock()
        self.totals = Totals()
        self.memory.reset_peak()

    # endregion


def _shape_of(value: Any) -> tuple[int, ...]:
    if isinstance(value, Tensor):
        return tuple(value.shape)
    if isinstance(value, list | tuple):
        return next((_shape_of(item) for item in value if isinstance(item, Tensor | list | tuple)), ())
    return ()
