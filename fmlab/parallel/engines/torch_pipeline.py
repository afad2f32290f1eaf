"""Pipelines by torch.distributed.pipelining, with our blocks in its stages (see stage.py)."""

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining.microbatch import sum_reducer

from fmlab.models.cross_entropy import IGNORE, linear_cross_entropy
from fmlab.models.plan import ParallelPlan
from fmlab.parallel.engines.stage import Stage
from fmlab.parallel.layout import Batch, Layout
from fmlab.parallel.ledger import Ledger
from fmlab.parallel.mesh import Axis, Mesh
from fmlab.parallel.pipeline.stages import Elsewhere, cut_blocks

if TYPE_CHECKING:
    from fmlab.parallel.engines.torch_engine import TorchEngine
    from fmlab.parallel.engines.torch_ledger import TorchLedger

SCHEDULES: dict[str, Any] = {
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "zb-h1": schedules.ScheduleInterleavedZeroBubble,
    "zbv": schedules.ScheduleZBVZeroBubble,
}
SINGLE = ("gpipe", "1f1b")  # schedules of one stage a rank, for which torch has classes of their own


def stages_of(layout: Layout, place: int) -> list[int]:
    """The numbers of the stages that a place of the pipeline holds: one after the other in rounds, in zbv
    down and up again."""
    if layout.schedule == "zbv":
        return [place, 2 * layout.pipeline - 1 - place]
    return [place + turn * layout.pipeline for turn in range(layout.virtual_stages)]


class Pipeline:
    """This rank's stages of a model, and torch's schedule over them."""

    def __init__(self, engine: "TorchEngine", plan: ParallelPlan, mesh: Mesh, ledger: "TorchLedger") -> None:
        """Leaves in the model only the blocks of this rank; notes in the ledger where the others are."""
        layout = engine.layout
        self.engine, self.axis = engine, mesh.axis("pipeline")
        blocks: list[Any] = list(engine.model.blocks)  # type: ignore[arg-type]
        self.number = layout.pipeline * layout.virtual_stages
        ranges = cut_blocks(engine.model, plan, self.number, layout.stage_cuts)
        places = {s: place for place in range(layout.pipeline) for s in stages_of(layout, place)}
        where = {block: places[stage] for stage, indices in enumerate(ranges) for block in indices}
        if layout.schedule.startswith("zb"):
            _give_plain_loss(blocks)
        self.stages = {
            stage: Stage(engine, blocks, ranges[stage].start, ranges[stage].stop)
            for stage in stages_of(layout, self.axis.rank)
        }
        for index, place in where.items():
            if place != self.axis.rank:
                cast(nn.ModuleList, engine.model.blocks)[index] = Elsewhere()
        self.tied = Tied(where, mesh, ledger)
        self._schedules: dict[Any, Any] = {}

    # region run
    def run(self, batches: list[Batch], counts: Mapping[str, int]) -> Tensor:
        """All passes of the micro-batches; returns the sums of the losses, 0 but on the last stage."""
        device = self.engine.backend.device
        schedule = self._schedule(batches)
        for stage in self.stages.values():
            stage.counts, stage.sums = counts, []
        names = batches[0]
        whole = {name: torch.cat([batch[name] for batch in batches]).to(device) for name in names}
        last = self.stages.get(self.number - 1)
        target = {} if last is None else {"target": torch.zeros(len(batches), device=device)}
        schedule.step(**whole, **target, **_without_outputs(schedule))
        sums = self.engine._zero_sums()
        # the first call of a schedule also runs each stage once to learn the shapes
        for share in [] if last is None else last.sums[-len(batches) :]:
            sums += share.to(sums)
        return sums

    # endregion

    def _schedule(self, batches: list[Batch]) -> Any:
        """torch's schedule for this number of micro-batches of these shapes; a new one for new shapes."""
        key = (len(batches), *((name, tuple(t.shape), t.dtype) for name, t in batches[0].items()))
        if key not in self._schedules:
            stages = [
                _Stage(stage, index, self.number, self.engine.backend.device, group=self.axis.group)
                for index, stage in self.stages.items()
            ]
            kind = self.engine.layout.schedule
            # the losses are shares of one mean already: nothing to be scaled
            options = {"loss_fn": lambda output, target: output, "scale_grads": False}
            options["output_merge_spec"] = sum_reducer  # torch 2.9 joins the outputs: losses have no dim 0
            given = stages[0] if kind in SINGLE else stages
            self._schedules[key] = SCHEDULES[kind](given, len(batches), **options)
        return self._schedules[key]


# region moving
class _Stage(PipelineStage):
    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        """torch 2.9 sends 8 bytes here into a place for 4, at which gloo ends the process. On a CPU no stage
        needs these first messages, and torch 2.13 does not send them."""
        return [] if self.device.type == "cpu" else super()._get_init_p2p_neighbors_ops()


def _without_outputs(schedule: Any) -> dict[str, bool]:
    """The keyword by which a schedule does not keep its outputs; torch 2.9 has none, and would hand it to
    the model."""
    known = inspect.signature(schedule.step).parameters
    return {"return_outputs": False} if "return_outputs" in known else {}


# endregion


class Tied:
    """Parameters that several stages share, of which production engines know nothing."""

    def __init__(self, where: Mapping[int, int], mesh: Mesh, ledger: Ledger) -> None:
        """where: block -> place on the pipeline axis. Notes in the ledger what is where."""
        held = {
            name: sorted({where[int(alias.split(".")[1])] for alias in (name, *entry.aliases)})
            for name, entry in ledger.entries.items()
        }
        ledger.place(held, mesh.axis("pipeline").rank)
        self.axes: dict[str, Axis | None] = {
            name: mesh.subset("pipeline", places) for name, places in held.items() if len(places) > 1
        }

    def sum_(self, ledger: Ledger) -> None:
        """Add up the gradients of the stages that share a parameter."""
        parameters = dict(ledger.parameters())
        for name, axis in self.axes.items():
            if axis is not None and parameters[name].requires_grad:
                gradient = parameters[name].grad
                if gradient is None:
                    gradient = parameters[name].grad = torch.zeros_like(parameters[name])
                axis.all_reduce_(getattr(gradient, "_local_tensor", gradient))


# region plain loss
def plain_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None) -> Tensor:
    """Summed, as fmlab.models.cross_entropy's, but with a backward pass that may be run in two parts.

    Zero-bubble schedules run it once for the inputs and once for the weights; ours makes the gradients in the
    forward pass and scales them in place, which works once.
    """
    logits = F.linear(hidden, weight, bias)
    logits = logits.float() if logits.dtype.itemsize < 4 else logits
    return F.cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORE)


def _give_plain_loss(blocks: Sequence[Any]) -> None:
    for block in blocks:
        if getattr(block, "cross_entropy", None) is linear_cross_entropy:
            block.cross_entropy = plain_cross_entropy


# endregion
