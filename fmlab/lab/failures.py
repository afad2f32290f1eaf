"""What chapter 2.10 runs: training, broken on purpose, one fault at a time."""

import os
import signal
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fmlab.backends import get_backend
from fmlab.data import LengthBuckets
from fmlab.lab.figures import PALETTE
from fmlab.models import GPT
from fmlab.models.cross_entropy import linear_cross_entropy
from fmlab.objectives import CausalLM
from fmlab.parallel import Engine, Layout, parallelize
from fmlab.train import TrainConfig, adamw, train
from fmlab.train.callbacks import Callback, StepMetrics
from fmlab.train.precision import FewBits, numbers_called

#: What happened, what somebody saw, and where.
SEEN = (
    ("swapped sends", "both ranks are stuck in send", "NVIDIA/nccl#479"),
    ("a skipped collective", "saving on rank 0 alone never ends", "deepspeedai/DeepSpeed#801"),
    ("uneven batches", "hangs at the last step of the epoch", "pytorch/pytorch#38174"),
    ("a seed for each rank", "nothing; 20 to 30 % of the reads are double", "mlcommons/training#625"),
    ("logits", "tried to allocate 6.54 GiB in cross_entropy", "NVIDIA-NeMo/Automodel#2336"),
    ("fragmentation", "out of memory with half of it free", "pytorch/pytorch#35901"),
    ("fp16", "NaN: a value of 66,246, the largest is 65,504", "huggingface/transformers#5651"),
    ("a new shape a step", "429 compilations in 493 steps", "pytorch/xla#3356"),
    ("a torn checkpoint", "failed finding central directory", "ultralytics/ultralytics#5793"),
    ("a dead host", "hung for 8 hours before anybody saw it", "pytorch/pytorch#76287"),
)

#: Unexpected interruptions of 16,384 H100 in 54 days, by cause; all others together at the end.
LLAMA3_CAUSES = (
    ("faulty GPU", 148),
    ("GPU memory (HBM3)", 72),
    ("software bug", 54),
    ("network switch or cable", 35),
    ("host maintenance", 32),
    ("GPU SRAM", 19),
    ("GPU system processor", 17),
    ("network card", 7),
    ("NCCL watchdog", 7),
    ("silent data corruption", 6),
    ("eight others", 22),
)

# ---- memory --------------------------------------------------------------------------------------------


def loss_of_logits(device: torch.device, rows: int, vocab: int, width: int, whole: bool) -> None:
    """Loss and gradients of a head; whole: all logits [rows, vocab] at once, else a few rows at a time."""
    hidden = torch.empty(rows, width, device=device, requires_grad=True)
    weight = torch.empty(vocab, width, device=device, requires_grad=True)
    labels = torch.zeros(rows, dtype=torch.int64, device=device)
    if whole:
        F.cross_entropy(hidden @ weight.T, labels, reduction="sum").backward()
    else:
        linear_cross_entropy(hidden, weight, labels).backward()


@dataclass
class Piece:
    """A piece of memory: how long it is, and who has it ("" for nobody)."""

    size: int
    owner: str = ""


# region allocator
@dataclass
class Allocator:
    """A caching allocator as PyTorch's: memory of the chip is kept in segments, and cut to what is asked.

    A freed piece joins free neighbours of its segment, never those of another; a segment goes back to the
    chip only when all of it is free. Sizes in whole GiB.
    """

    capacity: int
    segments: list[list[Piece]] = field(default_factory=list)

    def allocate(self, owner: str, size: int) -> None:
        fits = [(one, s) for s in self.segments for one in s if not one.owner and one.size >= size]
        if not fits:
            self.segments = [s for s in self.segments if any(one.owner for one in s)]  # give back
            if self.reserved + size > self.capacity:
                raise torch.OutOfMemoryError(self.refusal(owner, size))
            self.segments.append([Piece(size)])
            fits = [(self.segments[-1][0], self.segments[-1])]
        best, segment = min(fits, key=lambda fit: fit[0].size)
        if best.size > size:
            segment.insert(segment.index(best) + 1, Piece(best.size - size))
        best.size, best.owner = size, owner

    # endregion

    def free(self, owner: str) -> None:
        """Give back all that this owner has."""
        for at, segment in enumerate(self.segments):
            joined: list[Piece] = []
            for one in segment:
                one.owner = "" if one.owner == owner else one.owner
                if joined and not one.owner and not joined[-1].owner:
                    joined[-1].size += one.size
                else:
                    joined.append(one)
            self.segments[at] = joined

    @property
    def reserved(self) -> int:
        """What the chip has given."""
        return sum(one.size for segment in self.segments for one in segment)

    @property
    def allocated(self) -> int:
        """What somebody has."""
        return sum(one.size for segment in self.segments for one in segment if one.owner)

    @property
    def pieces(self) -> list[int]:
        """Sizes of what nobody has: in segments, and what the chip has not given."""
        free = [one.size for segment in self.segments for one in segment if not one.owner]
        return [*free, self.capacity - self.reserved]

    def refusal(self, owner: str, size: int) -> str:
        return (
            f"{owner}: tried to allocate {size} GiB. Of {self.capacity} GiB, {self.allocated} are allocated "
            f"and {self.reserved - self.allocated} reserved but unallocated; free pieces: {self.pieces}"
        )


def draw_memory(ax: Any, rows: Mapping[str, Allocator]) -> None:
    """One bar for each allocator: its segments beside each other, a colour for each owner, holes white; what
    the chip has not given is dotted."""
    pieces = [one for allocator in rows.values() for segment in allocator.segments for one in segment]
    owners = list(dict.fromkeys(one.owner for one in pieces if one.owner))
    for y, allocator in enumerate(rows.values()):
        start = 0
        for one in [one for segment in allocator.segments for one in segment]:
            colour = PALETTE[owners.index(one.owner)] if one.owner else "white"
            _bar(ax, y, start, one.size, one.owner or f"{one.size} free", color=colour, alpha=0.6)
            start += one.size
        left = allocator.capacity - start
        if left:
            _bar(ax, y, start, left, f"{left} free", color="white", linestyle=":")
    ax.set_yticks(range(len(rows)), list(rows))
    ax.set(ylabel="order")
    ax.invert_yaxis()


def _bar(ax: Any, y: int, start: int, size: int, text: str, **style: Any) -> None:
    ax.barh(y, size, left=start, height=0.5, edgecolor="black", **style)
    ax.text(start + size / 2, y, text, ha="center", va="center", fontsize=9)


# ---- numbers -------------------------------------------------------------------------------------------

HOT = 3  # the block whose MLP has grown, as some of T5's do


def rows(count: int, length: int, vocab: int = 4096, seed: int = 0) -> dict[str, Tensor]:
    """A batch of random tokens."""
    tokens = torch.randint(vocab, (count, length + 1), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def small_gpt() -> GPT:
    """gpt2-tiny, the same each time."""
    torch.manual_seed(0)
    return GPT.from_preset("gpt2-tiny")


def hot_engine(numbers: str | None = None) -> Engine:
    """One device with a GPT whose activations are large in one place, in those numbers (None: fp32)."""
    model = small_gpt()
    with torch.no_grad():
        model.get_parameter(f"blocks.{HOT}.mlp.down.weight").mul_(1.3e5)
    engine = "fmlab" if numbers is None else partial(FewBits, numbers=numbers_called(numbers))
    return parallelize(model, Layout(), CausalLM(), adamw(1e-3), engine)


def largest_output(engine: Engine, batch: dict[str, Tensor]) -> float:
    """The largest number that the hot MLP gives."""
    found: list[float] = []
    module: torch.nn.Module = engine.model.get_submodule(f"blocks.{HOT}.mlp")
    handle = module.register_forward_hook(lambda m, args, out: found.append(out.abs().max().item()))
    try:
        with torch.no_grad():
            engine.model(**batch)
    finally:
        handle.remove()
    return found[0]


@torch.no_grad()
def programs(lengths: Sequence[int], buckets: LengthBuckets | None = None) -> int:
    """How many programs a simulated Trainium compiles to evaluate a batch of each length."""
    backend = get_backend("sim:trn2")
    chip = backend.chip  # type: ignore[attr-defined]
    chip.forget_programs()
    chip.reset()
    model = backend.to_device(small_gpt()).eval()
    before = chip.totals.compiles
    for length in lengths:
        batch = rows(2, length)
        if buckets is not None:
            batch = buckets.pad(batch)
            batch.pop("attention_mask", None)  # a causal model does not need it
        with backend.step():
            model(**backend.to_device(batch))
    return int(chip.totals.compiles - before)


def flip_bit(tensor: Tensor, index: int, bit: int) -> None:
    """Flip one bit of one number of an fp32 tensor, in place; bit 31 is the sign, 30 to 23 the exponent."""
    with torch.no_grad():
        numbers = tensor.detach().view(-1).view(torch.int32)
        numbers[index] ^= torch.tensor(1 << bit if bit < 31 else -(1 << 31), dtype=torch.int32)


# ---- files and hosts -----------------------------------------------------------------------------------


def damage_file(path: Path) -> None:
    """Flip one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def losses_of(config: TrainConfig, callbacks: Sequence[Callback] = ()) -> tuple[list[float], list[str]]:
    """Train; the losses of all steps, and what was warned of, with "run" for the run's folder."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        losses = train(config, callbacks=callbacks).losses
    return losses, [str(one.message).replace(str(config.out), "run") for one in said]


@dataclass
class HostDies(Callback):
    """The processes of one host are killed after a step: power is off, nobody says goodbye."""

    pids: Sequence[int]
    after: int

    def on_step(self, metrics: StepMetrics) -> None:
        if metrics.step == self.after:
            for pid in self.pids:
                os.kill(pid, signal.SIGKILL)


# ---- a long run ----------------------------------------------------------------------------------------


# region replayed
def replayed(
    work: float, interval: float, checkpoint: float, restart: float, mean_time: float, seed: int = 0
) -> float:
    """The share of a run's time that is training, with failures drawn at random; all in seconds."""
    random = np.random.default_rng(seed)
    now = done = 0.0
    failure = random.exponential(mean_time)
    while done < work:
        if now + interval + checkpoint <= failure:
            now, done = now + interval + checkpoint, done + interval
            continue
        now = failure
        failure += random.exponential(mean_time)
        while now + restart > failure:  # it fails while it starts again
            now, failure = failure, failure + random.exponential(mean_time)
        now += restart
    return done / now


# endregion
