"""What real ranks cost: starting them, calling them, their memory, and the log of their collectives."""

import statistics
import time
from collections.abc import Callable

import psutil

from fmlab._ranks.forking import Server
from fmlab._ranks.log import BUFFER
from fmlab.bench import Result
from fmlab.ranks import Ranks, namespace


def run(quick: bool) -> list[Result]:
    """Times of 4 ranks on this machine, beside the goals of the pool."""
    repeats = 3 if quick else 10
    start = time.perf_counter()
    with Ranks(4) as ranks:
        started = time.perf_counter() - start
        used = sum(psutil.Process(Server.shared().process.pid).cpu_times()[:2])
        restarts = [_seconds(ranks.restart) for _ in range(repeats)]
        ranks.run(_nothing)
        calls = [_seconds(lambda: ranks.run(_nothing)) * 1e3 for _ in range(10 * repeats)]
        cells = [_seconds(lambda: ranks.run_cell("None", show=False)) * 1e3 for _ in range(10 * repeats)]
        memory = [psutil.Process(pid).memory_full_info().uss / 1e6 for pid in ranks.pids]
    return [
        Result(
            "ranks: start 4",
            started,
            "s",
            "<= 3",
            detail=f"from nothing; importing torch once takes {used:.1f} s of processor time of it",
        ),
        Result("ranks: restart 4", statistics.median(restarts), "s", "<= 0.5", detail=_spread(restarts, "s")),
        Result("ranks: empty call", statistics.median(calls), "ms", "<= 20", detail=_spread(calls, "ms")),
        Result("ranks: empty cell", statistics.median(cells), "ms", "<= 20", detail=_spread(cells, "ms")),
        Result("ranks: own memory of an idle rank", max(memory), "MB", "<= 50", detail="largest of 4"),
        *_log_cost(repeats),
    ]


def _log_cost(repeats: int) -> list[Result]:
    """One rank's all-reduce, which does no communication, with and without the flight recorder."""
    with Ranks(1) as logged, Ranks(1, env={"TORCH_FR_BUFFER_SIZE": "0"}) as bare:
        times: dict[Ranks, list[float]] = {logged: [], bare: []}
        for _ in range(4 * repeats):  # alternately, in short pieces: a busy machine disturbs some of them
            for pool, found in times.items():
                found += pool.run(_all_reduce_microseconds, 500)
        cost = min(times[logged]) - min(times[bare])
        after = [logged.run(_log_milliseconds)[0] for _ in range(repeats)]
    return [
        Result(
            "ranks: log of one collective",
            cost,
            "us",
            "<= 20",
            detail=f"all_reduce float32[4] with the recorder, {min(times[logged]):.1f} us, minus without",
        ),
        Result(
            "ranks: reading the log after a call",
            statistics.median(after),
            "ms",
            detail=f"the last {BUFFER} collectives of a rank; only after calls that had collectives",
        ),
    ]


def _nothing() -> None:
    pass


def _all_reduce_microseconds(count: int) -> float:
    import torch
    import torch.distributed as dist

    tensor = torch.ones(4)
    start = time.perf_counter()
    for _ in range(count):
        dist.all_reduce(tensor)
    return (time.perf_counter() - start) / count * 1e6


def _log_milliseconds() -> float:
    from fmlab._ranks.log import Recorder

    recorder = namespace().setdefault("bench_recorder", Recorder())
    _all_reduce_microseconds(BUFFER)
    start = time.perf_counter()
    recorder.read()
    return (time.perf_counter() - start) * 1e3


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _spread(values: list[float], unit: str) -> str:
    return f"{min(values):.2g}..{max(values):.2g} {unit} over {len(values)}"
