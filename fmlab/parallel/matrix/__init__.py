"""The parity matrix: every strategy, every pair of them and 3D layouts, over models, engines and precisions.

models.py     small models with what is awkward: an odd vocabulary, uneven layers, ties, shared heads
strategies.py the strategies by name, and which exclude each other
cells.py      the cells of the matrix, and a small choice of them that covers every pair
run.py        one cell: equal to one device, different, or refused with a reason
results.py    what was found, in a file
page.py       docs/parity.md

`make parity` runs every cell and writes the page.
"""

from fmlab.parallel.matrix.cells import Cell, all_cells, covering_cells, three_dimensional
from fmlab.parallel.matrix.results import Outcome, Results
from fmlab.parallel.matrix.run import Pools, run_cell

__all__ = [
    "Cell",
    "Outcome",
    "Pools",
    "Results",
    "all_cells",
    "covering_cells",
    "run_cell",
    "three_dimensional",
]
