"""Pipeline parallelism by hand: stages of the model on different ranks, micro-batches on their way through.

stages.py          where to cut, what crosses a cut, who owns which parameter
messages.py        sends and receives that cannot wait for each other
agree.py           what stages check before they talk
chunk.py           one chunk of the model, called by the objective in its place
runtime.py         runs a schedule's actions (fmlab.sim.schedule has the schedules, as data)
split_backward.py  the backward pass in two parts, for zero-bubble schedules
trace.py           what ran when, and what was held

GPipe: Huang et al. 2019, arXiv:1811.06965. 1F1B and interleaved: Narayanan et al. 2021, arXiv:2104.04473.
ZB-H1 and ZBV: Qi et al. 2023, arXiv:2401.10241.
"""

from typing import cast

from torch import nn

from fmlab.models.plan import ParallelPlan
from fmlab.parallel.build import Build
from fmlab.parallel.layout import Layout
from fmlab.parallel.ledger import Ledger
from fmlab.parallel.pipeline.runtime import Pipeline
from fmlab.parallel.pipeline.stages import Chunk, Elsewhere, chunks_of, cut_blocks, homes
from fmlab.parallel.pipeline.trace import Pass, PipelineTrace, StageTrace
from fmlab.sim.schedule import SPLIT_BACKWARD, check_schedule, place

__all__ = ["Pass", "Pipeline", "PipelineTrace", "StageTrace", "cut", "cut_blocks"]


# region stages
def cut(build: Build) -> Pipeline:
    """Leave this rank's stage of the model in `build.model`, and return what runs it.

    A parameter that several stages need (tied embeddings) stays on each of them; its gradient there is one
    summand, which the ledger adds up over just these stages.

    Raises ValueError, on every rank and before anything is sent, for what cannot be cut or scheduled.
    """
    layout, model, ledger, mesh = build.layout, build.model, build.ledger, build.mesh
    plan = build.need_plan("a pipeline")
    check_schedule(layout.schedule, layout.pipeline, layout.micro_batches, layout.virtual_stages)
    check_split(layout)
    chunks, where, home_of_block, stages = _placed(model, plan, layout, ledger)
    blocks, here = cast(nn.ModuleList, model.blocks), mesh.axis("pipeline").rank
    ledger.place(stages, here)
    ties = []
    for places in sorted({places for places in stages.values() if len(places) > 1}):
        axis = mesh.subset("pipeline", places)  # every rank makes it
        names = [name for name, places_of in stages.items() if places_of == places]
        if axis is not None:
            ties.append((axis, names))
            for name in names:
                ledger.add_partial(name, axis)
    for index, stage in home_of_block.items():
        if stage != here:
            blocks[index] = Elsewhere()
    return Pipeline(build, [chunk for chunk in chunks if where[chunk.number] == here], ties)


# endregion


def check(model: nn.Module, plan: ParallelPlan, layout: Layout) -> None:
    """Raise ValueError, from shapes alone, for a model that cannot be divided into the layout's stages."""
    _placed(model, plan, layout, Ledger(model))


def _placed(
    model: nn.Module, plan: ParallelPlan, layout: Layout, ledger: Ledger
) -> tuple[list[Chunk], dict[int, int], dict[int, int], dict[str, tuple[int, ...]]]:
    """The chunks; the stage of each, and of each block; the stages that hold each parameter."""
    ranges = cut_blocks(model, plan, layout.pipeline * layout.virtual_stages, layout.stage_cuts)
    chunks = chunks_of(model, ranges)
    where = {chunk.number: place(layout.schedule, chunk.number, layout.pipeline)[0] for chunk in chunks}
    home_of_block = {index: where[chunk.number] for chunk in chunks for index in chunk.blocks}
    stages = {e.name: homes((e.name, *e.aliases), home_of_block) for e in ledger.entries.values()}
    _check_trains(layout, ledger, stages)
    return chunks, where, home_of_block, stages


def check_split(layout: Layout) -> None:
    """Raise ValueError where a layout splits backward passes whose parts cannot be told apart."""
    if layout.schedule not in SPLIT_BACKWARD:
        return
    names = {
        "fsdp": layout.fsdp,
        "zero=3": layout.zero == 3,
        f"recompute={layout.recompute!r}": layout.recompute != "none",
    }
    for name in (name for name, used in cast(dict[str, bool], names).items() if used):
        why = (
            "a layer would be computed again for each part of its backward pass"
            if name.startswith("recompute")
            else "parameters are given back when the first part has passed"
        )
        raise ValueError(
            f"schedule={layout.schedule!r} splits the backward pass, and with {name} {why}; use "
            "schedule='1f1b' or 'interleaved', or leave it out"
        )


def _check_trains(layout: Layout, ledger: Ledger, stages: dict[str, tuple[int, ...]]) -> None:
    trains = {stage for name in ledger.trainable() for stage in stages[name]}
    idle = sorted(set(range(layout.pipeline)) - trains)
    if idle:
        raise ValueError(
            f"stage {idle[0]} of the pipeline has no parameter to train: all of its blocks are frozen: "
            "cut elsewhere with Layout(stage_cuts=(...)), or use fewer stages"
        )
