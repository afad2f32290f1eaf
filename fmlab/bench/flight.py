"""What watching costs a step: flight recorder, watchdog and slow-rank looks, on against off; and comparing
replicas."""

import statistics
import tempfile
from typing import Any

from fmlab.bench import Ratio, Result
from fmlab.ranks import Ranks, namespace

_STEPS = 20  # a look of the slow-rank watch comes every 10


def run(quick: bool) -> list[Result]:
    """A data-parallel step of gpt2-tiny on two ranks, 4 rows of 64 tokens each."""
    pairs = 6 if quick else 20
    on: list[float] = []
    off: list[float] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        Ranks(2) as watched,
        Ranks(2, env={"TORCH_FR_BUFFER_SIZE": "0"}) as bare,
    ):
        watched.run(_prepare, folder)
        bare.run(_prepare, None)
        for pair in range(pairs + 1):
            order = [(watched, on), (bare, off)]
            for pool, found in order if pair % 2 else reversed(order):
                found.append(max(pool.run(_steps)))
        compared = [max(watched.run(_compare)) for _ in range(pairs)]
        watched.run(_close)
    ratio = Ratio.of(off[1:], on[1:])
    return [
        Result("flight: step watched / not", ratio.median, "x", "<= 1.02", detail=str(ratio)),
        Result(
            "flight: comparing replicas once / step",
            statistics.median(compared) / ratio.seconds_a * _STEPS,
            "x",
            detail=f"{statistics.median(compared) * 1e3:.1f} ms: weights and AdamW's moments, 16 MB",
        ),
    ]


def _prepare(folder: str | None) -> None:
    """The engine; with a folder also all that watches."""
    import torch
    import torch.distributed as dist

    from fmlab.backends import get_backend
    from fmlab.models import GPT
    from fmlab.objectives import CausalLM
    from fmlab.parallel import Layout, parallelize
    from fmlab.train.optim import OPTIMIZERS
    from fmlab.train.stragglers import StragglerWatch
    from fmlab.train.watchdog import Watchdog

    torch.manual_seed(0)
    model = GPT.from_preset("gpt2-tiny")
    optimizer = OPTIMIZERS["adamw"](1e-3, (0.9, 0.95), 0.1)
    state: dict[str, Any] = {
        "engine": parallelize(
            model, Layout(data=2), CausalLM(), optimizer, engine="fmlab", backend=get_backend("cpu")
        ),
        "watch": None,
    }
    ids = torch.randint(0, 1000, (4, 64))
    state["batch"] = {"input_ids": ids, "labels": ids}
    if folder is not None:
        store = dist.FileStore(f"{folder}/store", 2)
        dog = Watchdog(60.0, store, dist.get_rank(), 2, end=lambda _: None)
        state["dog"] = dog.__enter__()
        state["watch"] = StragglerWatch(dog.flight, 0.25, dist.group.WORLD)
    namespace()["bench_flight"] = state


def _steps() -> float:
    import time

    state = namespace()["bench_flight"]
    start = time.perf_counter()
    for _ in range(_STEPS):
        state["engine"].step([state["batch"]])
        if state["watch"] is not None:
            state["watch"].step()
    return time.perf_counter() - start


def _compare() -> float:
    import time

    from fmlab.train.replicas import differences

    start = time.perf_counter()
    differences(namespace()["bench_flight"]["engine"])
    return time.perf_counter() - start


def _close() -> None:
    namespace()["bench_flight"]["dog"].__exit__(None, None, None)
