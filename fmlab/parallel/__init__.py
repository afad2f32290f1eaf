"""Parallel training: a `Layout` says how a step is spread, an `Engine` runs it, `parity` proves it.

    layout = Layout(data=2, tensor=2, zero=1)
    engine = parallelize(model, layout, objective, optimizer)
    result = engine.step(micro_batches)  # loss, gradient norm; the weights are updated
    report = parity(model_fn, layout)    # the same on one device? loss, every gradient, every weight

One folder for each strategy, one for the production engines. Who reads this room to learn begins with grid,
mesh and ledger, goes on with composed, which puts an engine together, and then with the strategies.
"""

from fmlab.parallel.engine import Engine, StepResult
from fmlab.parallel.layout import Layout
from fmlab.parallel.ledger import Ledger
from fmlab.parallel.parity_report import ParityError, ParityReport
from fmlab.parallel.parity_run import parity
from fmlab.parallel.select import ENGINES, parallelize

__all__ = [
    "ENGINES",
    "Engine",
    "Layout",
    "Ledger",
    "ParityError",
    "ParityReport",
    "StepResult",
    "parallelize",
    "parity",
]
