"""SBUF and PSUM: who lives where, and who wrote and read which bytes.

An address is a byte of a partition; a block takes the same bytes of all 128 partitions. Space is given out at
the lowest address that fits and comes back when the last tile on it is gone (or freed by hand). Instructions
depend on one another through these bytes: what reuses a place waits for the last user of it, as on hardware,
where semaphores see to it.
"""

from dataclasses import dataclass, field

from fmlab.kernels.tiles.core import BANK_BYTES
from fmlab.kernels.tiles.errors import Line, here, refuse

Region = tuple[int, int, int, int]  # first partition, past the last; first byte, past the last


def overlap(a: Region, b: Region) -> bool:
    return a[0] < b[1] and b[0] < a[1] and a[2] < b[3] and b[2] < a[3]


def covers(a: Region, b: Region) -> bool:
    return a[0] <= b[0] and b[1] <= a[1] and a[2] <= b[2] and b[3] <= a[3]


@dataclass
class History:
    """Writes and reads of a memory that later instructions may have to wait for (numbers of instructions)."""

    writes: list[tuple[Region, int]] = field(default_factory=list)
    reads: dict[tuple[Region, str | int], int] = field(default_factory=dict)

    def writers(self, region: Region) -> set[int]:
        """What a read of this region waits for."""
        return {number for there, number in self.writes if overlap(there, region)}

    def users(self, region: Region) -> set[int]:
        """What a write to this region waits for: its readers and writers."""
        return self.writers(region) | {
            number for (there, _), number in self.reads.items() if overlap(there, region)
        }

    def note_read(self, region: Region, number: int, engine: str) -> None:
        """The last read of a region by an engine stands for its earlier ones; stores do not end in order."""
        self.reads[region, number if engine == "store" else engine] = number

    def note_write(self, region: Region, number: int) -> None:
        """Later users of what is overwritten wait for this write, which waited for the ones before it."""
        self.writes = [one for one in self.writes if not covers(region, one[0])]
        self.reads = {key: value for key, value in self.reads.items() if not covers(region, key[0])}
        self.writes.append((region, number))


@dataclass
class Resident:
    """What stands in a memory: a name, its place, and the line that made it."""

    name: str
    start: int
    size: int
    about: str
    line: Line


class Block:
    """A place in a memory, given back when nothing refers to it any more."""

    def __init__(self, memory: "Memory", start: int, size: int) -> None:
        self.memory, self.start, self.size, self._held = memory, start, size, True

    def release(self) -> None:
        if self._held:
            self._held = False
            del self.memory.residents[self.start]

    def __del__(self) -> None:
        self.release()


class Memory:
    """SBUF or PSUM. `size`: bytes of one partition. `unit`: what is given out at once (PSUM: a bank)."""

    def __init__(self, name: str, size: int, unit: int) -> None:
        self.name, self.size, self.unit = name, size, unit
        self.residents: dict[int, Resident] = {}
        self.history = History()
        self.peak = 0  # highest address ever used, in bytes of a partition
        self.at_peak: list[Resident] = []

    def allocate(self, nbytes: int, name: str, about: str) -> Block:
        """A block of so many bytes a partition. KernelError if there is no room, with a list of what is
        there."""
        size = -(-nbytes // self.unit) * self.unit
        start = 0
        for resident in sorted(self.residents.values(), key=lambda one: one.start):
            if resident.start - start >= size:
                break
            start = resident.start + resident.size
        if start + size > self.size:
            self._no_room(size, name, about)
        block = Block(self, start, size)
        self.residents[start] = Resident(name, start, size, about, here())
        if start + size > self.peak:
            self.peak = start + size
            self.at_peak = list(self.residents.values())
        return block

    def amount(self, size: int) -> str:
        """Bytes of a partition in the unit that people count in."""
        if self.unit == BANK_BYTES:
            return f"{size // BANK_BYTES} bank" + ("" if size == BANK_BYTES else "s")
        return f"{size / 1024:.4g} KiB" if size >= 1024 else f"{size} B"

    def _no_room(self, size: int, name: str, about: str) -> None:
        there = sorted(self.residents.values(), key=lambda one: -one.size)
        free = self.size - sum(one.size for one in there)
        rows = [f"  {self.amount(one.size):>10}  {one.name} {one.about}, made in {one.line}" for one in there]
        if len(rows) > 12:
            rows[12:] = [f"  and {len(rows) - 12} more"]
        if any(one.name == name and one.line == here() for one in there):
            rows.append(
                f"A name keeps its old tile until the new one is made: free {name} before, or use a ring."
            )
        split = " in pieces that are too small" if free >= size else ""
        refuse(
            f"out of {self.name}: {name} {about} needs {self.amount(size)} of each partition, and "
            f"{self.amount(free)} of {self.amount(self.size)} are free{split}. "
            + (
                "\n".join(["What lives there:", *rows])
                if rows
                else "Nothing lives there yet: take a smaller tile."
            )
        )
