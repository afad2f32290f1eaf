"""docs/parity.md: the whole matrix, unrun cells as unrun, refusals in the words of who refused them."""

from collections.abc import Callable, Iterable, Sequence

from fmlab.parallel.matrix.cells import ENGINES, PRECISIONS, Cell, all_cells, pairs, three_dimensional
from fmlab.parallel.matrix.models import MODELS, WHAT
from fmlab.parallel.matrix.results import KINDS, Outcome, Results
from fmlab.parallel.matrix.strategies import STRATEGIES

Names = tuple[str, ...]
Shown = Callable[[Cell], str]

_HEAD = """\
# The parity matrix

Made by `make parity`; do not edit. Each cell trains a small model for two steps under a layout, and one
device with the same weights and data, and compares the loss, the norm of the gradient, every gradient and
every updated weight, clipped, under SGD (`fmlab.parallel.parity`). The error of each gradient that is allowed
is 1e-12 in fp64, 2e-5 in fp32, and in bf16 twice the error that bf16 makes on one device.

`=` equal to one device · a number: refused, with the reason below under that number · `DIFFERS` · `FAILED` ·
`unrun`

"""


class _Reasons:
    """Numbers the reasons in the order in which the page meets them."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def __call__(self, reason: str) -> int:
        return self.numbers.setdefault(reason, len(self.numbers) + 1)


def page(results: Results, covering: Sequence[Cell]) -> str:
    """The page, from what was found."""
    reasons = _Reasons()

    def shown(cell: Cell) -> str:
        outcome = results[cell]
        if outcome.kind == "refused":
            return str(reasons(outcome.detail))
        if outcome.kind in ("differs", "failed"):
            return f"**{outcome.kind.upper()}** ({reasons(outcome.detail)})"
        return "=" if outcome.kind == "equal" else outcome.kind

    parts = [_HEAD, _models(), _totals(results, [*all_cells(), *covering])]
    rows: dict[Names, str] = {(name,): name for name in STRATEGIES}
    for precision in PRECISIONS:
        parts.append(_table(f"Each strategy, by hand, {precision}", "fmlab", precision, rows, shown))
    for engine in ENGINES[1:]:
        parts.append(_table(f"Each strategy, engine {engine}, fp32", engine, "fp32", rows, shown))
    named = {pair: " + ".join(pair) for pair in pairs()}
    three = {cell.strategies: " + ".join(cell.strategies) for cell in three_dimensional()}
    parts.append(_table("Three dimensions on 8 ranks, by hand, fp64", "fmlab", "fp64", three, shown))
    parts.append(_table("Pairs, by hand, fp64", "fmlab", "fp64", named, shown))
    parts.append(_engines_pairs(named, shown))
    parts.append(_covering(covering, shown))
    listed = "".join(f"{number}. {_plain(reason)}\n" for reason, number in reasons.numbers.items())
    return "".join([*parts, "## Reasons\n\n", listed])


def _models() -> str:
    return "".join(f"- `{name}`: {WHAT[name]}\n" for name in MODELS) + "\n"


def _totals(results: Results, cells: Iterable[Cell]) -> str:
    counts = dict.fromkeys(KINDS, 0)
    for cell in dict.fromkeys(cells):
        counts[results[cell].kind] += 1
    return (
        f"Of {sum(counts.values())} cells: "
        + ", ".join(f"{n} {kind}" for kind, n in counts.items())
        + ".\n\n"
    )


def _table(title: str, engine: str, precision: str, rows: dict[Names, str], shown: Shown) -> str:
    lines = [f"## {title}\n", f"| | {' | '.join(MODELS)} |", "|---|" + "---|" * len(MODELS)]
    for names, label in rows.items():
        cells = [shown(Cell(engine, precision, model, names)) for model in MODELS]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n\n"


def _engines_pairs(rows: dict[Names, str], shown: Shown) -> str:
    engines = ENGINES[1:]
    lines = [
        "## Pairs on the GPT, the other engines, fp32\n",
        f"| | {' | '.join(engines)} |",
        "|---|---|---|",
    ]
    for names, label in rows.items():
        cells = [shown(Cell(engine, "fp32", "gpt", names)) for engine in engines]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n\n"


def _covering(cells: Sequence[Cell], shown: Shown) -> str:
    """Many strategies in one cell: what every test run repeats."""
    lines = [
        "## Many together\n",
        "Every pair of strategies that runs, and each with every model and in fp64 and fp32, is in one of\n"
        "these cells; `make test` runs them all.\n",
        "| strategies | model | | ranks | |",
        "|---|---|---|---|---|",
    ]
    for cell in cells:
        found = shown(cell)
        lines.append(
            f"| {' + '.join(cell.strategies)} | {cell.model} | {cell.precision} | {cell.ranks} | {found} |"
        )
    return "\n".join(lines) + "\n\n"


def _plain(reason: str) -> str:
    """A reason as text of a page: what Markdown would take for a sign of its own is kept."""
    return reason.replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")


def outcome_text(outcome: Outcome) -> str:
    """An outcome in a line."""
    return f"{outcome.kind} {outcome.detail}".strip()
