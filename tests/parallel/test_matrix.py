"""The parity matrix: the cells that cover every pair of strategies run, and the page tells what was found."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

from fmlab import Ranks
from fmlab.parallel import Layout
from fmlab.parallel.matrix import Cell, Outcome, Pools, Results, all_cells, run_cell, three_dimensional
from fmlab.parallel.matrix.cells import covering_cells, singles
from fmlab.parallel.matrix.models import MODELS
from fmlab.parallel.matrix.page import page
from fmlab.parallel.matrix.run import refusal
from fmlab.parallel.matrix.strategies import STRATEGIES, combines, layout_of
from tests.parallel import common

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"
RESULTS = Results.load(DOCS / "parity.json")
#: On 8 ranks: with ZeRO, with FSDP, with experts, and a third axis that is context.
EIGHT = [
    replace(cell, precision=precision)
    for model, strategies, precision in (
        ("llama", ("zero1", "sequence", "1f1b"), "fp64"),
        ("gpt", ("fsdp", "sequence", "1f1b"), "fp64"),
        ("t5", ("zero3", "tensor", "1f1b"), "fp64"),
        ("bert", ("fsdp", "sequence", "ring"), "fp32"),
        ("moe", ("zero1", "tensor", "1f1b", "expert"), "fp64"),
    )
    for cell in three_dimensional()
    if (cell.model, cell.strategies) == (model, strategies)
]


# --- page, file and code are one ---


def test_the_page_is_made_of_the_file_and_the_code() -> None:
    assert (DOCS / "parity.md").read_text() == page(RESULTS, RESULTS.covering), "run: make parity"


def test_every_cell_is_there_once_and_none_of_ours_is_wrong() -> None:
    cells = [*all_cells(), *RESULTS.covering]
    keys = {cell.key for cell in cells}
    assert len(all_cells()) == len({cell.key for cell in all_cells()})
    assert RESULTS.outcomes.keys() <= keys
    ours = {key: o for key, o in RESULTS.outcomes.items() if key.startswith("fmlab/")}
    assert not {key: o for key, o in ours.items() if o.kind not in ("equal", "refused")}
    assert all(Cell.named(cell.key) == cell for cell in cells)


def test_what_shapes_alone_refuse_is_refused_in_the_same_words() -> None:
    for cell in singles("fmlab", "fp64"):
        found, said = RESULTS[cell], refusal(cell)
        if said:
            assert found == Outcome("refused", said), cell.key
        else:
            assert found.kind != "unrun", cell.key


def test_the_chosen_cells_cover_every_pair_that_runs() -> None:
    together = {(cell.model, pair) for cell in RESULTS.covering for pair in combinations(cell.strategies, 2)}
    alone = {(cell.model, name) for cell in RESULTS.covering for name in cell.strategies}
    covered = {pair for _, pair in together}
    for a, b in combinations(STRATEGIES, 2):
        fits = combines(a, b) and layout_fits((a, b))
        if fits and any(RESULTS[Cell("fmlab", "fp64", model, (a, b))].kind == "equal" for model in MODELS):
            assert (a, b) in covered
    for cell in singles("fmlab", "fp64"):
        if RESULTS[cell].kind == "equal":
            assert (cell.model, *cell.strategies) in alone


def layout_fits(names: tuple[str, ...]) -> bool:
    try:
        return layout_of(names).world_size <= 4
    except ValueError:
        return False


def test_greedy_covering_on_a_small_matrix() -> None:
    few = ("zero1", "tensor", "sequence", "full")
    chosen = covering_cells(lambda cell: set(cell.strategies) <= set(few) and cell.model == "gpt")
    pairs = {pair for cell in chosen for pair in combinations(cell.strategies, 2)}
    assert pairs == {
        ("zero1", "tensor"),
        ("zero1", "sequence"),
        ("zero1", "full"),
        ("tensor", "full"),
        ("sequence", "full"),
    }
    assert len(chosen) < len(pairs) * 2


def test_strategies_merge_and_exclude() -> None:
    assert layout_of(("ddp", "accumulation", "1f1b")) == Layout(data=2, pipeline=2, micro_batches=4)
    assert layout_of(("offload states",)) == Layout(data=2, zero=1, offload="optimizer")
    assert layout_of(("zero2", "offload states")) == Layout(data=2, zero=2, offload="optimizer")
    assert layout_of(("1f1b",), in_one_piece=True) == Layout(pipeline=2)
    with pytest.raises(ValueError, match="needs divided parameters"):
        layout_of(("zero1", "offload all"))


def test_outcomes_survive_the_file(tmp_path: Path) -> None:
    results = Results(covering=[Cell("fmlab", "fp32", "gpt", ("ddp", "full"))])
    results[Cell("fmlab", "fp64", "gpt", ("ddp",))] = Outcome("equal", "0.25")
    results[Cell("torch", "fp32", "t5", ("ring",))] = Outcome("refused", "fails on CPU | see docs")
    results.save(tmp_path / "x.json")
    again = Results.load(tmp_path / "x.json")
    assert (again.outcomes, again.covering) == (results.outcomes, results.covering)
    text = page(again, again.covering)
    assert "| ddp | = | unrun |" in text
    assert "1. fails on CPU | see docs" in text


# --- the cells ---


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    with Pools() as made:
        yield made


class Shared:
    """The session's pools for 2 and 4 ranks; one of 8 only for those who ask."""

    def __init__(self, two: Ranks, four: Ranks, others: Pools) -> None:
        self.two, self.four, self.others = two, four, others

    def of(self, size: int) -> Ranks | None:
        return {2: self.two, 4: self.four}.get(size) or self.others.of(size)


@pytest.fixture
def shared(ranks2: Ranks, ranks4: Ranks, pools: Pools) -> Shared:
    return Shared(ranks2, ranks4, pools)


@pytest.mark.multirank
@pytest.mark.matrix
@pytest.mark.parametrize("cell", RESULTS.covering, ids=lambda cell: cell.key)
def test_many_strategies_together_equal_one_device(shared: Shared, cell: Cell) -> None:
    outcome = run_cell(cell, shared.of(cell.ranks))
    assert outcome.kind == "equal", outcome.detail


@pytest.mark.multirank
@pytest.mark.matrix
@pytest.mark.parametrize("cell", EIGHT, ids=lambda cell: cell.key)
def test_three_dimensions_on_eight_ranks(shared: Shared, cell: Cell) -> None:
    outcome = run_cell(cell, shared.of(8))
    assert outcome.kind == "equal", outcome


@pytest.mark.multirank
def test_a_cell_that_is_wrong_or_refused_on_the_ranks_says_so(
    ranks2: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = Cell("fmlab", "fp64", "moe", ("sequence",))
    assert run_cell(cell, ranks2) == RESULTS[cell]
    assert RESULTS[cell].kind == "refused"

    def wrong(*args: object, **kwargs: object) -> object:
        from fmlab.parallel import parity

        model, layout, _ = args
        return parity(model, layout, common.MeanOfMeans, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr("fmlab.parallel.matrix.run.parity", wrong)
    found = run_cell(Cell("fmlab", "fp64", "gpt", ("ddp",)), ranks2)
    assert (found.kind, "weighted by their counts" in found.detail) == ("differs", True)
