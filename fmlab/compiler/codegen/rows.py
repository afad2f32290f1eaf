"""A small program over rows, and the C++ that it becomes.

For each row: loops over its columns, one for each level. A value of level 0 depends on inputs alone; what
depends on a sum over the row, such as x - mean, is of level 1; and so on. Values that a later level reads
again are kept in a buffer of one row, which stays in the nearest cache.

    softmax:  level 0  m = max(x)        level 1  s = sum(exp(x - m))        level 2  exp(x - m) / s
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

_START = {"sum": "T(0)", "max": "-std::numeric_limits<T>::infinity()"}


@dataclass(eq=False)
class Value:
    """An intermediate value. kind: "full" (one a column) or "column" (one a row). level: see above."""

    name: str
    kind: str
    level: int
    text: str
    ctype: str = "T"
    sources: tuple["Value", ...] = ()
    load: bool = False


@dataclass
class _Reduction:
    value: Value
    result: Value
    how: str


@dataclass
class RowProgram:
    """Built by the methods below, one value at a time; `code(name)` is the C++ function."""

    dtype: str
    values: list[Value] = field(default_factory=list)
    reductions: list[_Reduction] = field(default_factory=list)
    stores: list[tuple[Value, int, str]] = field(default_factory=list)
    sums: list[tuple[Value, int]] = field(default_factory=list)
    pointers: list[tuple[int, str, bool]] = field(default_factory=list)

    def load(self, number: int, kind: str, ctype: str = "T") -> Value:
        """Input `number`, read as "full", "row", "column" or "scalar"."""
        index = {"full": "i * C + j", "row": "j", "column": "i", "scalar": "0"}[kind]
        self.pointers.append((number, ctype, True))
        wide = "full" if kind in ("full", "row") else "column"
        return self._add(wide, 0, f"p{number}[{index}]", ctype, (), load=True)

    def apply(self, expression: str, *sources: Value, ctype: str = "T") -> Value:
        """An expression of earlier values, {0}, {1}, ..."""
        kind = "full" if any(s.kind == "full" for s in sources) else "column"
        level = max((s.level for s in sources), default=0)
        text = expression.format(*(source.name for source in sources))
        return self._add(kind, level, text, ctype, sources)

    def reduce(self, how: str, value: Value) -> Value:
        """The "sum" or "max" of a full value over its row."""
        result = self._add("column", value.level + 1, "", "T", (value,))
        self.reductions.append(_Reduction(value, result, how))
        return result

    def store(self, value: Value, number: int, ctype: str = "T") -> None:
        """Write a value to output `number`."""
        self.pointers.append((number, ctype, False))
        self.stores.append((value, number, "i * C + j" if value.kind == "full" else "i"))

    def sum_rows(self, value: Value, number: int) -> None:
        """Write the sum of a full value over all rows to output `number`, [columns]."""
        self.pointers.append((number, "T", False))
        self.sums.append((value, number))

    def _add(
        self, kind: str, level: int, text: str, ctype: str, sources: tuple[Value, ...], load: bool = False
    ) -> Value:
        value = Value(f"v{len(self.values)}", kind, level, text, ctype, sources, load)
        self.values.append(value)
        return value

    # ---- text ----------------------------------------------------------------------------------------------

    def code(self, name: str) -> str:
        """The function `void name(void** p, long R, long C, int threads)`."""
        lines = [
            f'extern "C" void {name}(void** p, int64_t R, int64_t C, int threads) {{',
            f"using T = {self.dtype};",
        ]
        for number, ctype, reads in dict.fromkeys(self.pointers):
            const = "const " if reads else ""
            lines.append(f"{const}{ctype}* __restrict__ p{number} = ({const}{ctype}*)p[{number}];")
        for k in range(len(self.sums)):
            lines.append(f"T* partial{k} = (T*)std::calloc((size_t)threads * C, sizeof(T));")
        lines.append("#pragma omp parallel num_threads(threads)")
        lines.append("{")
        kept = self._kept()
        for value in kept:
            lines.append(
                f"{value.ctype}* k_{value.name} = ({value.ctype}*)std::malloc(C * sizeof({value.ctype}));"
            )
        if self.sums:
            lines += ["int me = omp_get_thread_num();"]
            lines += [f"T* sum{k} = partial{k} + (size_t)me * C;" for k in range(len(self.sums))]
        lines += ["#pragma omp for schedule(static)", "for (int64_t i = 0; i < R; i++) {"]
        for level in range(max((v.level for v in self.values), default=0) + 1):
            lines += self._level(level, kept)
        lines.append("}")
        lines += [f"std::free(k_{value.name});" for value in kept]
        lines.append("}")
        for k, (_, number) in enumerate(self.sums):
            lines += [
                f"for (int64_t j = 0; j < C; j++) {{ T total = 0; for (int t = 0; t < threads; t++)"
                f" total += partial{k}[(size_t)t * C + j]; p{number}[j] = total; }}",
                f"std::free(partial{k});",
            ]
        return "\n".join([*lines, "}"])

    def _kept(self) -> list[Value]:
        """Full values that a later level than their own reads, unless they are plain inputs."""
        late = [
            source
            for value in self.values
            for source in value.sources
            if source.kind == "full"
            and not source.load
            and value.kind == "full"
            and value.level > source.level
        ]
        return list(dict.fromkeys(late))

    def _level(self, level: int, kept: Sequence[Value]) -> list[str]:
        """Numbers of the row that are known now, then a loop over its columns."""
        reduced = {reduction.result for reduction in self.reductions}
        here = [value for value in self.values if value.level == level]
        lines = [f"{v.ctype} {v.name} = {v.text};" for v in here if v.kind == "column" and v not in reduced]
        lines += [
            f"p{n}[{at}] = {v.name};" for v, n, at in self.stores if v.kind == "column" and v.level == level
        ]
        reductions = [r for r in self.reductions if r.value.level == level]
        lines += [f"T {r.result.name} = {_START[r.how]};" for r in reductions]
        clauses = "".join(
            f" reduction({'+' if r.how == 'sum' else 'max'}:{r.result.name})" for r in reductions
        )
        body = self._columns(level, here, kept, reductions)
        if body:
            lines += [f"#pragma omp simd{clauses}", "for (int64_t j = 0; j < C; j++) {", *body, "}"]
        return lines

    def _columns(
        self, level: int, here: list[Value], kept: Sequence[Value], reductions: Sequence[_Reduction]
    ) -> list[str]:
        full = [value for value in here if value.kind == "full" and not value.load]
        ends = [value for value, _, _ in self.stores] + [value for value, _ in self.sums]
        read = [s for value in full for s in value.sources] + [r.value for r in reductions]
        read += [value for value in ends if value.level == level and value.kind == "full"]
        early = dict.fromkeys(s for s in read if s.kind == "full" and (s.load or s.level < level))
        lines = [f"{s.ctype} {s.name} = {s.text if s.load else f'k_{s.name}[j]'};" for s in early]
        for value in full:
            lines.append(f"{value.ctype} {value.name} = {value.text};")
            if value in kept:
                lines.append(f"k_{value.name}[j] = {value.name};")
        for r in reductions:
            name, new = r.result.name, r.value.name
            lines.append(
                f"{name} += {new};" if r.how == "sum" else f"{name} = {name} > {new} ? {name} : {new};"
            )
        for value, number, at in self.stores:
            if value.level == level and value.kind == "full":
                lines.append(f"p{number}[{at}] = {value.name};")
        for k, (value, _) in enumerate(self.sums):
            if value.level == level:
                lines.append(f"sum{k}[j] += {value.name};")
        return lines
