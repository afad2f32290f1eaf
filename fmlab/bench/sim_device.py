"""How true a simulated chip is, and what it costs: modelled against measured step times on this CPU.

The CPU is described as a chip by its own measured roofline (`fmlab bench chip`), the step is charged to that
chip, and the same step is timed. Nothing is fitted: the ratios say what a roofline leaves out (kernels below
the rate of a large matrix product, caches, the time to issue an operator). Where there is a GPU of a kind
that `fmlab.chips` knows, a GPT-2 step is timed on it too, beside its published peak and its measured rate.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fmlab import Ranks
from fmlab.bench import Result
from fmlab.bench.peak import _high_water_mb
from fmlab.chips import Chip, chips
from fmlab.meter.machine import measure_chip
from fmlab.models import GPT, UNet
from fmlab.sim import simulated_mode

Step = Callable[[], None]


def run(quick: bool) -> Iterator[Result]:
    """Accuracy of the model on this CPU, time of an operator on the simulated device, and a large dry run."""
    chip = measure_chip(size=1024, repeats=3 if quick else 10)
    for name, make in STEPS.items():
        yield _accuracy(name, make(), chip, repeats=3 if quick else 9)
    yield from _on_a_gpu(3 if quick else 20)
    with Ranks(1) as aside:  # the device is made in a process of its own
        bare, simulated = aside.run(_operator_seconds)[0]
        yield Result(
            "sim-device: an operator on the device, with its accounting",
            (simulated - bare) * 1e6,
            "us",
            "<= 50",
            detail=f"64 x 64 add: {simulated * 1e6:.1f} us of processor time, {bare * 1e6:.1f} us on the CPU",
        )
    with Ranks(1) as aside:
        seconds, busy, memory, peak, modelled = aside.run(_dry_step, "gpt3-175b", timeout=120)[0]
        detail = (
            f"forward, backward, AdamW, all in bf16 on one A100: modelled peak {peak / 2**30:.0f} GiB; "
            f"{busy:.1f} s of processor time"
        )
        yield Result("sim-device: dry run of GPT-3 175B", seconds, "s", "<= 10", detail=detail)
        yield Result(
            "sim-device: memory that it takes", memory, "MB", "<= 500", detail="of its whole process"
        )
        yield Result(
            "sim-device: its step", modelled, "s", kind="modelled", detail="published peak, 2,048 tokens"
        )


def _accuracy(name: str, step: Step, chip: Chip, repeats: int) -> Result:
    """The ratio of modelled to measured time of a step."""
    step()
    step()
    with simulated_mode(chip) as here:
        step()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    measured = statistics.median(times)
    spread = f"{min(times) * 1e3:.1f}..{max(times) * 1e3:.1f} ms over {repeats}"
    detail = f"{here.seconds * 1e3:.1f} ms modelled, {measured * 1e3:.1f} ms measured ({spread})"
    what = f"sim-device: {name}, modelled over measured step"
    return Result(what, here.seconds / measured, "x", kind="modelled", detail=detail)


# --- the steps ------------------------------------------------------------------------------------


def _gpt(
    batch: int, length: int, preset: str, device: str = "cpu", precision: str = "fp32", **shape: Any
) -> Step:
    torch.manual_seed(0)
    with torch.device(device):
        model = GPT.from_preset(preset, **shape)
        ids = torch.randint(0, model.config.vocab_size, (batch, length))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=precision == "bf16"):
            loss = model(ids, labels=ids).loss_sum / ids.numel()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _unet() -> Step:
    torch.manual_seed(0)
    model = UNet.from_preset("sd-1.5", channels=(64, 128, 128, 128))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    sample, text, timestep = torch.randn(1, 4, 32, 32), torch.randn(1, 77, 768), torch.tensor([500])

    def step() -> None:
        model(sample, timestep, text).sample.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


STEPS: dict[str, Callable[[], Step]] = {
    "gpt2-tiny, 16 x 128": lambda: _gpt(16, 128, "gpt2-tiny"),
    "GPT-2 of 3 layers, 2 x 256": lambda: _gpt(2, 256, "gpt2", num_layers=3),
    "UNet of 1.5's shape, 64 to 128 channels": _unet,
}


# --- a GPU ------------------------------------------------------------------------------------------


def _on_a_gpu(repeats: int) -> Iterator[Result]:
    """A GPT-2 124M step in bf16, 8 x 1024: nothing where there is no GPU of a known kind."""
    name = known_chip(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    if name is None:
        return
    step = _gpt(8, 1024, "gpt2", "cuda", "bf16")
    for _ in range(3):
        step()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    measured = statistics.median(times)
    for achievable in (False, True):
        with Ranks(1) as aside:
            modelled = aside.run(_dry_gpt2, name, achievable, timeout=120)[0]
        detail = f"{modelled * 1e3:.1f} ms modelled, {measured * 1e3:.1f} ms measured on {name}"
        what = "its measured matrix rate" if achievable else "its published peak"
        name_of = f"sim-device: GPT-2 124M in bf16, modelled with {what} over measured step"
        yield Result(name_of, modelled / measured, "x", kind="modelled", detail=detail)


def known_chip(device_name: str) -> str | None:
    """The chip of fmlab.chips that a GPU's name speaks of: "h200" for "NVIDIA H200"; None for another."""
    said = device_name.upper()
    fits = [name for name in chips() if all(part.upper() in said for part in name.split("-"))]
    return max(fits, key=len, default=None)


def _dry_gpt2(name: str, achievable: bool) -> float:
    from fmlab.sim import simulate

    chip = simulate(name, dry=True, unlimited=True, achievable=achievable)[0]
    step = _gpt(8, 1024, "gpt2", "sim", "bf16")
    step()
    chip.reset()
    step()
    return chip.seconds


# --- costs of simulating --------------------------------------------------------------------------


def _operator_seconds() -> tuple[float, float]:
    """Processor seconds of an operator on the CPU, and on the simulated device."""
    from fmlab.sim import simulate

    simulate("h100")
    found = []
    for device in ("cpu", "sim"):
        a, b = torch.ones(64, 64, device=device), torch.ones(64, 64, device=device)

        times = []
        for _ in range(5):
            start = time.process_time()
            for _ in range(2000):
                torch.add(a, b)
            times.append((time.process_time() - start) / 2000)
        found.append(min(times))
    return found[0], found[1]


def _dry_step(preset: str) -> tuple[float, float, float, int, float]:
    """(seconds, processor seconds, MB of this process at its peak, modelled peak bytes, modelled seconds)."""
    from fmlab.sim import simulate

    start, busy = time.perf_counter(), time.process_time()
    chip = simulate("a100-80gb", dry=True, unlimited=True)[0]
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("sim"):
        model = GPT.from_preset(preset)
    torch.set_default_dtype(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.zeros(1, 2048, dtype=torch.long, device="sim")
    chip.reset()
    model(ids, labels=ids).loss_sum.backward()
    optimizer.step()
    took = time.perf_counter() - start, time.process_time() - busy
    return *took, _high_water_mb(), chip.memory.peak, chip.seconds
