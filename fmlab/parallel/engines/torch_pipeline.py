"""Pipelines by torch.distributed.pipelining, with our blocks in its stages.

torch sends a stage's outputs on as a tuple: here the tensors that blocks before the cut have written and
blocks behind it read. All else a stage makes itself from the micro-batch, which every rank has. The loss is
computed inside the last stage, so that any objective works.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from fmlab.models.cross_entropy import IGNORE, linear_cross_entropy
from fmlab.models.plan import ParallelPlan
from fmlab.models.state import Block, State, live_names
from fmlab.objectives import LossTerms, total_loss
from fmlab.parallel.layout import Batch, Layout
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


class _Enough(Exception):
    """The stage has what it sends on; the objective need not go on."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.tensors = tensors


class Stage(nn.Module):
    """Some blocks of the model: received tensors and a micro-batch in, tensors for the next stage out; the
    last one gives its share of the loss []."""

    def __init__(self, engine: "TorchEngine", blocks: Sequence[Block], start: int, stop: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks[start:stop])
        self.receives, self.sends = sent_at(blocks, start), sent_at(blocks, stop)
        self.last = stop == len(blocks)
        self._engine = [engine]  # in a list, so that nn.Module does not take it for a part of itself
        self.counts: Mapping[str, int] = {}
        self.sums: list[Tensor] = []

    # region stage
    def forward(self, *received: Tensor, **batch: Tensor) -> Any:
        engine = self._engine[0]
        for tensor in received:
            if tensor.requires_grad:  # sent back as it lies in memory
                tensor.register_hook(torch.Tensor.contiguous)

        def model(*args: Any, **kwargs: Any) -> State:
            state = engine.model.prepare(*args, **kwargs)  # type: ignore[operator]
            state = state.updated(**dict(zip(self.receives, received, strict=True)))
            for block in self.blocks:
                state = block(state)
            if self.last:
                return state
            raise _Enough(tuple(_sendable(state[name], received) for name in self.sends))

        try:
            with engine.backend.autocast(engine.layout.precision):  # type: ignore[arg-type]
                terms = engine.objective(model, batch)
        except _Enough as enough:
            return enough.tensors
        return self._share(terms)

    # endregion

    def _share(self, terms: LossTerms) -> Tensor:
        share = total_loss(terms, self.counts)
        sums = [terms[name].sum.detach() for name in self._engine[0]._terms]
        self.sums.append(torch.stack([*sums, share.detach()]))
        return share


def _sendable(tensor: Tensor, received: tuple[Tensor, ...]) -> Tensor:
    """torch cuts outputs off their graph in place and sends them as they lie in memory: they must be neither
    views nor inputs passed through, and contiguous."""
    through = any(tensor is other for other in received)
    copied = tensor.clone() if through or tensor._is_view() else tensor
    return copied.contiguous()


def sent_at(blocks: Sequence[Block], cut: int) -> list[str]:
    """The names that a pipeline sends at a cut: what blocks before it write and blocks after it read."""
    written = {name for block in blocks[:cut] for name in block.writes}
    return [name for name in live_names(blocks, cut) if name in written]


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
        self.tied = self._place(where, mesh, ledger)
        self._schedules: dict[Any, Any] = {}

    def _place(self, where: Mapping[int, int], mesh: Mesh, ledger: "TorchLedger") -> dict[str, Axis | None]:
        """Note in the ledger which places hold what; returns the ranks that share a parameter, by name."""
        held = {
            name: sorted({where[int(alias.split(".")[1])] for alias in (name, *entry.aliases)})
            for name, entry in ledger.entries.items()
        }
        ledger.place(held, self.axis.rank)
        return {name: mesh.subset("pipeline", places) for name, places in held.items() if len(places) > 1}

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
        schedule.step(**whole, **target, return_outputs=False)
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
                PipelineStage(stage, index, self.number, self.engine.backend.device, group=self.axis.group)
                for index, stage in self.stages.items()
            ]
            kind = self.engine.layout.schedule
            # the losses are shares of one mean already: nothing to be scaled
            options = {"loss_fn": lambda output, target: output, "scale_grads": False}
            given = stages[0] if kind in SINGLE else stages
            self._schedules[key] = SCHEDULES[kind](given, len(batches), **options)
        return self._schedules[key]

    def sum_tied(self) -> None:
        """torch knows nothing of a parameter that two stages share: add up its gradients."""
        parameters = dict(self.engine.ledger.parameters())
        for name, axis in self.tied.items():
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
