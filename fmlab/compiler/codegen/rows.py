"""A small program over rows, from which C++ is made (text.py: row by row; images.py: image by image).

A value of level 0 depends on inputs alone; what depends on a sum over the row, such as x - mean, is of level
1; and so on. Each level is one loop over the columns of a row.

    softmax:  level 0  m = max(x)        level 1  s = sum(exp(x - m))        level 2  exp(x - m) / s
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

CHEAP = 2  # additions: what costs no more is computed again in a later level instead of kept

#: What 16-bit inputs and results are in memory; arithmetic is fp32.
NARROW = {"bf16": ("from_bf16", "to_bf16"), "fp16": ("from_fp16", "to_fp16")}


@dataclass(eq=False)
class Value:
    """An intermediate value. kind: "full" (one a column) or "column" (one a row). level: see above.

    flops: what it costs. at: for an element picked out of a row, which one.
    """

    name: str
    kind: str
    level: int
    text: str
    ctype: str = "T"
    sources: tuple["Value", ...] = ()
    load: bool = False
    flops: int = 1
    at: "Value | None" = None


@dataclass(eq=False)
class Reduction:
    """`result` is the "sum" or "max" of `value` over a row; `power`, if given, the sum of e^(value - max)."""

    value: Value
    result: Value
    how: str
    power: Value | None = None


EVERY = "i * C + j"  # where element j of row i lies, if nothing lies between rows


class Store(NamedTuple):
    """A value that is written to output `number` as `ctype`; full values at `where`, others one a row."""

    value: Value
    number: int
    ctype: str
    where: str = EVERY


@dataclass
class RowProgram:
    """Built by the methods below, one value at a time.

    dtype: of the arithmetic, "float" or "double". pixels: of an image, where rows are the pixels of images
    and columns their channels, else 0. groups: where a sum goes over all pixels of an image and the channels
    of a group, and not over a row, how many groups; else 0.
    sums, totals: over all rows, (value, output) and value.
    ends: (output, expression of totals). checks: (value that must not hold, what it would mean).
    read: (input, how it is read, its value).
    """

    dtype: str
    pixels: int = 0
    groups: int = 0
    values: list[Value] = field(default_factory=list)
    reductions: list[Reduction] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    sums: list[tuple[Value, int]] = field(default_factory=list)
    totals: list[Value] = field(default_factory=list)
    ends: list[tuple[int, str]] = field(default_factory=list)
    checks: list[tuple[Value, str]] = field(default_factory=list)
    pointers: list[tuple[int, str, bool]] = field(default_factory=list)
    kinds: set[str] = field(default_factory=set)
    read: list[tuple[int, str, Value]] = field(default_factory=list)

    def load(self, number: int, kind: str, ctype: str = "T", pitch: int = 0) -> Value:
        """Input `number`, read as "full", "row", "column", "scalar", or of images as "image" [n,C] or "group"
        [n,G]. "part": full, with rows that are `pitch` elements apart."""
        index = {
            "full": EVERY,
            "part": f"i * {pitch} + j",
            "row": "j",
            "column": "i",
            "scalar": "0",
            "image": f"i / {self.pixels or 1} * C + j",
            "group": f"n * {self.groups} + j / (C / {self.groups or 1})",
        }[kind]
        self.pointers.append((number, ctype, True))
        self.kinds.add(kind)
        wide = kind in ("full", "part", "row", "image") or (kind == "column" and self.groups > 0)
        text = f"p{number}[{index}]"
        inside = ctype
        if ctype in NARROW:
            text, inside = f"{NARROW[ctype][0]}({text})", "T"
        value = self._add(Value("", "full" if wide else "column", 0, text, inside, (), load=True, flops=0))
        self.read.append((number, kind, value))
        return value

    def apply(self, expression: str, *sources: Value, ctype: str = "T", flops: int = 1) -> Value:
        """An expression of earlier values, {0}, {1}, ..."""
        kind = "full" if any(s.kind == "full" for s in sources) else "column"
        level = max((s.level for s in sources), default=0)
        text = expression.format(*(source.name for source in sources))
        return self._add(Value("", kind, level, text, ctype, sources, flops=flops))

    def reduce(self, how: str, value: Value) -> Value:
        """The "sum" or "max" of a full value over its row (of images: over pixels and a group's channels)."""
        result = self._add(Value("", "column", value.level + 1, "", "T", (value,)))
        self.reductions.append(Reduction(value, result, how))
        return result

    def log_sum(self, value: Value) -> tuple[Value, Value]:
        """(m, s): the maximum of a full value over its row and the sum of e^(value - m), in one pass.

        The row is taken in blocks; where a block has a new maximum, the sum so far is scaled down to it
        (Milakov and Gimelshein 2018, arXiv:1805.02867). For rows that no near cache holds.
        """
        largest = self.reduce("max", value)
        power = self._add(Value("", "column", value.level + 1, "", "T", (value,)))
        self.reductions[-1].power = power
        return largest, power

    def pick(self, value: Value, at: Value) -> Value:
        """The element of a full value at column `at`, a number of its row."""
        level = max(value.level, at.level)
        return self._add(Value("", "column", level, "", "T", (value, at), at=at))

    def columns(self) -> Value:
        """The number of the column."""
        return self._add(Value("", "full", 0, "(int32_t)j", "int32_t", (), load=True, flops=0))

    def store(self, value: Value, number: int, ctype: str = "T") -> None:
        """Write a value to output `number`."""
        self.pointers.append((number, ctype, False))
        self.stores.append(Store(value, number, ctype))

    def join(self, values: Sequence[Value], number: int, ctype: str = "T") -> None:
        """Write full values side by side to the rows of output `number`."""
        self.pointers.append((number, ctype, False))
        for place, value in enumerate(values):
            where = f"(i * {len(values)} + {place}) * C + j"
            self.stores.append(Store(value, number, ctype, where))

    def sum_rows(self, value: Value, number: int, ctype: str = "T") -> None:
        """Write the sum of a full value over all rows to output `number`, [columns]."""
        self.pointers.append((number, ctype, False))
        self.sums.append((value, number))

    def total(self, value: Value) -> str:
        """The sum over all rows of one number a row; its name in the expressions of `end`."""
        self.totals.append(value)
        return f"total{len(self.totals) - 1}"

    def end(self, expression: str, number: int, ctype: str = "T") -> None:
        """Write an expression of totals to output `number`, one number."""
        self.pointers.append((number, ctype, False))
        self.ends.append((number, expression))

    def refuse(self, value: Value, message: str) -> None:
        """Stop with `message` after the run if one number a row, a condition, holds anywhere."""
        self.checks.append((value, message))

    def _add(self, value: Value) -> Value:
        value.name = f"v{len(self.values)}"
        self.values.append(value)
        return value

    # ---- questions of those who write code -----------------------------------------------------------------

    @property
    def levels(self) -> int:
        """How many loops over a row."""
        return max((value.level for value in self.values), default=0) + 1

    @property
    def flat(self) -> bool:
        """Whether every element is on its own, so that rows need not be told apart."""
        alone = not (self.reductions or self.sums or self.totals or self.checks or self.groups)
        whole = all(store.value.kind == "full" and store.where == EVERY for store in self.stores)
        return alone and self.kinds <= {"full", "scalar"} and whole

    def reduced(self) -> set[Value]:
        """Values that reductions give."""
        return {v for r in self.reductions for v in (r.result, r.power) if v is not None}

    def needed(self) -> set[Value]:
        """Values that lead to something written."""
        ends = [store.value for store in self.stores] + [v for v, _ in self.sums] + self.totals
        stack = ends + [v for v, _ in self.checks]
        found: set[Value] = set()
        while stack:
            value = stack.pop()
            if value not in found:
                found.add(value)
                stack += value.sources
        return found

    def overwrites(self, last: dict[Value, int]) -> dict[int, list[int]]:
        """output -> the inputs whose memory it may take, given the level at which each value is last read.

        A result goes to the place from which the same element was read: that is wrong only if a later loop
        reads it there again.
        """
        found: dict[int, list[int]] = {}
        for value, number, _, where in self.stores:
            for source in {n for n, _, _ in self.read}:
                ways = [(kind, last.get(v, 0)) for n, kind, v in self.read if n == source]
                whole = value.kind == "full" and where == EVERY
                if whole and all(how == "full" and at <= value.level for how, at in ways):
                    found.setdefault(number, []).append(source)
        return found

    def again(self, value: Value) -> bool:
        """Whether a full value is computed again in a later level: an input, or cheap from inputs."""
        if value.load or value.kind == "column":
            return True
        return value.flops <= CHEAP and all(
            source.load or source.kind == "column" for source in value.sources
        )

    def kept(self, needed: set[Value]) -> list[Value]:
        """Full values that a later level than their own reads and that are not computed again."""
        late: list[Value] = []
        for value in self.values:
            if value not in needed:
                continue
            late += [s for s in self._read_by(value) if s.level < value.level and not self.again(s)]
        return list(dict.fromkeys(late))

    def _read_by(self, value: Value) -> list[Value]:
        """Full values, not inputs, that a value reads; a sum over a row reads them in the level before."""
        if value in self.reduced():
            return []
        return [source for source in value.sources if source.kind == "full" and not source.load]
