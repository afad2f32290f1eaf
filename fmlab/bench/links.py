"""The network between the hosts of a job: each link measured, slow ones named, an all-reduce predicted.

    torchrun --nnodes 4 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m fmlab.bench.links

One rank a host, so that each link is alone. --bytes: of a message (default 4 MiB).
"""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from fmlab.backends import get_backend
from fmlab.chips.topology import switch
from fmlab.collectives import all_reduce, cost
from fmlab.collectives.pairs import Pair, measure_pairs, slow_ranks
from fmlab.train.launch import world_of


def report(hosts: Sequence[str], rates: Mapping[Pair, float], size: int, measured: float) -> str:
    """Lines: each link, the slow hosts, and an all-reduce of `size` bytes as predicted and as measured."""
    lines = [
        f"{hosts[a]:>12} - {hosts[b]:<16} {rate / 1e6:10.2f} MB/s each way" for (a, b), rate in rates.items()
    ]
    slow = slow_ranks(rates) if len(hosts) > 2 else []
    for rank in slow:
        best = max(rate for pair, rate in rates.items() if rank in pair)
        lines.append(f"slow: {hosts[rank]} (rank {rank}), at most {best / 1e6:.2f} MB/s")
    lines += [] if slow else ["no host's links are slower than half of the others'"]
    predicted = cost.seconds("all_reduce", size, switch(len(hosts), min(rates.values()), 0.0), "ring")
    lines.append(
        f"all-reduce of {size:,} bytes, ring: predicted {predicted:.3f} s from the slowest link (modelled), "
        f"took {measured:.3f} s (measured)"
    )
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Measure, on every rank; the first prints."""
    parser = argparse.ArgumentParser("fmlab.bench.links", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--bytes", type=int, default=4 << 20, help="of a message (4 MiB)")
    size: int = parser.parse_args(argv).bytes
    if size < 4:
        print(f"fmlab: --bytes {size}: at least 4", file=sys.stderr)
        return 2
    with world_of(get_backend("cpu")) as world:
        if world.size < 2:
            print(
                "fmlab: links join at least 2 ranks: start this with torchrun, one rank a host",
                file=sys.stderr,
            )
            return 2
        rates = measure_pairs(size)
        tensor = torch.zeros(size // 4)
        all_reduce(tensor, algorithm="ring")  # opens the connections
        dist.barrier()
        start = time.perf_counter()
        all_reduce(tensor, algorithm="ring")
        took = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        if world.is_first:
            places = world.roll.places if world.roll else []
            hosts = [place.host for place in places] or [f"rank {rank}" for rank in range(world.size)]
            print(report(hosts, rates, size, float(took)), flush=True)
        dist.barrier()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
