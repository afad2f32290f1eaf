"""The C++ of a program over rows: for each row, a loop over its columns for each level.

Values that a later level reads again are kept in a buffer of one row, which stays in the nearest cache. Rows
are shared between threads; sums over rows are added up by each thread and then together, in the same order
every time.
"""

from collections.abc import Iterable, Sequence

from fmlab.compiler.codegen.rows import EVERY, NARROW, Reduction, RowProgram, Store, Value

_START = {"sum": "T(0)", "max": "-std::numeric_limits<T>::infinity()"}


NEAR = 4096  # columns up to which a row of a value lies on the stack
FAR = 2**26  # bytes of a result that is written past the caches: they would not hold it until it is read
PIECE = 1024  # columns that are written past the caches at once


def head(program: RowProgram, name: str, columns: int | None = None) -> list[str]:
    """The first lines of a function, which returns the number of the check that failed, or 0.

    columns: how many, where the compiler may know: loops of a known length need no rest.
    """
    known = [] if columns is None else [f"constexpr int64_t C = {columns};"]
    lines = [
        f'extern "C" int {name}(void** p, int64_t R, int64_t {"" if known else "C"}, int threads) {{',
        *known,
        f"using T = {program.dtype};",
        "int bad = 0;",
    ]
    for number, ctype, reads in dict.fromkeys(program.pointers):
        const = "const " if reads else ""
        lines.append(f"{const}{ctype}* p{number} = ({const}{ctype}*)p[{number}];")
    return lines


def stored(value: str, ctype: str) -> str:
    """A value as it is written: rounded to 16 bits, where those are wanted."""
    return f"{NARROW[ctype][1]}({value})" if ctype in NARROW else value


def row_function(program: RowProgram, name: str, columns: int, rows: int = 0) -> str:
    """The function `int name(void** p, long R, long C, int threads)`. rows: how many, if that is known: it
    decides how large results are written, and holds for others too."""
    if program.flat:
        return flat_function(program, name)
    return "\n".join(Rows(program, columns, rows).function(name))


def flat_function(program: RowProgram, name: str) -> str:
    """One loop over all elements, where each is on its own: the rows may have any length."""
    needed = program.needed()
    values = [v for v in program.values if v in needed]
    lines = head(program, name)
    lines += ["const int64_t i = 0, N = R * C;"]
    lines += [f"const {v.ctype} {v.name} = {v.text};" for v in values if v.kind == "column"]
    lines += ["#pragma omp parallel for simd schedule(static) num_threads(threads)"]
    lines += ["for (int64_t j = 0; j < N; j++) {"]
    lines += [f"{v.ctype} {v.name} = {v.text};" for v in values if v.kind == "full"]
    lines += [f"p{s.number}[j] = {stored(s.value.name, s.ctype)};" for s in program.stores]
    return "\n".join([*lines, "}", "return bad;", "}"])


class Rows:
    """Writes the loops of a program over rows of `columns` numbers."""

    def __init__(self, program: RowProgram, columns: int, rows: int = 0):
        self.program, self.columns = program, columns
        self.size = rows * columns  # elements of a full value
        self.needed = program.needed()
        self.kept = program.kept(self.needed)
        # a value that is written whole anyway is read again from there
        wide = {s.value: f"p{s.number}[{s.where}]" for s in program.stores if s.ctype == s.value.ctype}
        self.homes = {v: wide.get(v, f"k_{v.name}[j]") for v in self.kept}
        self.buffers = [v for v in self.kept if v not in wide]

    def function(self, name: str) -> list[str]:
        program = self.program
        sums, totals = range(len(program.sums)), range(len(program.totals))
        lines = head(program, name, self.columns)
        lines += [f"T* partial{k} = (T*)std::calloc((size_t)threads * C, sizeof(T));" for k in sums]
        lines += [f"double* part{k} = (double*)std::calloc(threads, sizeof(double));" for k in totals]
        lines += ["#pragma omp parallel num_threads(threads)", "{"]
        near = self.columns <= NEAR
        for v in self.buffers:
            taken = f"({v.ctype}*)std::malloc(C * sizeof({v.ctype}))"
            lines.append(
                f"alignas(64) {v.ctype} k_{v.name}[C];" if near else f"{v.ctype}* k_{v.name} = {taken};"
            )
        far = [s for s in program.stores if self._far(s)]
        read = {number for number, kind, _ in program.read if kind == "full"}
        for s in far:
            others = [f"(void*)p{s.number} != (void*)p{number}" for number in sorted(read)]
            lines.append(f"const bool past{s.number} = {' && '.join(others) or 'true'};")  # not in place
            lines.append(f"alignas(64) {s.ctype} far{s.number}[{PIECE}];")
        if sums or totals:
            lines += ["int me = omp_get_thread_num();"]
        lines += [f"T* sum{k} = partial{k} + (size_t)me * C;" for k in sums]
        lines += [f"double mine{k} = 0;" for k in totals]
        lines += ["#pragma omp for schedule(static)", "for (int64_t i = 0; i < R; i++) {"]
        for level in range(program.levels):
            lines += self._level(level)
        lines.append("}")
        lines += ["f_streamed();"] if far else []
        lines += [f"part{k}[me] = mine{k};" for k in totals]
        lines += [] if near else [f"std::free(k_{value.name});" for value in self.buffers]
        lines.append("}")
        return [*lines, *self._ends(), "return bad;", "}"]

    def _ends(self) -> list[str]:
        """Add up what the threads have, and write it."""
        ctypes = {number: ctype for number, ctype, _ in self.program.pointers}
        lines = []
        for k, (_, number) in enumerate(self.program.sums):
            lines += [
                f"for (int64_t j = 0; j < C; j++) {{ T all = 0; for (int t = 0; t < threads; t++)"
                f" all += partial{k}[(size_t)t * C + j]; p{number}[j] = {stored('all', ctypes[number])}; }}",
                f"std::free(partial{k});",
            ]
        for k in range(len(self.program.totals)):
            lines += [
                f"double total{k} = 0;",
                f"for (int t = 0; t < threads; t++) total{k} += part{k}[t];",
                f"std::free(part{k});",
            ]
        for number, expression in self.program.ends:
            lines.append(f"p{number}[0] = {stored(f'(T)({expression})', ctypes[number])};")
        return lines

    def _level(self, level: int) -> list[str]:
        """Numbers of the row that are known now, then a loop over its columns."""
        program = self.program
        reduced = program.reduced()
        lines = []
        for value in program.values:
            if value.kind == "column" and value.level == level and value in self.needed:
                if value.at is not None:
                    lines += self._picked(value)
                elif value not in reduced:
                    lines.append(f"{value.ctype} {value.name} = {value.text};")
        lines += [
            f"p{s.number}[i] = {stored(s.value.name, s.ctype)};"
            for s in program.stores
            if s.value.kind == "column" and s.value.level == level
        ]
        lines += [f"mine{k} += {v.name};" for k, v in enumerate(program.totals) if v.level == level]
        for k, (value, _) in enumerate(program.checks):
            if value.level == level:
                lines += [f"if ({value.name}) {{", "#pragma omp atomic write", f"bad = {k + 1};", "}"]
        for r in program.reductions:
            if r.value.level == level and r.power in self.needed:
                lines += self._blocks(r, level)
        return lines + self._loop(level)

    def _picked(self, value: Value) -> list[str]:
        """The full value of one column, worked out by itself."""
        assert value.at is not None
        (source, at) = value.sources
        lines = [f"T {value.name};", "{", f"const int64_t j = {at.name};"]
        lines += self._lines([source], value.level, keep=False)
        return [*lines, f"{value.name} = {source.name};", "}"]

    def _blocks(self, r: Reduction, level: int) -> list[str]:
        """Maximum and sum of e^(value - maximum), block by block: each is read once from afar."""
        assert r.power is not None
        top, total, x = r.result.name, r.power.name, r.value.name
        inside = self._lines([r.value], level, keep=False)
        return [
            f"T {top} = -std::numeric_limits<T>::infinity(), {total} = T(0);",
            f"for (int64_t b = 0; b < C; b += {NEAR}) {{",
            f"const int64_t e = b + {NEAR} < C ? b + {NEAR} : C;",
            f"T most = {top}, more = T(0);",
            "#pragma omp simd reduction(max:most)",
            "for (int64_t j = b; j < e; j++) {",
            *inside,
            f"most = most > {x} ? most : {x};",
            "}",
            # of -inf alone the sum is 0 so far, and not e^(-inf + inf)
            "const T base = most > -std::numeric_limits<T>::infinity() ? most : T(0);",
            "#pragma omp simd reduction(+:more)",
            "for (int64_t j = b; j < e; j++) {",
            *inside,
            f"more += f_exp_down({x} - base);",
            "}",
            f"{total} = {total} * f_exp_down({top} - base) + more;",
            f"{top} = most;",
            "}",
        ]

    def last_reads(self) -> dict[Value, int]:
        """The level at which each full value is last read."""
        last: dict[Value, int] = {}
        for level in range(self.program.levels):
            picked = [v.sources[0] for v in self.needed if v.at is not None and v.level == level]
            picked += [r.value for r in self.program.reductions if r.value.level == level]
            last |= dict.fromkeys(self._leading(self._wanted(level) + picked, level), level)
        return last

    def _wanted(self, level: int) -> list[Value]:
        """Full values that a loop is for."""
        program = self.program
        wanted = [r.value for r in program.reductions if r.result in self.needed and r.power is None]
        wanted += [store.value for store in program.stores] + [value for value, _ in program.sums] + self.kept
        return [value for value in wanted if value.kind == "full" and value.level == level]

    def _loop(self, level: int) -> list[str]:
        program = self.program
        reductions = [r for r in program.reductions if r.value.level == level and r.result in self.needed]
        reductions = [r for r in reductions if r.power is None]
        stores = [s for s in program.stores if s.value.kind == "full" and s.value.level == level]
        sums = [(k, value) for k, (value, _) in enumerate(program.sums) if value.level == level]
        wanted = self._wanted(level)
        if not wanted:
            return []
        lines = [f"T {r.result.name} = {_START[r.how]};" for r in reductions]
        clauses = "".join(
            f" reduction({'+' if r.how == 'sum' else 'max'}:{r.result.name})" for r in reductions
        )
        far = [s for s in stores if self._far(s)]
        first, last = ("b", "e") if far else ("0", "C")
        lines += [f"#pragma omp simd{clauses}", f"for (int64_t j = {first}; j < {last}; j++) {{"]
        lines += self._lines(wanted, level, keep=True)
        lines += [_more(r) for r in reductions]
        for s in stores:
            place = f"far{s.number}[j - b]" if s in far else f"p{s.number}[{s.where}]"
            lines.append(f"{place} = {stored(s.value.name, s.ctype)};")
        lines += [f"sum{k}[j] += {value.name};" for k, value in sums]
        return _in_pieces([*lines, "}"], far, len(reductions)) if far else [*lines, "}"]

    def _far(self, store: Store) -> bool:
        """Whether a result is written past the caches: it is large, and no later loop reads it again."""
        size = {"T": 4 if self.program.dtype == "float" else 8, "bool": 1, "int64_t": 8}.get(store.ctype, 2)
        whole = store.value.kind == "full" and store.where == EVERY and store.value not in self.homes
        return whole and self.size * size >= FAR

    def _lines(self, wanted: Sequence[Value], level: int, keep: bool) -> list[str]:
        """The full values that lead to those `wanted` at column j, in order; earlier from their homes."""
        lines = []
        for value in self._leading(wanted, level):
            if value.level < level and value in self.homes:
                lines.append(f"{value.ctype} {value.name} = {self.homes[value]};")
                continue
            lines.append(f"{value.ctype} {value.name} = {value.text};")
            if keep and value in self.buffers and value.level == level:
                lines.append(f"{self.homes[value]} = {value.name};")
        return lines

    def _leading(self, wanted: Iterable[Value], level: int) -> list[Value]:
        """Full values needed for those wanted, in the order they were made."""
        found: set[Value] = set()
        stack = list(wanted)
        while stack:
            value = stack.pop()
            if value.kind != "full" or value in found:
                continue
            found.add(value)
            if not (value.level < level and value in self.homes):
                stack += value.sources
        return [value for value in self.program.values if value in found]


def _in_pieces(loop: list[str], far: list[Store], starts: int) -> list[str]:
    """A loop over columns b..e, behind `starts` lines that stay outside, done piece by piece; what goes
    past the caches is gathered in a piece first."""
    lines = loop[:starts]
    lines += [f"for (int64_t b = 0; b < C; b += {PIECE}) {{"]
    lines += [f"const int64_t e = b + {PIECE} < C ? b + {PIECE} : C;", *loop[starts:]]
    for s in far:
        piece, target = f"far{s.number}", f"p{s.number} + i * C + b"
        lines.append(f"f_stream({target}, {piece}, (e - b) * sizeof *{piece}, past{s.number});")
    return [*lines, "}"]


def _more(reduction: Reduction) -> str:
    name, new = reduction.result.name, reduction.value.name
    return f"{name} += {new};" if reduction.how == "sum" else f"{name} = {name} > {new} ? {name} : {new};"
