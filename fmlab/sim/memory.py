"""The memory of a simulated chip: every storage on it, what it holds, and what to do when one does not fit.

A storage counts once, however many views look at it, from the moment an operator returned it until its last
tensor is gone. Sizes are exact: an allocator's rounding and fragmentation, and what a kernel needs while it
runs, are not modelled.
"""

import itertools
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from fmlab.sim import owners
from fmlab.sim.units import binary

#: The lines of the ledger. A storage is entered when it is made: by what makes it, and as "gradients" or
#: "parameters" as soon as autograd or a module takes it as such. "activations" includes what forward and
#: backward compute on the way; "other" is what came from the host or was made without computing.
LINES = ("parameters", "gradients", "optimizer states", "activations", "other")

REMEDIES = {
    "parameters": "take a smaller model, hold the weights in bf16, or shard them (tensor parallel, ZeRO 3)",
    "gradients": "shard the gradients (ZeRO 2), or hold them in bf16",
    "optimizer states": "shard the optimizer (ZeRO 1), or take one with less state (SGD, Adafactor)",
    "activations": "take a smaller batch with more micro_batches, shorter sequences, bf16, or recompute "
    "activations in the backward pass",
    "other": "free tensors that are no longer needed, and move only the batch at hand to the device",
}
_SHOWN = 5
_SERIALS = itertools.count(1)


class Block:
    """One storage on a simulated chip.

    serial: a number that no other block ever has; line: of the ledger; op, module, shape, dtype: of the
    tensor that it was made for; arrival: when a message that is on its way into it will be there.
    """

    __slots__ = (
        "arrival",
        "dtype",
        "key",
        "line",
        "memory",
        "module",
        "op",
        "serial",
        "shape",
        "size",
        "watch",
    )

    def __init__(
        self, memory: "Memory", key: int, size: int, line: str, op: str, module: str, t: torch.Tensor
    ):
        self.memory, self.key, self.size, self.line = memory, key, size, line
        self.op, self.module, self.shape, self.dtype = op, module, tuple(t.shape), t.dtype
        self.serial = next(_SERIALS)
        self.arrival: Any = None
        self.watch: Any = None

    def describe(self, name: str = "") -> str:
        """For people: what it is and how large."""
        shape = "x".join(map(str, self.shape)) or "scalar"
        what = name or f"made by {self.op}" + (f" in {self.module!r}" if self.module else "")
        return f"{binary(self.size)} {self.line}, {shape} {str(self.dtype).removeprefix('torch.')}, {what}"

    def move_to(self, line: str) -> None:
        """Enter it under another line of the ledger."""
        if line != self.line:
            self.memory.lines[self.line] -= self.size
            self.memory.lines[line] += self.size
            self.line = line


class _Watch(weakref.ref[torch.UntypedStorage]):
    """A weak reference to a storage that knows its block."""

    __slots__ = ("block",)
    block: Block


def _gone(watch: Any) -> None:
    block: Block = watch.block
    if BLOCKS.get(block.key) is block:
        del BLOCKS[block.key]
    block.memory.forget(block)


#: Address of a raw storage -> its block, for the storages of all simulated chips of this process.
BLOCKS: dict[int, Block] = {}


def block_of(raw: torch.Tensor) -> Block | None:
    """The block of a raw tensor's storage; None for one that is on no simulated chip."""
    return BLOCKS.get(raw.untyped_storage()._cdata)


def claim_parameters(module: torch.nn.Module) -> None:
    """Enter a module's parameters as such, where they did not say so themselves (DTensor, host tensors)."""
    for parameter in module.parameters():
        raw = owners.raw_of(parameter)
        block = None if raw is None else block_of(raw)
        if block is not None:
            block.move_to("parameters")


class SimOutOfMemory(torch.OutOfMemoryError):
    """A tensor did not fit into the memory of a simulated chip.

    device, wanted, live, capacity: which chip, and bytes; lines: the ledger then; line: its largest line;
    largest: the largest blocks, described.
    """

    def __init__(self, memory: "Memory", wanted: int, op: str, module: str) -> None:
        memory.reclassify()
        self.device, self.wanted, self.live, self.capacity = memory.name, wanted, memory.live, memory.capacity
        self.lines = dict(memory.lines)
        self.line = max(self.lines, key=lambda line: self.lines[line])
        self.largest = memory.largest(_SHOWN)
        where = f" in {module!r}" if module else ""
        assert memory.capacity is not None
        ledger = ", ".join(f"{line} {binary(size)}" for line, size in self.lines.items() if size)
        largest = "".join(f"\n  {text}" for text in self.largest)
        remedy = f"The largest line is {self.line}: {REMEDIES[self.line]}."
        if wanted > memory.capacity:
            remedy = (
                "This tensor alone is larger than the memory: make it in parts, or divide it among chips."
            )
        super().__init__(
            f"{memory.name} is out of memory (simulated): {op}{where} tried to allocate {binary(wanted)}, "
            f"and {binary(memory.live)} of {binary(memory.capacity)} are in use: {ledger or 'nothing'}. "
            f"Largest tensors:{largest or ' none'}\n{remedy}"
        )


class Memory:
    """What lies in the memory of one chip.

    capacity: bytes, None for no limit; live, peak: bytes now and at the highest; lines: bytes now by line of
    the ledger; peak_lines: the same at the peak.
    """

    def __init__(self, name: str, capacity: int | None) -> None:
        self.name, self.capacity = name, capacity
        self.live = self.peak = self.allocations = 0
        self.lines = dict.fromkeys(LINES, 0)
        self.peak_lines = dict(self.lines)

    def check(self, size: int, op: str, module: str = "") -> None:
        """Raise SimOutOfMemory unless `size` more bytes fit."""
        if self.capacity is not None and self.live + size > self.capacity:
            raise SimOutOfMemory(self, size, op, module)

    def enter(self, raw: torch.Tensor, line: str, op: str, module: str) -> Block:
        """The block of a raw tensor's storage, entered now if it is new. Raises SimOutOfMemory."""
        storage = raw.untyped_storage()
        key = storage._cdata
        block = BLOCKS.get(key)
        if block is not None:
            return block
        size = storage.nbytes()
        self.check(size, op, module)
        block = Block(self, key, size, line, op, module, raw)
        block.watch = _Watch(storage, _gone)
        block.watch.block = block
        BLOCKS[key] = block
        self.allocations += 1
        self._grow(line, size)
        return block

    def resized(self, block: Block, size: int) -> None:
        """A storage is to have another size, as FSDP wants to free and allocate gathered weights."""
        if size > block.size:
            self.check(size - block.size, "a storage's resize_", block.module)
        self._grow(block.line, size - block.size)
        block.size = size

    def _grow(self, line: str, size: int) -> None:
        self.live += size
        self.lines[line] += size
        if self.live > self.peak:
            self.peak = self.live
            self.peak_lines = dict(self.lines)

    def forget(self, block: Block) -> None:
        """A storage is gone."""
        self.live -= block.size
        self.lines[block.line] -= block.size

    def reset_peak(self) -> None:
        """Count the peak anew from here."""
        self.peak, self.peak_lines = self.live, dict(self.lines)

    def blocks(self) -> Iterable[Block]:
        """All blocks of this chip."""
        return [block for block in list(BLOCKS.values()) if block.memory is self]

    def reclassify(self) -> None:
        """Enter blocks under the line that living modules and optimizers show them to belong to.

        Needed for wrappers (DTensor of FSDP) whose parameters are not themselves simulated tensors.
        """
        for tensor, line in owners.lines():
            block = block_of(tensor)
            if block is not None and block.memory is self:
                block.move_to(line)

    def largest(self, count: int) -> list[str]:
        """The largest blocks, described; parameters and their gradients by name."""
        names: dict[int, str] = {}
        for tensor, name in owners.names():
            block = block_of(tensor)
            if block is not None:
                names.setdefault(block.serial, name)
        blocks = sorted(self.blocks(), key=lambda block: -block.size)[:count]
        return [block.describe(names.get(block.serial, "")) for block in blocks]

    def summary(self) -> str:
        """The ledger as a table: now, and when most was in use."""
        self.reclassify()
        limit = "no limit" if self.capacity is None else binary(self.capacity)
        rows = [f"{self.name}: {binary(self.live)} in use, peak {binary(self.peak)}, capacity {limit}"]
        rows += [
            f"  {line:<17}{binary(self.lines[line]):>12} now{binary(self.peak_lines[line]):>12} at the peak"
            for line in LINES
        ]
        rows += [f"  largest: {text}" for text in self.largest(3)]
        return "\n".join(rows)
