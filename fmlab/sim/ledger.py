"""What lies in the memory of a rank: states by the rules of ZeRO, activations by the traces and the schedule.

Sizes are exact sums of tensors; an allocator's rounding and fragmentation, the chip's own reserve, and the
buffers of a communication library are left out. GB are 1e9 bytes, as in the papers; GiB are said as such.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fmlab.sim.program import Chunk, Program
from fmlab.sim.schedule import Action
from fmlab.sim.split import Split
from fmlab.sim.units import binary


@dataclass(frozen=True)
class Ledger:
    """Bytes on one rank at its worst moment, line by line."""

    stage: int
    lines: dict[str, int]
    capacity: int | None = None
    remedies: tuple[str, ...] = ()  # for the largest line

    @property
    def total(self) -> int:
        """All lines together."""
        return sum(self.lines.values())

    @property
    def fits(self) -> bool | None:
        """Whether it fits the chip; None without a known capacity."""
        return None if self.capacity is None else self.total <= self.capacity

    @property
    def largest(self) -> str:
        """The line that takes most."""
        return max(self.lines, key=self.lines.__getitem__)

    def __str__(self) -> str:
        lines = ", ".join(f"{name} {binary(size)}" for name, size in self.lines.items() if size)
        text = f"stage {self.stage}: {binary(self.total)} ({lines})"
        if self.fits is False:
            assert self.capacity is not None
            text += (
                f" does NOT fit {binary(self.capacity)}: the largest line is {self.largest}; "
                f"try {', or '.join(self.remedies)}"
            )
        return text


def state_bytes(numel: int, split: Split) -> dict[str, int]:
    """Bytes of the states of `numel` parameters on one of split.data ranks that hold them together.

    16 bytes a parameter in mixed precision (18 with fp32 gradients), 16 in fp32; what ZeRO divides is divided
    by split.data (Rajbhandari et al. 2020, arXiv:1910.02054, Fig. 1).
    """

    def share(nbytes: int, from_stage: int) -> int:
        return -(-numel // split.data) * nbytes if split.zero >= from_stage else numel * nbytes

    return {
        "parameters": share(split.dtype.itemsize, 3),
        "gradients": share(split.gradient_dtype.itemsize, 2),
        "master weights": 0 if split.precision == "fp32" else share(4, 1),
        "moments": share(8, 1),
    }


def saved_bytes(chunk: Chunk) -> int:
    """What a chunk holds for one micro-batch between its forward and its backward pass.

    What it sends on is freed once it is sent (where autograd keeps the same tensor, it is counted there).
    """
    return chunk.receives + sum(trace.saved for trace in chunk.traces) - chunk.sends


def forward_peak(chunk: Chunk) -> int:
    """The most bytes during a forward pass, above what was alive before it."""
    level, most = chunk.receives, 0
    for trace in chunk.traces:
        most = max(most, level + trace.forward.peak)
        level += trace.saved
    return max(most, level)


def backward_peak(chunk: Chunk, first: bool) -> int:
    """The most bytes during a backward pass, of this micro-batch alone: kept activations and what is made."""
    levels = [chunk.receives]
    for trace in chunk.traces:
        levels.append(levels[-1] + trace.saved)
    return max(
        level + trace.result + (trace.first if first else trace.later).peak
        for level, trace in zip(levels[1:], chunk.traces, strict=True)
    )


@dataclass(frozen=True)
class MemoryStep:
    """During one action: bytes held before it (of all kept activations), the most during it, and after it."""

    action: Action
    before: int
    most: int
    after: int


def activation_steps(program: Program, stage: int, actions: Sequence[Action]) -> list[MemoryStep]:
    """How the activations of a stage grow and shrink along its schedule; states are not in these numbers."""
    chunks = program.of_stage(stage)
    saved = [saved_bytes(chunk) for chunk in chunks]
    ahead = [forward_peak(chunk) for chunk in chunks]
    back = [[backward_peak(chunk, first) for first in (False, True)] for chunk in chunks]
    level, steps = 0, []
    for action in actions:
        size = saved[action.chunk]
        if action.direction == "forward":
            steps.append(MemoryStep(action, level, level + ahead[action.chunk], level + size))
            level += size
        else:
            first = action.micro_batch == 0 or program.split.zero >= 2
            most = level - size + back[action.chunk][first]
            steps.append(MemoryStep(action, level, max(most, level), level - size))
            level -= size
    return steps


def ledger(program: Program, stage: int, actions: Sequence[Action], capacity: int | None = None) -> Ledger:
    """The lines of a stage's worst moment: "activations" are kept, "working memory" comes on top of them."""
    split = program.split
    worst = max(activation_steps(program, stage, actions), key=lambda step: step.most)
    kept = min(max(worst.before, worst.after), worst.most)  # with what this action adds, or still holds
    lines = state_bytes(program.numel(stage), split)
    lines["activations"] = kept
    lines["working memory"] = worst.most - kept
    largest = max(c.block_numel(i) for c in program.of_stage(stage) for i in range(len(c.blocks)))
    if split.zero == 3:  # the block at work, and the next one on its way
        lines["gathered parameters"] = 2 * largest * split.dtype.itemsize
    if split.zero >= 2:
        lines["gradients in flight"] = 2 * largest * split.gradient_dtype.itemsize
    return Ledger(stage, lines, capacity, remedies(program, max(lines, key=lines.__getitem__)))


def remedies(program: Program, line: str) -> tuple[str, ...]:
    """What makes a line of the ledger smaller and is not yet done."""
    split, found = program.split, ["more tensor or pipeline ranks"]
    if line in ("activations", "working memory"):
        found = ["more tensor ranks"]
        if program.rows > 1:
            found.insert(0, "more micro_batches")
        if split.tensor > 1 and not split.sequence_parallel:
            found.insert(0, "sequence_parallel")
        if split.recompute != "full" and line == "activations":
            found.insert(0, "recompute='full'")
    zero = {"master weights": 1, "moments": 1, "gradients": 2, "parameters": 3}.get(line, 0)
    if split.zero < zero:
        found.insert(0, f"zero={zero}" + (" with several replicas" if split.data == 1 else ""))
    if line == "gradients" and split.gradients == "fp32":
        found.insert(0, "gradients='same'")
    return tuple(found)
