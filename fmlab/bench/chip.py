"""This machine's own roofline: matrix products by precision, memory, and what ranks send each other."""

import time
from collections.abc import Iterator

import psutil

from fmlab.bench import Result
from fmlab.chips import Chip, chip
from fmlab.meter import read_bandwidth
from fmlab.meter.machine import largest_cache, measure_chip
from fmlab.ranks import Ranks

DTYPES = ("fp32", "bf16", "fp16")
PAYLOAD = 64 * 2**20  # bytes of the all-reduce
BESIDE = ("h100", "tpu-v5p", "trn2")  # whose ridges are printed for comparison


def run(quick: bool) -> Iterator[Result]:
    """Ceilings of this machine, and where they lie beside published ones."""
    links = {n: all_reduce_bandwidth(n, 3 if quick else 10) for n in (2, 4)}
    here = this_machine(quick, links[2])
    for dtype in here.dtypes:
        yield Result(f"chip: {dtype} matrix product", here.peak_flops(dtype) / 1e9, "GFLOP/s")
    yield Result("chip: read from memory", here.memory_bandwidth / 1e9, "GB/s")
    yield Result("chip: read 1 MiB again and again", read_bandwidth(2**20) / 1e9, "GB/s", detail=_cache())
    yield Result("chip: memory", psutil.virtual_memory().total / 2**30, "GiB")
    for n, bandwidth in links.items():
        detail = f"all-reduce of {PAYLOAD >> 20} MiB by gloo: 2(n-1)/n of it sent by each rank"
        yield Result(f"chip: one of {n} ranks sends", bandwidth / 1e9, "GB/s", detail=detail)
    for dtype in ("fp32", "bf16"):
        yield Result(f"chip: ridge in {dtype}", here.roofline(dtype).ridge, "FLOP/B")
    for name in BESIDE:
        detail = f"{chip(name).title}, from its published figures"
        yield Result(
            f"chip: ridge of {name} in bf16",
            chip(name).roofline("bf16").ridge,
            "FLOP/B",
            "",
            "quoted",
            detail,
        )


def this_machine(quick: bool = False, link_bandwidth: float | None = None) -> Chip:
    """This machine as a chip, measured with the threads that torch uses now.

    link_bandwidth: bytes a second that a rank sends; None leaves it out (see `all_reduce_bandwidth`).
    """
    size, repeats = (1024, 3) if quick else (2048, 10)
    return measure_chip("this machine", DTYPES, size, repeats, link_bandwidth)


def all_reduce_bandwidth(world_size: int, repeats: int = 5) -> float:
    """Bytes a second that each of so many ranks on this machine sends in an all-reduce of 64 MiB, at best.

    A ring sends 2(n-1)/n of the payload from each rank. The ranks share the cores, so more ranks than cores
    measure waiting too.
    """
    with Ranks(world_size) as ranks:
        seconds = max(ranks.run(_all_reduce_seconds, PAYLOAD, repeats))
    return 2 * (world_size - 1) / world_size * PAYLOAD / seconds


def _all_reduce_seconds(nbytes: int, repeats: int) -> float:
    import torch
    import torch.distributed as dist

    tensor = torch.ones(nbytes // 4)
    times = []
    for _ in range(repeats + 1):  # the first one sets up the connections
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(tensor)
        times.append(time.perf_counter() - start)
    return min(times[1:])


def _cache() -> str:
    size = largest_cache()
    return "" if size is None else f"from a cache; the largest has {size / 2**20:g} MiB"
