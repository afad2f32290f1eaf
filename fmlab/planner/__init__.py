"""The planner: what a run will need and how long it will take, by arithmetic on shapes.

    plan("gpt3-175b", chip="a100-80gb", …)        memory and time of a step, line by line; see Plan
    model_shape("gpt3-175b").parameters           174,604,259,328: the same as the model's, without a tensor
    gpt_shape(layers=…, hidden=…, …)              shapes that no preset has

Everything that comes out of here is modelled; what a plan is compared with is measured or quoted.
"""

from fmlab.planner.budget import Budget, chinchilla, chinchilla_loss, training_flops
from fmlab.planner.calculators import (
    Disagreement,
    beside_zero_estimator,
    full_as_causal,
    recompute_as_model,
    six_nd,
    six_nd_off_at,
    sparse_as_dense,
    zero_estimate,
)
from fmlab.planner.calibration import Calibration
from fmlab.planner.cost import Cost, rated_watts, run_cost, training_days
from fmlab.planner.emit import emit
from fmlab.planner.flops import Flops, flops_per_step
from fmlab.planner.goodput import Failures, Goodput, goodput_at, optimal_interval
from fmlab.planner.own import OwnModels
from fmlab.planner.plan import Line, Plan, plan
from fmlab.planner.published import PublishedRun, runs
from fmlab.planner.search import Search, search
from fmlab.planner.serving import ServePlan, serve_plan
from fmlab.planner.shapes import (
    LayerGroup,
    ModelShape,
    bert_shape,
    gpt_shape,
    llama_shape,
    model_shape,
    t5_shape,
)
from fmlab.planner.slips import slips

__all__ = [
    "Budget",
    "Calibration",
    "Cost",
    "Disagreement",
    "Failures",
    "Flops",
    "Goodput",
    "LayerGroup",
    "Line",
    "ModelShape",
    "OwnModels",
    "Plan",
    "PublishedRun",
    "Search",
    "ServePlan",
    "bert_shape",
    "beside_zero_estimator",
    "chinchilla",
    "chinchilla_loss",
    "emit",
    "flops_per_step",
    "full_as_causal",
    "goodput_at",
    "gpt_shape",
    "llama_shape",
    "model_shape",
    "optimal_interval",
    "plan",
    "rated_watts",
    "recompute_as_model",
    "run_cost",
    "runs",
    "search",
    "serve_plan",
    "six_nd",
    "six_nd_off_at",
    "slips",
    "sparse_as_dense",
    "t5_shape",
    "training_days",
    "training_flops",
    "zero_estimate",
]
