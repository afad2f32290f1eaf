"""Bad steps: a loss or a gradient that is not finite, and a loss that jumps; and what a run does about them.

A spike is a loss above the median of the last losses by a number of robust standard deviations. The deviation
is taken from the differences of neighbours (von Neumann et al. 1941, the mean square successive difference),
so that a falling loss does not count as noise; and by their median absolute value times 1.4826, which for
normal noise is the standard deviation (Rousseeuw and Croux 1993), so that spikes among the losses hardly move
it. The limit is a function of the losses so far alone, which are the same on all ranks and in a resumed run:
so all ranks decide alike, and a resumed run as the one that was not stopped.

Going back and leaving batches out is what PaLM's training did (Chowdhery et al. 2022, arXiv:2204.02311,
section 5.1): from a checkpoint about 100 steps before the spike, leaving out 200 to 500 batches.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

import numpy as np

from fmlab.parallel.engine import StepResult

LEVEL, NOISE, LEAST = 16, 128, 32  # last losses that make the median, the deviation, and at least a limit
_NORMAL = 1.4826  # standard deviation of normal noise over its median absolute deviation
_FLOOR = 0.01  # of the median: the least standard deviation, for losses that hardly differ

_HELP = (
    "What helps: --resume with --on-bad-step skip (leave such updates out) or rollback (go back and leave "
    "batches out); if it comes again, a lower --lr, a longer --warmup, --clip 1, or fp32"
)


class BadStepError(ValueError):
    """A run has ended at a bad step; the checkpoints before it are as they were."""


# region spike
def spike_limit(losses: Sequence[float], factor: float) -> float:
    """The loss above which the next step is a spike; infinite for a factor of 0 and before LEAST losses."""
    recent = [loss for loss in losses[-NOISE:] if math.isfinite(loss)]
    if not factor or len(recent) < LEAST:
        return math.inf
    level = median(recent[-LEVEL:])
    noise = _NORMAL * median(abs(b - a) for a, b in pairwise(recent)) / math.sqrt(2)
    limit = level + factor * max(noise, _FLOOR * abs(level))
    return float(np.float32(limit))  # so that host and device, which compare it in fp32, agree


# endregion


def what_is_wrong(step: StepResult, limit: float, scaled: bool = False) -> str:
    """What makes this a bad step; "" for a good one.

    limit: of `spike_limit`, before the step. scaled: the loss is scaled, and the scale finds its size by
    gradients that overflow, so that these alone are nothing bad.
    """
    if not math.isfinite(step.loss):
        return f"the loss is {step.loss}"
    if step.loss > limit:
        return f"the loss {step.loss:.4g} is a spike: above {limit:.4g}"
    if not math.isfinite(step.grad_norm) and not scaled:
        return "the gradient is not finite"
    return ""


@dataclass
class BadSteps:
    """What a run does about bad steps; every rank has one, and all decide alike.

    policy:    "stop", "skip" or "rollback"
    most:      skip: bad steps in a row that are borne; rollback: how often the run goes back
    leave_out: rollback: batches that are left out, up to the bad one
    left_out:  numbers of the batches to leave out from now on, counted from 0
    """

    policy: str
    most: int
    leave_out: int = 1
    left_out: set[int] = field(default_factory=set)
    in_a_row: int = 0
    rollbacks: int = 0

    def good(self) -> None:
        """A step was good."""
        self.in_a_row = 0

    def too_many(self) -> str:
        """After a bad step: why the run must end now; "" if it goes on."""
        if self.policy == "stop":
            return "--on-bad-step is stop"
        if self.policy == "rollback":
            self.rollbacks += 1
            return f"the run went back {self.most} times already" if self.rollbacks > self.most else ""
        self.in_a_row += 1
        return f"these are {self.in_a_row} bad steps in a row" if self.in_a_row > self.most else ""

    def went_back(self, bad: int, to: int) -> None:
        """The run went back to before batch `to`, because of batch `bad`."""
        self.left_out |= set(range(max(to, bad + 1 - self.leave_out), bad + 1))


def bad_step_error(step: int, wrong: str, why: str, where: str) -> BadStepError:
    """The end of a run. step: counted from 1; where: of `first_not_finite`, "" for a spike."""
    found = f"; {where}" if where else ""
    return BadStepError(
        f"step {step}: {wrong}{found}. The run ends, since {why}; its checkpoints are as they were. {_HELP}"
    )
