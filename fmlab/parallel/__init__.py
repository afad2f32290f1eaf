"""Parallel training: a `Layout` says how a step is spread, an `Engine` runs it, `parity` proves it.

    engine = parallelize(model, Layout(data=2), CausalLM(), lambda named: torch.optim.SGD([p for _, p in
    named])) result = engine.step(micro_batches)       # loss, gradient norm; the weights are updated
    report = parity(model_fn, Layout(data=2)) # the same on one device? loss, every gradient, every weight

One folder for each strategy (ddp/ so far), one file for each production engine (engines/).
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
