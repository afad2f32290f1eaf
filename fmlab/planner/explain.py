"""The numbers behind each line of a plan, as arithmetic that anybody can do again.

    numbers(plan, "moments")          "1,462,163,968 parameters x 8 bytes / 8 data ranks"
    numbers(plan, "tensor messages")  "192 micro-batches x 0.00962 s"

Words are words; numbers, x, /, +, - and brackets give the line. Empty where a line is a single look-up.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from fmlab.planner import time
from fmlab.planner.stages import in_flight, parameters_of, parts_of_stage

if TYPE_CHECKING:
    from fmlab.planner.plan import Plan

#: line of memory -> (field of States, from which stage of ZeRO on data ranks divide it)
_STATES = {"weights": 3, "gradients": 2, "masters": 1, "moments": 1}


def numbers(plan: "Plan", line: str) -> str:
    """How a line of this plan came about. Raises ValueError for a line that the plan has not."""
    if line not in plan.memory and line not in plan.time:
        raise ValueError(f"the plan has no line {line!r}; it has {', '.join((*plan.memory, *plan.time))}")
    if line in _STATES:
        return _state(plan, line)
    found = _OTHERS.get(line)
    return found(plan) if found else ""


def _state(plan: "Plan", line: str) -> str:
    setup = plan.setup
    dense, experts = parameters_of(setup, parts_of_stage(setup.shape, setup.layout, plan.fullest_stage))
    each = getattr(setup.states, line)
    divided = setup.stage_of_zero >= _STATES[line]
    parts = [f"{dense:,} parameters x {each:g} bytes" + (f" / {setup.shards} data ranks" if divided else "")]
    if experts:
        own = f" / {setup.expert_shards} data ranks of each expert" if divided else ""
        parts.append(f"{experts:,} parameters of experts x {each:g} bytes{own}")
    return " + ".join(parts)


def _activations(plan: "Plan") -> str:
    passes = in_flight(plan.setup.layout, plan.fullest_stage)
    each = plan.memory["activations"].value / passes
    return f"{each:,.0f} bytes of a pass x {passes} passes in flight"


def _reserve(plan: "Plan") -> str:
    lines = plan.memory
    rest = plan.peak_memory - lines["reserve"].value
    return f"{plan.machine.calibration.reserve:g} x {rest:,.0f} bytes of all other lines"


def _each(line: str) -> Callable[["Plan"], str]:
    """Of lines that every micro-batch adds to."""

    def said(plan: "Plan") -> str:
        batches = plan.setup.layout.micro_batches
        return f"{batches} micro-batches x {plan.time[line].value / batches:.6g} s"

    return said


def _bubble(plan: "Plan") -> str:
    setup, layout = plan.setup, plan.setup.layout
    if layout.schedule in ("zb-h1", "zbv"):
        return ""
    times = [time.stage_time(setup, stage, plan.machine).seconds for stage in range(layout.pipeline)]
    interleaved = f" / {layout.virtual_stages} chunks of a stage" if layout.virtual_stages > 1 else ""
    return (
        f"({sum(times):.6g} s of a micro-batch in all stages - {max(times):.6g} s in this one){interleaved}"
    )


def _optimizer(plan: "Plan") -> str:
    rate = time.update_bandwidth(plan.setup, plan.machine)
    return f"{plan.time['optimizer'].value * rate:,.0f} bytes / {rate:.6g} bytes a second"


_OTHERS: dict[str, Callable[["Plan"], str]] = {
    "activations": _activations,
    "reserve": _reserve,
    "pipeline bubble": _bubble,
    "optimizer": _optimizer,
    **{
        line: _each(line)
        for line in (
            "matrix products",
            "attention",
            "memory passes",
            "computed again",
            "launches",
            "tensor messages",
            "context messages",
            "expert messages",
            "pipeline messages",
            "gathered weights",
        )
    },
}
