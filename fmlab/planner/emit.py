"""From a plan to a run: the config that `fmlab train` reads, and the files that start it on the plan's hosts.

    emit(one, "runs/gpt2", form="slurm", steps=10_000)      runs/gpt2/run.toml and runs/gpt2/job.sbatch

The files are text to read and to add to: all other settings of a run (`fmlab train --help`) go into run.toml.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from fmlab.parallel.values import one_of, whole
from fmlab.planner.emit_checks import BACKENDS, check_config, check_plan, row_tokens
from fmlab.planner.launchers import deepspeed, kubernetes, slurm, torchrun
from fmlab.planner.launchers.job import CONFIG, Job, job_of
from fmlab.planner.own import OwnModels
from fmlab.planner.plan import Plan
from fmlab.storage import atomic_directory, write_atomic
from fmlab.train import TrainConfig

#: how a run is started -> the texts of its files, by name
FORMS: Mapping[str, Callable[[Job], dict[str, str]]] = {
    "torchrun": torchrun.files,
    "deepspeed": deepspeed.files,
    "slurm": slurm.files,
    "kubernetes": kubernetes.files,
}
_NAMES = (CONFIG, *torchrun.FILES, *deepspeed.FILES, *slurm.FILES, *kubernetes.FILES)


def emit(
    plan: Plan,
    folder: str | Path,
    form: str = "torchrun",
    *,
    steps: int | None = None,
    corpus: str | None = None,
    engine: str | None = None,
    image: str | None = None,
    force: bool = False,
    own: OwnModels | None = None,
) -> list[Path]:
    """Write what starts the planned run: run.toml, and the launch files of the form.

    Args:
        folder: made if it is not there; other files in it stay.
        form: "torchrun" or "deepspeed" (launch.sh), "slurm" (job.sbatch), "kubernetes" (pytorchjob.yaml).
        steps, corpus: of the run; default: those of TrainConfig.
        engine: who runs the layout: "fmlab", "torch" or "deepspeed" (the default, and all there is, with form
            "deepspeed"; "fmlab" otherwise).
        image: of the container that Kubernetes starts, with fmlab installed.
        force: replace what an earlier call wrote; its files of another form are deleted.
        own: the models of a project of its own, whose program is started instead of `fmlab train`.

    Returns the files. Each is written whole or not at all, and a new folder only as a whole.

    Raises ValueError, before anything is written, with what `fmlab train` cannot run as planned (the model,
    numbers, chips, memory, what the engine refuses) and what to plan instead; for ranks that do not fill
    hosts; and where files are in the way.
    """
    one_of(form, tuple(FORMS), f"form={form!r}")
    if form == "deepspeed" and engine not in (None, "deepspeed"):
        raise ValueError(f"form='deepspeed' starts engine 'deepspeed', not {engine!r}: use form='torchrun'")
    if (image is not None) != (form == "kubernetes"):
        said = "needs image=, a container with fmlab" if image is None else "takes no image= of a container"
        raise ValueError(f"form={form!r} {said}")
    engine = engine or ("deepspeed" if form == "deepspeed" else "fmlab")
    program = "fmlab.train" if own is None else own.program
    job = job_of(plan, config_of(plan, steps, corpus, engine, own), image or "", program)
    return _write(Path(folder).expanduser(), {CONFIG: job.settings, **FORMS[form](job)}, force)


def config_of(
    plan: Plan,
    steps: int | None = None,
    corpus: str | None = None,
    engine: str = "fmlab",
    own: OwnModels | None = None,
) -> TrainConfig:
    """The settings with which `fmlab train` runs the planned step. Raises ValueError like `emit`."""
    check_plan(plan, engine, own)
    standard, setup = TrainConfig(), plan.setup
    config = TrainConfig(
        model=setup.shape.name,
        corpus=standard.corpus if corpus is None else corpus,
        steps=standard.steps if steps is None else whole(steps, f"steps={steps!r}"),
        batch_size=plan.global_batch,
        seq_len=row_tokens(plan),
        layout=replace(setup.layout, recompute=setup.recompute, precision=setup.precision),
        engine=engine,
        backend=BACKENDS[plan.machine.chip.vendor],
    )
    check_config(plan, config, own)
    return config


def _write(folder: Path, texts: Mapping[str, str], force: bool) -> list[Path]:
    """Raises ValueError where one of our files is there already, unless `force`."""
    if not folder.exists():
        with atomic_directory(folder) as temporary:
            for name, text in texts.items():
                (temporary / name).write_text(text, encoding="utf-8")
        return [folder / name for name in texts]
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file: choose another folder")
    there = [name for name in dict.fromkeys(_NAMES) if (folder / name).exists()]
    if there and not force:
        raise ValueError(
            f"{folder} has {', '.join(there)} already: choose another folder, or force=True (--force) to "
            "replace them"
        )
    for name, text in texts.items():
        write_atomic(folder / name, text.encode())
    for name in set(there) - set(texts):  # they would start the run of an earlier plan
        (folder / name).unlink()
    return [folder / name for name in texts]
