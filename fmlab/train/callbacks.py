"""Who watches a run: progress bar, lines of text, TensorBoard; and the class that a live plot derives from.

Callbacks run on the first rank only.
"""

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from tqdm.auto import tqdm

from fmlab.extras import require
from fmlab.interactive import is_live
from fmlab.sim.units import duration
from fmlab.train.evaluate import Evaluation

if TYPE_CHECKING:
    from fmlab.train.config import TrainConfig
    from fmlab.train.elastic import Recovery
    from fmlab.train.loop import TrainResult


@dataclass(frozen=True)
class RunInfo:
    """What is known before the first step.

    parameters:      of the model
    tokens_per_step: over all ranks; images where the model learns from them, None where rows are padded
    epoch_steps:     steps in which the corpus is read once
    """

    config: "TrainConfig"
    parameters: int
    world_size: int
    first_step: int
    tokens_per_step: int | None
    epoch_steps: float
    device: str


@dataclass(frozen=True)
class StepMetrics:
    """One finished optimizer step.

    step counts from 1; the loss is a mean over all targets of all ranks; tokens_per_second is that of the
    last few steps, all ranks together (of images or targets: config.item), and seconds their mean time;
    modelled_seconds: of the step on a simulated device, else None; wrong: what makes it a bad step
    (fmlab.train.bad_steps), "" for a good one.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
    skipped: bool
    tokens_per_second: float
    modelled_seconds: float | None = None
    wrong: str = ""
    seconds: float = 0.0


class Callback:
    """Override what you need; each method does nothing by itself."""

    def on_start(self, run: RunInfo) -> None:
        """Before the first step."""

    def on_step(self, metrics: StepMetrics) -> None:
        """After each optimizer step."""

    def on_recovery(self, recovery: "Recovery") -> None:
        """After the first step of a run that goes on where it was broken off."""

    def on_rollback(self, step: int, to: int) -> None:
        """After a bad step, when the run has gone back to where it was after step `to`."""

    def on_straggler(self, step: int, told: str) -> None:
        """After a step, when a rank has kept the others waiting for long: which, for how long."""

    def on_evaluation(self, step: int, evaluation: Evaluation) -> None:
        """After each measurement of the validation loss."""

    def on_checkpoint(self, step: int, path: str) -> None:
        """After a checkpoint was written."""

    def on_end(self, result: "TrainResult | None") -> None:
        """After the last step; None when the run was ended by an error or by the user."""


class Progress(Callback):
    """A bar where someone watches (terminal or notebook), a line now and then elsewhere (logs, CI)."""

    def __init__(self, log_every: int = 20, interactive: bool | None = None) -> None:
        self.log_every = log_every
        self.interactive = is_interactive() if interactive is None else interactive
        self._bar: Any = None
        self._validation = ""
        self._last, self._item = 0, "tokens"

    def on_start(self, run: RunInfo) -> None:
        config = run.config
        self._last, self._item = config.steps, config.item
        amount = (
            f"{run.tokens_per_step:,} {config.item}" if run.tokens_per_step else f"{config.batch_size} rows"
        )
        ranks = f", {run.world_size} ranks" if run.world_size > 1 else ""
        self._line(
            f"{config.model}: {run.parameters:,} parameters on {run.device}{ranks}; {config.corpus}, "
            f"{amount} a step, {run.epoch_steps:.0f} steps an epoch"
            + (f"; from step {run.first_step}" if run.first_step else "")
        )
        if self.interactive:
            self._bar = tqdm(total=config.steps, initial=run.first_step, unit="step", dynamic_ncols=True)

    def on_step(self, metrics: StepMetrics) -> None:
        speed = f"{metrics.tokens_per_second:,.0f} {self._item}/s"
        if metrics.modelled_seconds is not None:
            here = duration(metrics.seconds)
            speed = f"step {duration(metrics.modelled_seconds)} modelled, {here} measured on the host"
        text = f"loss {metrics.loss:.3f}, {speed}{self._validation}"
        if metrics.skipped:
            text += f", step skipped: {metrics.wrong or 'the gradient was not finite'}"
        elif metrics.wrong:
            text += f", bad step: {metrics.wrong}"
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(1)
        elif metrics.step % self.log_every == 0 or metrics.step in (1, self._last) or metrics.wrong:
            self._line(
                f"step {metrics.step:6d}: {text}, lr {metrics.lr:.2e}, grad norm {metrics.grad_norm:.2f}"
            )

    def on_recovery(self, recovery: "Recovery") -> None:
        self._line(str(recovery))

    def on_rollback(self, step: int, to: int) -> None:
        self._line(f"step {step:6d}: bad; back to step {to}")
        if self._bar is not None:
            self._bar.n = to
            self._bar.refresh()

    def on_straggler(self, step: int, told: str) -> None:
        self._line(f"step {step:6d}: {told}")

    def on_evaluation(self, step: int, evaluation: Evaluation) -> None:
        self._validation = f", validation {evaluation.loss:.3f}"

    def on_end(self, result: "TrainResult | None") -> None:
        if self._bar is not None:
            self._bar.close()
        if result is not None:
            self._line(str(result))

    @staticmethod
    def _line(text: str) -> None:
        tqdm.write(text, file=sys.stdout)
        sys.stdout.flush()


class TensorBoard(Callback):
    """Loss, validation loss, learning rate, gradient norm and speed as TensorBoard scalars."""

    def __init__(self, folder: str) -> None:
        """Raises ImportError that names the extra when tensorboard is not installed."""
        require("log", "tensorboard")
        self._make = require("log", "torch.utils.tensorboard").SummaryWriter
        self._folder, self._writer = folder, cast("Any", None)

    def on_start(self, run: RunInfo) -> None:
        """What a run that was killed wrote of steps after its last checkpoint is purged: they come again."""
        self._writer = self._make(self._folder, purge_step=run.first_step + 1 if run.first_step else None)

    def on_recovery(self, recovery: "Recovery") -> None:
        self._writer.add_scalar("recovery/seconds", recovery.seconds, recovery.step + 1)
        self._writer.add_scalar("recovery/steps_again", recovery.again, recovery.step + 1)

    def on_rollback(self, step: int, to: int) -> None:
        """What was written of the steps that come again is purged."""
        self._writer.close()
        self._writer = self._make(self._folder, purge_step=to + 1)

    def on_step(self, metrics: StepMetrics) -> None:
        for name in ("loss", "lr", "grad_norm", "tokens_per_second"):
            self._writer.add_scalar(f"train/{name}", getattr(metrics, name), metrics.step)

    def on_evaluation(self, step: int, evaluation: Evaluation) -> None:
        self._writer.add_scalar("validation/loss", evaluation.loss, step)

    def on_end(self, result: "TrainResult | None") -> None:
        if self._writer is not None:
            self._writer.close()


def is_interactive() -> bool:
    """Whether someone watches: a terminal, or a notebook that a person runs (not a headless build)."""
    return sys.stderr.isatty() or is_live()
