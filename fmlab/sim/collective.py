"""Messages between simulated chips of different processes: carried by gloo, charged to the wires.

torch's collectives are operators too, so they arrive like any other. The raw tensors are given to the same
process group, which carries them as host tensors; the time comes from the network's model. A collective runs
on a stream of its own and starts when every rank has got there: the ranks tell one another their modelled
clocks in a message of eight bytes, so that a late rank holds up all, as it does on real chips. A send starts
when the sender has come to it; the receiver learns of that, and of the cost, when it waits.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fmlab.sim import attached
from fmlab.sim.charge import dtype_name, tensors_in
from fmlab.sim.memory import block_of
from fmlab.sim.simulated import Simulated
from fmlab.sim.tensor import SimTensor
from fmlab.sim.where import WHERE

STREAM = 1  # where messages run, beside the default stream
_CLOCK_TAG = 1 << 20  # added to the tag of a message, for the message with the sender's clock

#: torch's operator -> (kind, which argument holds the whole tensor)
_KINDS: dict[str, tuple[str, int | None]] = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "_allgather_base_": ("all_gather", 0),
    "allgather_": ("all_gather", 0),
    "allgather_coalesced_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "alltoall_base_": ("all_to_all", 1),
    "alltoall_": ("all_to_all", 1),
    "gather_": ("gather", 0),
    "scatter_": ("scatter", 1),
    "barrier": ("barrier", 0),
    "send": ("send", 0),
    "recv_": ("recv", 0),
    "recv_any_source_": ("recv", 0),
    # functional ones, whose result is the whole or the part
    "all_reduce": ("all_reduce", 0),
    "all_reduce_": ("all_reduce", 0),
    "all_reduce_coalesced": ("all_reduce", 0),
    "broadcast": ("broadcast", 0),
    "all_gather_into_tensor": ("all_gather", None),
    "all_gather_into_tensor_out": ("all_gather", None),
    "all_gather_into_tensor_coalesced": ("all_gather", None),
    "reduce_scatter_tensor": ("reduce_scatter", 0),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 0),
    "all_to_all_single": ("all_to_all", 0),
}


class Arrival:
    """When a message will be there; `wait` lets the current stream wait for it."""

    def __init__(self, chip: Simulated) -> None:
        self.chip = chip
        self.clock: Any = None
        self.before_waiting: Any = None  # what is to be done, once, before anybody can wait
        self.moment = 0.0  # filled when its turn comes on the clock, as is its position in the trace
        self.position: int | None = None

    def wait(self) -> None:
        """Let what is issued from here on start after it."""
        if self.before_waiting is not None:
            first, self.before_waiting = self.before_waiting, None
            first()
        stream = self.chip.clock.current
        self.chip.between(lambda: stream.wait(self.moment, self.position))


_under_way: set["SimWork"] = set()


class SimWork(dist._Work):
    """A message on its way: real (gloo's) and modelled.

    torch holds only the part of it that is in C++, so until somebody waits for it, it is held here.
    """

    def __init__(self, real: Any, arrival: Arrival, results: Sequence[Tensor]) -> None:
        super().__init__()
        self._real, self._arrival, self._results = real, arrival, results
        _under_way.add(self)

    def wait(self, timeout: Any = None) -> bool:
        """Until the numbers are there; the current stream waits on the modelled clock."""
        done = self._real.wait() if timeout in (None, timedelta()) else self._real.wait(timeout)
        _under_way.discard(self)
        self._arrival.wait()
        return bool(done)

    def is_completed(self) -> bool:
        return bool(self._real.is_completed())

    def get_future(self) -> torch.futures.Future:
        """Of the simulated tensors. torch waits for it in C++, unseen: on the modelled clock the first
        operator on these tensors waits."""

        def arrived(future: Any) -> list[Tensor]:
            _under_way.discard(self)
            future.value()  # raises what the message raised
            return list(self._results)

        for tensor in self._results:
            if (block := block_of(tensor.raw)) is not None:  # type: ignore[attr-defined]
                self._arrival.chip.under_way[block.serial] = self._arrival
        return self._real.get_future().then(arrived)


def is_message(op: Any) -> bool:
    """Whether an operator sends something to other ranks, or waits for it."""
    return op.namespace in ("c10d", "_c10d_functional") and (
        op._opname in _KINDS or op._opname == "wait_tensor"
    )


def run(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Carry out a collective operator of torch on simulated tensors."""
    name = op._opname
    if name == "wait_tensor":
        return _wait_tensor(op, args[0])
    sims = [t for value in args for t in tensors_in(value) if isinstance(t, SimTensor)]
    chip = attached.chip_at(sims[0].device)
    _check_numbers(chip, name)
    raw_args = tuple(_raw(value) for value in args)
    kind, whole = _KINDS[name]
    ranks = _ranks(args, name)
    arrival = Arrival(chip)
    ready = _meet(chip, kind, ranks, args, arrival)
    out = op(*raw_args, **{key: _raw(value) for key, value in kwargs.items()})
    payload = _bytes(out) if whole is None else _bytes(raw_args[whole])
    if kind == "recv":
        arrival.before_waiting = lambda: _charge(chip, kind, payload, ranks, ready(), sims[0], arrival)
    else:
        _charge(chip, kind, payload, ranks, ready(), sims[0], arrival)
    if op.namespace == "c10d":
        return _returned(out, args, arrival)
    return _wrapped(out, op, chip, arrival, args, kwargs)


# --- the modelled side ----------------------------------------------------------------------------


def _charge(
    chip: Simulated,
    kind: str,
    payload: int,
    ranks: Sequence[int],
    ready: float,
    tensor: SimTensor,
    arrival: Arrival,
) -> None:
    seconds = chip.network.seconds(kind, payload, ranks)
    module, phase = WHERE.here()
    live, shape, dtype = chip.memory.live, tuple(tensor.shape), dtype_name(tensor.dtype)
    issuer = chip.clock.current

    def send() -> None:
        stream = chip.clock.stream(STREAM)
        stream.wait(issuer.ready, issuer.last)  # its input must be there
        start = chip.clock.run(stream, seconds, 0.0, ready)
        chip.totals.messages[kind] += 1
        chip.totals.seconds["messages"] += seconds
        arrival.moment = start + seconds
        if chip.trace is not None:
            arrival.position = chip._record(
                "collective", kind, start, seconds, stream, module, phase, shape, live, "link",
                collective=kind, group=tuple(ranks), payload_bytes=payload, dtype=dtype,
            )  # fmt: skip

    chip.between(send)


def _meet(
    chip: Simulated, kind: str, ranks: Sequence[int], args: tuple[Any, ...], arrival: Arrival
) -> Callable[[], float]:
    """Tell the other ranks this one's modelled clock; gives the moment at which a message can start.

    For a collective, when the last rank has come; for a message, when its sender has.
    """
    if len(ranks) < 2 or not (dist.is_available() and dist.is_initialized()):
        return lambda: 0.0
    chip.flush()
    mine = max(chip.clock.current.ready, chip.clock.host)
    group, moment = _group(args), torch.tensor([mine], dtype=torch.float64)
    if kind in ("send", "recv"):
        if len(args) < 4:
            return lambda: mine  # from anyone: whose clock it is nobody says
        peer, tag = args[2], args[3] + _CLOCK_TAG
        # Neither waits here: two ranks may both send, or both receive, before they do the other.
        work = group.send([moment], peer, tag) if kind == "send" else group.recv([moment], peer, tag)
        arrival.clock = work, moment  # kept alive until the message is there

        def sent() -> float:
            if kind == "recv":
                work.wait()
            return max(mine, float(moment))

        return sent
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    group.allreduce([moment], options).wait()
    return lambda: max(mine, float(moment))


def _wait_tensor(op: Any, tensor: SimTensor) -> SimTensor:
    op(tensor.raw)
    block = block_of(tensor.raw)
    if block is not None and block.arrival is not None:
        block.arrival.wait()
        block.arrival = None
    return tensor


# --- arguments and results ------------------------------------------------------------------------


def _raw(value: Any) -> Any:
    if isinstance(value, SimTensor):
        return value.raw
    if isinstance(value, list | tuple):
        return type(value)(_raw(item) for item in value)
    return value


def _bytes(value: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors_in(value))


def _group(args: tuple[Any, ...]) -> Any:
    for value in args:
        if isinstance(value, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(value)
            except RuntimeError:  # the reduction, which comes as an object too
                continue
        if isinstance(value, dist.ProcessGroup):
            return value
    name = args[-1]
    return torch.distributed.distributed_c10d._resolve_process_group(name)


def _ranks(args: tuple[Any, ...], name: str) -> tuple[int, ...]:
    ranks = tuple(dist.get_process_group_ranks(_group(args)))
    if name == "send":
        return (dist.get_rank(), ranks[args[2]])
    if name == "recv_":
        return (ranks[args[2]], dist.get_rank())
    if name == "recv_any_source_":  # charged as from the nearest in number: who it is nobody says beforehand
        here = ranks.index(dist.get_rank())
        return (ranks[here - 1], ranks[here])
    return ranks


def _returned(out: Any, args: tuple[Any, ...], arrival: Arrival) -> Any:
    """The caller's own tensors, and the message as something to wait for."""
    work = out[-1] if isinstance(out, tuple) else out
    if not isinstance(work, torch.ScriptObject):
        return out
    results = [t for t in tensors_in(args[0]) if isinstance(t, SimTensor)]
    boxed = SimWork(dist._Work.unbox(work), arrival, results).boxed()
    return (args[0], boxed) if isinstance(out, tuple) else boxed


def _wrapped(
    out: Any, op: Any, chip: Simulated, arrival: Arrival, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    from fmlab.sim.dispatch import wrap

    if isinstance(out, list | tuple):
        return type(out)(_wrapped(item, op, chip, arrival, args, kwargs) for item in out)
    given = [t for value in (*args, *kwargs.values()) for t in tensors_in(value) if isinstance(t, SimTensor)]
    same = [t for t in given if t.raw is out]
    result = same[0] if same else wrap(out, chip, op)
    block = block_of(out)
    if block is not None:
        block.arrival = arrival
    return result


def _check_numbers(chip: Simulated, name: str) -> None:
    if chip.settings.dry:
        raise RuntimeError(
            f"{name}: a dry run has no numbers to send; `fmlab dry-run` replays all ranks' messages instead"
        )
