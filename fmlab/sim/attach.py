"""`simulate`: put simulated chips behind device indices of this process."""

from collections.abc import Mapping
from typing import Any

import torch

from fmlab.chips import Chip, Topology, chip
from fmlab.collectives.machines import Machine
from fmlab.sim import attached
from fmlab.sim.network import Network, Price
from fmlab.sim.simulated import Execution, Settings, Simulated


def simulate(
    name: str | Chip,
    count: int = 1,
    *,
    first: int = 0,
    execution: Execution | None = None,
    achievable: bool = False,
    launch_overhead: float = 0.0,
    compile_seconds: float = 0.0,
    memory_bytes: int | None = None,
    unlimited: bool = False,
    dry: bool = False,
    host_bandwidth: float | None = None,
    assumed_flops: Mapping[str, float] | None = None,
    network: Topology | Machine | Price | None = None,
) -> list[Simulated]:
    """Attach `count` chips as the devices sim:first, sim:first+1, …; what was there before is replaced.

    name:            of a chip ("h100", "trn2"; see fmlab.chips.chips()), or a Chip of your own
    execution:       "eager": each operator is a kernel; "compiled": chains of pointwise operators are
                     one (see fmlab.sim.fuse); by default as the chip's software works
    achievable:      time matrix products by the rate that a named source measured, not by the published peak
    launch_overhead: seconds the host takes to issue an operator (eager only); none unless given, since no
                     source gives it for all chips
    compile_seconds: seconds a compiler takes for each new graph (compiled only): an assumption of yours
    memory_bytes:    capacity of the memory, instead of the chip's own
    unlimited:       let the memory grow without end, to see what would be needed
    dry:             tensors have shapes and no numbers, so that any size fits the host; numbers that the host
                     reads are 1
    host_bandwidth:  bytes a second between host and chip; without it such copies take no modelled time
    assumed_flops:   dtype -> FLOP/s where no source gives a rate ("fp32" on a TPU): an assumption of yours
    network:         how messages between ranks are priced (see fmlab.sim.network)

    Raises ValueError for an unknown chip (lists all) and for settings that would do nothing, RuntimeError
    where the process cannot have the device "sim" (see fmlab.sim.device).
    """
    from fmlab.sim import device

    if count < 1 or first < 0:
        raise ValueError(f"count={count}, first={first}: attach at least one chip, at index 0 or above")
    settings: dict[str, Any] = dict(
        execution=execution,
        achievable=achievable,
        launch_overhead=launch_overhead,
        compile_seconds=compile_seconds,
        memory_bytes=memory_bytes,
        unlimited=unlimited,
        dry=dry,
        host_bandwidth=host_bandwidth,
        assumed_flops=assumed_flops,
        network=network,
    )
    made = [make(name, index, **settings) for index in range(first, first + count)]
    device.register()
    device.join_groups()
    for one in made:
        one.device = torch.device(device.NAME, one.index)
        attached.CHIPS[one.index] = one
    return made


def make(
    name: str | Chip,
    index: int,
    *,
    execution: Execution | None = None,
    achievable: bool = False,
    launch_overhead: float = 0.0,
    compile_seconds: float = 0.0,
    memory_bytes: int | None = None,
    unlimited: bool = False,
    dry: bool = False,
    host_bandwidth: float | None = None,
    assumed_flops: Mapping[str, float] | None = None,
    network: Topology | Machine | Price | None = None,
) -> Simulated:
    """A simulated chip that is behind no device; see `simulate` for the settings."""
    what = name if isinstance(name, Chip) else chip(name)
    execution = execution or ("compiled" if what.compiler == "static-shape" else "eager")
    _check(execution, launch_overhead, compile_seconds, memory_bytes, unlimited, host_bandwidth)
    if achievable and not any(what.achievable_flops(dtype) for dtype in what.dtypes):
        raise ValueError(f"nobody's measured rates of {what.name} are known; use achievable=False")
    assumed = dict(assumed_flops or {})
    if wrong := {dtype: rate for dtype, rate in assumed.items() if not rate > 0}:
        raise ValueError(f"assumed_flops={wrong}: a rate is in FLOP/s, above 0")
    if not (network is None or isinstance(network, Topology | Machine) or callable(network)):
        raise ValueError(
            f"network={network!r}: give a Topology, a measured Machine or a function; "
            "fmlab.chips.cluster(host, hosts) makes the topology of a host's chips"
        )
    settings = Settings(execution, achievable, launch_overhead, compile_seconds, host_bandwidth, assumed, dry)
    capacity = None if unlimited else memory_bytes or what.memory_bytes
    made = Simulated(what, index, settings, capacity)
    made.network = Network(what, network)
    return made


def _check(
    execution: str,
    launch_overhead: float,
    compile_seconds: float,
    memory_bytes: int | None,
    unlimited: bool,
    host_bandwidth: float | None,
) -> None:
    if execution not in ("eager", "compiled"):
        raise ValueError(f"execution={execution!r}: legal are 'eager' and 'compiled'")
    if launch_overhead < 0 or compile_seconds < 0:
        raise ValueError("launch_overhead and compile_seconds are seconds, 0 or more")
    if launch_overhead and execution == "compiled":
        raise ValueError(
            "launch_overhead is a cost of eager execution: a compiled graph is issued as a whole; leave it "
            "out, or set execution='eager'"
        )
    if compile_seconds and execution == "eager":
        raise ValueError("compile_seconds is a cost of execution='compiled'; nothing is compiled eagerly")
    if memory_bytes is not None and (memory_bytes < 1 or unlimited):
        raise ValueError("memory_bytes is a number of bytes above 0, and means nothing with unlimited=True")
    if host_bandwidth is not None and not host_bandwidth > 0:
        raise ValueError(f"host_bandwidth={host_bandwidth}: bytes a second, above 0")
