"""The cells of the matrix, and a choice of them, small enough for every test run, that covers every pair."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from fmlab.parallel.layout import Layout
from fmlab.parallel.matrix.models import MODELS, in_one_piece
from fmlab.parallel.matrix.strategies import SLOTS, STRATEGIES, combines, layout_of

ENGINES = ("fmlab", "torch", "deepspeed")
PRECISIONS = ("fp64", "fp32", "bf16")
#: Three dimensions on 8 ranks, 2 x 2 x 2, with and without what goes on top.
_THREE_D = (
    ("ddp", "tensor", "1f1b"),
    ("ddp", "sequence", "1f1b"),
    ("zero1", "sequence", "1f1b"),
    ("zero2", "sequence", "gpipe"),
    ("zero3", "tensor", "1f1b"),
    ("fsdp", "sequence", "1f1b"),
    ("zero1", "sequence", "interleaved"),
    ("ddp", "sequence", "zb-h1"),
    ("ddp", "tensor", "ring"),
    ("fsdp", "sequence", "ring"),
    ("zero1", "1f1b", "ring"),
    ("ddp", "sequence", "1f1b", "full"),
    ("zero1", "tensor", "1f1b", "expert"),
)


@dataclass(frozen=True, order=True)
class Cell:
    """Strategies together, on a model, by an engine, in a precision; compared with one device."""

    engine: str
    precision: str
    model: str
    strategies: tuple[str, ...]

    @property
    def key(self) -> str:
        """Its name in the file of results."""
        return "/".join((self.engine, self.precision, self.model, " + ".join(self.strategies)))

    @classmethod
    def named(cls, key: str) -> "Cell":
        """The cell of that key."""
        engine, precision, model, strategies = key.split("/")
        return cls(engine, precision, model, tuple(strategies.split(" + ")))

    @property
    def layout(self) -> Layout:
        """Raises ValueError for strategies that exclude each other."""
        return layout_of(self.strategies, in_one_piece(self.model))

    @property
    def ranks(self) -> int:
        """How many it runs on; 0 if there is no such layout."""
        try:
            return self.layout.world_size
        except ValueError:
            return 0


def pairs() -> list[tuple[str, ...]]:
    """All pairs of strategies of different slots."""
    return [(a, b) for a, b in combinations(STRATEGIES, 2) if combines(a, b)]


def singles(engine: str, precision: str) -> list[Cell]:
    """Every strategy alone, on every model."""
    return [Cell(engine, precision, model, (name,)) for model in MODELS for name in STRATEGIES]


def three_dimensional(engine: str = "fmlab", precision: str = "fp64") -> list[Cell]:
    """Every 3D layout on 8 ranks, on every model."""
    return [Cell(engine, precision, model, names) for names in _THREE_D for model in MODELS]


def all_cells() -> list[Cell]:
    """Every cell, what tells most first: our engine in fp64, then the others."""
    ours = singles("fmlab", "fp64")
    ours += [Cell("fmlab", "fp64", model, pair) for model in MODELS for pair in pairs()]
    ours += three_dimensional()
    for precision in PRECISIONS[1:]:
        ours += singles("fmlab", precision)
    theirs = [cell for engine in ENGINES[1:] for cell in singles(engine, "fp32")]
    theirs += [Cell(engine, "fp32", "gpt", pair) for engine in ENGINES[1:] for pair in pairs()]
    return ours + theirs


# ---- pairwise covering -------------------------------------------------------------------------------------

Row = dict[str, str]


def covering_cells(
    runs: Callable[[Cell], bool], most_ranks: int = 4, chosen: Sequence[Cell] = ()
) -> list[Cell]:
    """Cells of many strategies each, so that every pair of strategies, and every strategy with every model
    and precision, is in one of them.

    runs: whether a cell of one or two strategies is known to run; pairs that do not are left out, and no cell
    contains one. chosen: cells to begin with. Greedy and always the same: each cell begins with the first
    pair that is not yet covered and takes from every other slot what covers most.
    """
    factors: dict[str, list[str]] = {"model": list(MODELS), "precision": ["fp64", "fp32"]}
    for slot in SLOTS:
        factors[slot] = ["", *(name for name, s in STRATEGIES.items() if s.slot == slot)]
    fits = _Fits(runs, most_ranks)
    cells, rows = list(chosen), [_row(cell) for cell in chosen]
    wanted = [
        pair for pair in _all_pairs(factors) if not any(_has(row, pair) for row in rows) and fits(dict(pair))
    ]
    while wanted:
        row: Row = dict(wanted[0])
        for factor in factors:
            if factor in row:
                continue
            scored = [
                (sum(_has(row | {factor: level}, pair) for pair in wanted), -number, level)
                for number, level in enumerate(factors[factor])
                if fits(row | {factor: level})
            ]
            row[factor] = max(scored)[2] if scored else ""
        cells.append(_cell(row))
        left = [pair for pair in wanted if not _has(row, pair)]
        assert len(left) < len(wanted)
        wanted = left
    return cells


def _all_pairs(factors: dict[str, list[str]]) -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
    for a, b in combinations(factors, 2):
        for left in factors[a]:
            for right in factors[b]:
                if left and right and {a, b} != {"model", "precision"}:
                    yield (a, left), (b, right)


def _has(row: Row, pair: Sequence[tuple[str, str]]) -> bool:
    return all(row.get(factor) == level for factor, level in pair)


def _row(cell: Cell) -> Row:
    row = {"model": cell.model, "precision": cell.precision}
    return row | {STRATEGIES[name].slot: name for name in cell.strategies}


def _cell(row: Row) -> Cell:
    names = tuple(name for name in STRATEGIES if name in row.values())
    return Cell("fmlab", row.get("precision", "fp64"), row.get("model", next(iter(MODELS))), names)


class _Fits:
    """Whether a row, or the beginning of one, can be run as far as is known."""

    def __init__(self, runs: Callable[[Cell], bool], most_ranks: int) -> None:
        self.runs, self.most_ranks = runs, most_ranks
        self._known: dict[Cell, bool] = {}

    def __call__(self, row: Row) -> bool:
        names = _cell(row).strategies
        models = [row["model"]] if "model" in row else list(MODELS)
        return any(self._model(model, names) for model in models)

    def _model(self, model: str, names: tuple[str, ...]) -> bool:
        whole = Cell("fmlab", "fp64", model, names)
        if not names or not 0 < whole.ranks <= self.most_ranks:
            return not names
        parts = [(name,) for name in names] + list(combinations(names, 2))
        return all(self._runs(Cell("fmlab", "fp64", model, part)) for part in parts)

    def _runs(self, cell: Cell) -> bool:
        if cell not in self._known:
            self._known[cell] = self.runs(cell)
        return self._known[cell]
