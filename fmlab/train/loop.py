"""The training loop."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from fmlab.backends import get_backend
from fmlab.data import Corpus, TextTokenizer
from fmlab.data.captioned import CaptionedImages
from fmlab.data.sampler import split_micro_batches
from fmlab.sim.units import duration
from fmlab.storage import atomic_directory
from fmlab.train import checkpoint
from fmlab.train.bad_steps import BadSteps, bad_step_error, spike_limit, what_is_wrong
from fmlab.train.callbacks import Callback, Progress, RunInfo, StepMetrics, TensorBoard
from fmlab.train.config import TrainConfig
from fmlab.train.elastic import Recovery, StartLog, end_with_launcher, go_on
from fmlab.train.evaluate import Evaluation, evaluate
from fmlab.train.generate import generate
from fmlab.train.guard import Guard
from fmlab.train.images.config import ImageConfig
from fmlab.train.images.setup import prepare_images
from fmlab.train.launch import step_seed, world_of
from fmlab.train.not_finite import first_not_finite
from fmlab.train.resume import check_settings, say
from fmlab.train.saver import Saver
from fmlab.train.schedule import warmup_cosine
from fmlab.train.setup import Run, own_folder, prepare
from fmlab.train.whole import is_divided, whole_model

_RECENT = 20  # steps whose speed is shown while a run goes on


@dataclass
class TrainResult:
    """What a run leaves.

    model:        the trained model, whole on every rank, however the layout divided it meanwhile
    losses:       training loss of each step, a mean over all targets of all ranks, from the first step on
                  even when the run was resumed
    validation:   (step, Evaluation) of each measurement
    step_seconds: time of each step of this process, without evaluation and checkpoints
    step_items:   distinct tokens (images; targets where rows are padded) of each, of all ranks
    modelled_seconds: of each step, on the clock of a simulated device; empty on a real one
    out:          the folder with checkpoints and the trained model
    objective:    what it was trained for, by name
    bad_steps:    (step, what was wrong) of each that this process took or left out; a batch that is left
                  out has the loss nan
    rollbacks:    (bad step, the step that it went back to)
    recovery:     of a run that went on after it was broken off: what that took; on the first rank
    """

    config: TrainConfig
    model: nn.Module
    tokenizer: TextTokenizer
    losses: list[float] = field(default_factory=list)
    validation: list[tuple[int, Evaluation]] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    step_items: list[int] = field(default_factory=list)
    modelled_seconds: list[float] = field(default_factory=list)
    out: str | None = None
    objective: str = "causal"
    bad_steps: list[tuple[int, str]] = field(default_factory=list)
    rollbacks: list[tuple[int, int]] = field(default_factory=list)
    recovery: Recovery | None = None

    @property
    def seconds(self) -> float:
        """Time of all steps of this process."""
        return sum(self.step_seconds)

    @property
    def tokens_per_second(self) -> float:
        """`step_items` over the time of all steps but the first, a warm-up."""
        first = 1 if len(self.step_seconds) > 1 else 0
        timed = sum(self.step_seconds[first:])
        return sum(self.step_items[first:]) / timed if timed else 0.0

    def generate(self, prompt: str = "", **options: Any) -> str:
        """Text from the trained model; see fmlab.train.generate. Raises ValueError if it only fills masks."""
        if not hasattr(self.model, "new_cache"):
            raise ValueError(
                f"a {type(self.model).__name__} does not write text; see fmlab.train.samples.fill_masks"
            )
        return generate(self.model, self.tokenizer, prompt, **options)

    def __str__(self) -> str:
        modelled = self.modelled_seconds[-1] if self.modelled_seconds else None
        simulated = f"; a step takes {duration(modelled)} modelled" if modelled is not None else ""
        validation = f", validation loss {self.validation[-1][1].loss:.3f}" if self.validation else ""
        return (
            f"{len(self.losses)} steps in {self.seconds:.1f} s, "
            f"{self.tokens_per_second:,.0f} {self.config.item}/s; "
            f"loss {self.losses[0]:.3f} -> {self.losses[-1]:.3f}{validation}"
            + simulated
            + (f"; {len(self.bad_steps)} bad steps" if self.bad_steps else "")
            + (f", {len(self.rollbacks)} times back" if self.rollbacks else "")
            + (f"; saved in {self.out}" if self.out else "")
        )


def train(
    config: TrainConfig | None = None,
    *,
    model: nn.Module | None = None,
    tokenizer: TextTokenizer | None = None,
    corpus: Corpus | None = None,
    images: tuple[CaptionedImages, CaptionedImages] | None = None,
    callbacks: Sequence[Callback] = (),
) -> TrainResult:
    """Train a model; alone, under torchrun, or on each rank of Ranks: the same losses come out.

    config: the settings, by default those of TrainConfig(); an ImageConfig for a model that learns from
    images. model, tokenizer, corpus, images (for training, for validation): your own, in place of those that
    the settings name. callbacks: who watches, besides the progress bar; on the first rank.

    Raises ValueError and others of `prepare` before the first step.
    """
    config = config or TrainConfig()
    backend = get_backend(config.backend)
    end_with_launcher()
    guard = Guard(config)
    with guard.recording(), world_of(backend, config.out) as world, guard.watching(world):
        config = go_on(config, world)
        log = StartLog(config.out, world.size) if config.out is not None and world.is_first else None
        if isinstance(config, ImageConfig):
            run = prepare_images(config, world, backend, model, images)
        else:
            run = prepare(config, world, backend, model, tokenizer, corpus)
        try:
            with own_folder(run):
                result = _train(run, _watchers(run, callbacks), guard, log)
                if log is not None:
                    log.done()
                return result
        finally:
            if log is not None:
                log.close()
            run.engine.close()


def _watchers(run: Run, extra: Sequence[Callback]) -> list[Callback]:
    if not run.world.is_first:
        return []
    own: list[Callback] = []
    if run.config.log_every:
        own.append(Progress(run.config.log_every))
    if run.config.tensorboard:
        own.append(TensorBoard(f"{run.config.out}/tensorboard"))
    return [*own, *extra]


def _train(run: Run, watchers: list[Callback], guard: Guard, log: StartLog | None) -> TrainResult:
    config, sampler = run.config, run.sampler
    result = TrainResult(config, run.engine.model, run.tokenizer, out=config.out, objective=run.recipe.name)
    updates = _resume(run, result) if config.resume else 0
    saver = _saver(run, watchers)
    bad = BadSteps(config.on_bad_step, config.max_bad_steps, config.leave_out)
    finished = False
    try:
        _tell(watchers, "on_start", _info(run))
        run.engine.model.train()
        if log is not None:
            log.ready(config.resume)
        while sampler.step < config.steps:
            left_out = sampler.step in bad.left_out
            metrics = _pass_over(run, result) if left_out else _step(run, result, updates)
            updates += not metrics.skipped
            recovery = None if log is None else log.step(metrics.step)
            _tell(watchers, "on_step", metrics)
            if recovery is not None:
                result.recovery = recovery
                _tell(watchers, "on_recovery", recovery)
            if metrics.wrong and not left_out:
                if why := bad.too_many():
                    raise _end_of(run, metrics, why)
                if bad.policy == "rollback":
                    assert saver is not None
                    saver.wait()
                    updates = _roll_back(run, result, bad, metrics)
                    _tell(watchers, "on_rollback", metrics.step, sampler.step)
                    continue
            elif not left_out:
                bad.good()
            saves = saver is not None and _due(config.save_every or config.steps, sampler.step, config.steps)
            if slow := guard.after_step(run, saves):
                _tell(watchers, "on_straggler", sampler.step, slow)
            if _due(config.eval_every, sampler.step, config.steps):
                evaluation = measure(run)
                result.validation.append((sampler.step, evaluation))
                _tell(watchers, "on_evaluation", sampler.step, evaluation)
            if saver is not None and saves:
                saver.save(_state(run, result, updates))
        if saver is not None:
            saver.wait()
        result.model = run.recipe.finish(run.engine, _whole(run))
        if run.numbers is not None:
            result.model = run.numbers.finish(result.model)
        if config.out is not None:
            _export(run, result.model, Path(config.out) / "model")
        finished = True
    finally:
        if saver is not None:
            saver.close()
        _tell(watchers, "on_end", result if finished else None)
    return result


def _step(run: Run, result: TrainResult, updates: int) -> StepMetrics:
    """One optimizer step, entered into `result`. Nothing of its tensors outlives it.

    The learning rate follows the updates made so far, so that a skipped step does not shorten the schedule.
    """
    config, sampler = run.config, run.sampler
    start, clock = time.perf_counter(), run.backend.modelled_seconds()
    peak = config.lr
    assert peak is not None
    lr = warmup_cosine(updates, config.steps, config.warmup_steps, peak, peak * config.min_lr_ratio)
    run.engine.set_lr(lr)
    _seed(run, sampler.step)
    batch = sampler.batch(sampler.step)
    run.engine.loss_limit = limit = spike_limit(result.losses, config.spike_factor)
    step = run.engine.step(split_micro_batches(batch, config.layout.micro_batches))
    run.backend.synchronize()
    seconds = time.perf_counter() - start
    if clock is not None:
        result.modelled_seconds.append((run.backend.modelled_seconds() or 0.0) - clock)

    sampler.step += 1
    result.losses.append(step.loss)
    result.step_seconds.append(seconds)
    result.step_items.append(config.items_per_step or step.count)
    wrong = what_is_wrong(step, limit, scaled=getattr(run.engine, "scaler", None) is not None)
    if wrong:
        result.bad_steps.append((sampler.step, wrong))
    modelled = result.modelled_seconds[-1] if result.modelled_seconds else None
    recent = result.step_seconds[-_RECENT:]
    return StepMetrics(
        sampler.step,
        step.loss,
        lr,
        step.grad_norm,
        step.skipped,
        sum(result.step_items[-_RECENT:]) / sum(recent),
        modelled,
        wrong,
        sum(recent) / len(recent),
    )


def _seed(run: Run, number: int) -> None:
    """Make random what a step draws; its dropout masks depend on the number of its batch, too."""
    run.backend.seed(step_seed(run.config.seed, number, run.place.rank))
    run.engine.steps = number


def _pass_over(run: Run, result: TrainResult) -> StepMetrics:
    """The step of a batch that is left out: it has no loss and no update."""
    run.sampler.step += 1
    result.losses.append(math.nan)
    result.bad_steps.append((run.sampler.step, "left out"))
    return StepMetrics(run.sampler.step, math.nan, 0.0, math.nan, True, 0.0, wrong="left out")


def _roll_back(run: Run, result: TrainResult, bad: BadSteps, metrics: StepMetrics) -> int:
    """Go back to the newest whole checkpoint; the number of updates it has seen."""
    assert run.config.out is not None
    if not checkpoint.steps(run.config.out):
        raise _end_of(run, metrics, "there is no checkpoint yet to go back to: set a lower save_every")
    _, state = checkpoint.resume(run.config.out, run.engine)
    _take_up(run, result, state)
    bad.went_back(metrics.step - 1, state.step)
    result.rollbacks.append((metrics.step, state.step))
    return state.updates


def _end_of(run: Run, metrics: StepMetrics, why: str) -> Exception:
    """The error that ends a run at a bad step: every rank makes it, and all say the same."""
    where, number = "", metrics.step - 1
    if not (math.isfinite(metrics.loss) and math.isfinite(metrics.grad_norm)):
        _seed(run, number)
        batch = run.sampler.batch(number)
        where = first_not_finite(run.engine, split_micro_batches(batch, run.config.layout.micro_batches))
    return bad_step_error(metrics.step, metrics.wrong, why, where)


def _info(run: Run) -> RunInfo:
    config, sampler = run.config, run.sampler
    return RunInfo(
        config,
        run.parameters,
        run.world.size,
        sampler.step,
        config.items_per_step,
        sampler.windows_per_epoch / config.batch_size,
        str(run.backend.device),
    )


def measure(run: Run) -> Evaluation:
    """The validation loss now; every rank calls it."""
    layout = run.config.layout
    # Such a model cannot be called from outside its step; of torch's, one with divided matrices neither.
    outside = layout.pipeline * layout.context > 1 or (layout.tensor > 1 and run.config.engine == "torch")
    model = _whole(run) if outside else run.engine.model
    batches = run.validation()
    return evaluate(model, batches, run.recipe.objective, run.backend, layout.precision, run.place)


def _whole(run: Run) -> nn.Module:
    """The undivided model with the weights of now; every rank calls it."""
    if not is_divided(run.config.layout, run.config.engine):
        return run.engine.model
    return whole_model(run.engine, run.recipe.build)


def _resume(run: Run, result: TrainResult) -> int:
    """Take up the newest whole checkpoint; the number of updates it has seen."""
    assert run.config.out is not None
    _, state = checkpoint.resume(run.config.out, run.engine)
    said = check_settings(state.settings, run.config)
    if run.world.is_first:
        say(said)
    _take_up(run, result, state)
    if state.step >= run.config.steps:
        raise ValueError(
            f"the run has done {state.step} steps already; to go on set steps above that, "
            f"got {run.config.steps}"
        )
    return state.updates


def _take_up(run: Run, result: TrainResult, state: checkpoint.RunState) -> None:
    run.sampler.load_state_dict(state.sampler)
    run.engine.load_extra_state(state.extra)
    result.losses[:] = state.losses
    result.validation[:] = [(step, Evaluation(loss, count)) for step, loss, count in state.validation]


def _saver(run: Run, watchers: list[Callback]) -> Saver | None:
    config = run.config
    if config.out is None:
        return None

    def done(step: int, path: Path) -> None:
        _tell(watchers, "on_checkpoint", step, str(path))

    return Saver(
        config.out, run.engine, run.tokenizer, config.keep, config.keep_every, config.async_save, done
    )


def _state(run: Run, result: TrainResult, updates: int) -> checkpoint.RunState:
    return checkpoint.RunState(
        run.sampler.step,
        updates,
        run.sampler.state_dict(),
        list(result.losses),
        run.config.to_dict(),
        [(step, found.loss, found.count) for step, found in result.validation],
        run.engine.extra_state(),
    )


def _export(run: Run, model: nn.Module, folder: Path) -> None:
    """Write the trained model in Hugging Face's format, where it can be."""

    def export() -> None:
        with atomic_directory(folder, overwrite=True) as new:
            run.recipe.export(model, run.tokenizer, new)

    if hasattr(model, "save_pretrained"):
        run.world.on_first(export)


def _due(every: int, step: int, last: int) -> bool:
    return every > 0 and (step % every == 0 or step == last)


def _tell(watchers: list[Callback], event: str, *args: Any) -> None:
    for watcher in watchers:
        getattr(watcher, event)(*args)
