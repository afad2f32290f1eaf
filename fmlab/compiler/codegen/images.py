"""The C++ of a program over images: group norm and what joins it.

Images lie in memory pixel by pixel, a pixel's channels side by side (channels_last): a row is a pixel, and a
sum goes over all pixels of an image and over the channels of a group. For each image and block of channels
(whole groups, so that nobody else needs their sums): a loop over the pixels for each level. A block is
narrow, so that its share of an image stays in a nearby cache between the levels.
"""

from collections.abc import Sequence

from fmlab.compiler.codegen.rows import RowProgram, Value
from fmlab.compiler.codegen.text import head, stored

LANES = 16  # fp32 numbers of the widest vector
NARROWEST = 48  # channels of a block


def image_function(program: RowProgram, name: str, columns: int) -> str:
    """The function `int name(void** p, long R, long C, int threads)`, R = images * pixels."""
    assert program.pixels
    assert program.groups
    return "\n".join(Images(program, columns).function(name))


class Images:
    """Writes the loops of a program over images of `columns` channels.

    Numbers of an image's channel are arrays over the channels of a block, a_v3[j - from].
    """

    def __init__(self, program: RowProgram, columns: int):
        self.program, self.columns = program, columns
        self.block = block(columns, program.groups)
        self.needed = program.needed()
        self.channels = [v for v in program.values if v.kind == "column" and v in self.needed]

    def function(self, name: str) -> list[str]:
        program = self.program
        sums = range(len(program.sums))
        even = self.columns % self.block == 0  # then every block has a length that the compiler knows
        lines = head(program, name, self.columns)
        lines += [
            f"constexpr int64_t P = {program.pixels}, G = {program.groups}, D = C / G, B = {self.block};",
            "const int64_t N = R / P, blocks = (C + B - 1) / B;",
        ]
        lines += [f"T* sum{k} = (T*)std::calloc((size_t)N * C, sizeof(T));" for k in sums]
        lines += ["#pragma omp parallel num_threads(threads)", "{"]
        lines += [f"alignas(64) {v.ctype} a_{v.name}[B];" for v in self.channels]
        lines += [
            "#pragma omp for collapse(2) schedule(static)",
            "for (int64_t n = 0; n < N; n++) for (int64_t b = 0; b < blocks; b++) {",
            f"const int64_t from = b * B, to = {'from + B' if even else 'from + B < C ? from + B : C'};",
        ]
        for level in range(program.levels):
            lines += self._channels(level) + self._pixels(level)
        lines.append("}")
        lines.append("}")
        ctypes = {number: ctype for number, ctype, _ in program.pointers}
        for k, (_, number) in enumerate(program.sums):
            lines += [
                f"for (int64_t j = 0; j < C; j++) {{ T all = 0; for (int64_t n = 0; n < N; n++)"
                f" all += sum{k}[n * C + j]; p{number}[j] = {stored('all', ctypes[number])}; }}",
                f"std::free(sum{k});",
            ]
        return [*lines, "return bad;", "}"]

    def _channels(self, level: int) -> list[str]:
        """Sums of the level before, over groups; then numbers of each channel."""
        lines = []
        results = [r.result for r in self.program.reductions if r.result in self.needed]
        for result in results:
            if result.level == level:
                a = f"a_{result.name}"
                lines += [
                    "for (int64_t g = 0; g < to - from; g += D) { T all = 0;",
                    f"for (int64_t j = g; j < g + D; j++) all += {a}[j];",
                    f"for (int64_t j = g; j < g + D; j++) {a}[j] = all; }}",
                ]
        here = [v for v in self.channels if v.level == level and v not in results]
        ends = [s for s in self.program.stores if s.value.kind == "column" and s.value.level == level]
        if here or ends:
            read = dict.fromkeys(s for v in here for s in v.sources if s not in here)
            read |= dict.fromkeys(s.value for s in ends if s.value not in here)
            lines += ["for (int64_t j = from; j < to; j++) {", *map(_from_array, read)]
            for value in here:
                lines += [f"{value.ctype} {value.name} = {value.text};"]
                lines += [f"a_{value.name}[j - from] = {value.name};"]
            lines += [
                f"if (j % D == 0) p{s.number}[n * G + j / D] = {stored(s.value.name, s.ctype)};" for s in ends
            ]
            lines.append("}")
        return lines

    def last_reads(self) -> dict[Value, int]:
        """The level at which each full value is last read."""
        last: dict[Value, int] = {}
        for level in range(self.program.levels):
            last |= dict.fromkeys(self._leading(self._wanted(level))[0], level)
        return last

    def _wanted(self, level: int) -> list[Value]:
        """Full values that a loop is for."""
        program = self.program
        wanted = [r.value for r in program.reductions if r.result in self.needed]
        wanted += [store.value for store in program.stores] + [value for value, _ in program.sums]
        return [value for value in wanted if value.kind == "full" and value.level == level]

    def _pixels(self, level: int) -> list[str]:
        """A loop over the pixels, and in it one over the channels of the block."""
        program = self.program
        reductions = [r for r in program.reductions if r.value.level == level and r.result in self.needed]
        stores = [s for s in program.stores if s.value.kind == "full" and s.value.level == level]
        sums = [(k, value) for k, (value, _) in enumerate(program.sums) if value.level == level]
        wanted = self._wanted(level)
        if not wanted:
            return []
        full, arrays = self._leading(wanted)
        lines = [f"std::memset(a_{r.result.name}, 0, B * sizeof(T));" for r in reductions]
        lines += [
            "for (int64_t i = n * P; i < (n + 1) * P; i++) {",
            "#pragma omp simd",
            "for (int64_t j = from; j < to; j++) {",
            *map(_from_array, arrays),
            *(f"{v.ctype} {v.name} = {v.text};" for v in full),
            *(f"a_{r.result.name}[j - from] += {r.value.name};" for r in reductions),
            *(f"p{s.number}[{s.where}] = {stored(s.value.name, s.ctype)};" for s in stores),
            *(f"sum{k}[n * C + j] += {v.name};" for k, v in sums),
        ]
        return [*lines, "}", "}"]

    def _leading(self, wanted: Sequence[Value]) -> tuple[list[Value], list[Value]]:
        """Full values needed for those wanted (all computed again in each level), and channels' numbers."""
        found: set[Value] = set()
        stack = list(wanted)
        while stack:
            value = stack.pop()
            if value in found:
                continue
            found.add(value)
            if value.kind == "full":
                stack += value.sources
        ordered = [value for value in self.program.values if value in found]
        return [v for v in ordered if v.kind == "full"], [v for v in ordered if v.kind == "column"]


def _from_array(value: Value) -> str:
    return f"const {value.ctype} {value.name} = a_{value.name}[j - from];"


def block(channels: int, groups: int) -> int:
    """Channels of a block: whole groups and whole vectors, or all channels where there are fewer."""
    size = channels // groups
    wide = size
    while wide < NARROWEST or wide % LANES:
        wide += size
    return min(wide, channels)
