"""Pipelines by DeepSpeed's PipelineEngine, with our blocks in its stages (see stage.py)."""

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from typing import Any, cast

import torch
from torch import Tensor, nn

from fmlab.parallel import fsdp
from fmlab.parallel.build import Build
from fmlab.parallel.composed import Composed
from fmlab.parallel.engine import Engine
from fmlab.parallel.engines import deepspeed_setup, refusals, torch_recompute
from fmlab.parallel.engines.stage import Stage
from fmlab.parallel.engines.torch_pipeline import Tied
from fmlab.parallel.layout import Batch
from fmlab.parallel.ledger import Ledger
from fmlab.parallel.mesh import Mesh
from fmlab.parallel.pipeline.stages import Elsewhere, cut_blocks
from fmlab.parallel.states import States


class _Summed(States):
    """DeepSpeed has summed the gradients over the data ranks itself."""

    def start(self) -> None:
        for parameter in self.ledger.trainable().values():
            parameter.grad = None

    def finish(self, sums: Tensor) -> Tensor:
        return self.summed.all_reduce_(sums)


class _Layer(nn.Module):
    """One stage as a layer of DeepSpeed's module: it finds its micro-batch by counting."""

    def __init__(self, stage: Stage, first: bool) -> None:
        super().__init__()
        self.stage, self.first = stage, first
        self.batches: Sequence[Batch] = []
        self.number = 0

    def forward(self, received: Any) -> Any:
        batch = self.batches[self.number]
        self.number += 1
        if self.first:  # what DeepSpeed loads is a stand-in
            return self.stage(**batch)
        return self.stage(*(received if isinstance(received, tuple) else (received,)), **batch)


class DeepSpeedPipeline(Composed):
    """1F1B by deepspeed.pipe, alone or with data parallelism; norm, clipping and update are fmlab's.

    PipelineEngine makes the passes, sends what stages send, and averages gradients over data ranks and
    micro-batches; the loss is multiplied by both numbers beforehand. It updates the weights in the same call,
    before one could see the gradients of a tied table or their norm; that instruction is left out.
    """

    name = "deepspeed"
    dropout_seed: int | None = None  # type: ignore[assignment]

    def _divide(self, ledger: Ledger) -> Ledger:
        layout, model = self.layout, self.model
        refusals.check("deepspeed", layout, model)
        if fsdp.is_on_meta(model):
            raise ValueError("engine 'deepspeed' starts from weights that are there, not on the meta device")
        self.mesh = Mesh(layout.grid())
        self.data, self.stages = self.mesh.axis("data"), self.mesh.axis("pipeline")
        self._start_equal()
        declared: Any = getattr(model, "parallel_plan", None)
        ledger = Ledger(model, self.mesh)
        build = Build(model, layout, self.mesh, declared() if declared else None, ledger, self.backend)
        plan = build.need_plan("a pipeline")
        torch_recompute.apply(model, layout.recompute)
        blocks: list[Any] = list(cast(nn.ModuleList, model.blocks))
        ranges = cut_blocks(model, plan, layout.pipeline, layout.stage_cuts)
        where = {block: place for place, indices in enumerate(ranges) for block in indices}
        layers = [
            _Layer(Stage(self, blocks, indices.start, indices.stop), place == 0)
            for place, indices in enumerate(ranges)
        ]
        self.layer = layers[self.stages.rank]
        for index, place in where.items():
            if place != self.stages.rank:
                cast(nn.ModuleList, model.blocks)[index] = Elsewhere()
        self.tied = Tied(where, self.mesh, ledger)
        self.build, self.states, self.pipeline = build, _Summed(build), None
        self._layers = layers
        return ledger

    def _check_optimizer(self) -> None:
        deepspeed = deepspeed_setup.load()
        from deepspeed.pipe import PipelineModule

        with deepspeed_setup.quiet(), redirect_stdout(io.StringIO()):
            module = PipelineModule(
                layers=self._layers,
                num_stages=self.layout.pipeline,
                loss_fn=lambda share, label: share * (self.layout.data * self.layout.micro_batches),
                partition_method="uniform",
                dynamic_shape=True,
            )
            self.ds, *_ = deepspeed.initialize(
                model=module, optimizer=self.optimizer, config=_config(self.layout), dist_init_required=False
            )
        instructions = dict(type(self.ds)._INSTRUCTION_MAP)
        for instruction in instructions:
            if instruction.__name__ in ("OptimizerStep", "ReduceTiedGrads"):
                instructions[instruction] = lambda *_: None
        self.ds._INSTRUCTION_MAP = instructions
        self.ds.global_steps = 1  # it prints what it calls the loss at each multiple of steps_per_print

    # region accumulate
    def _accumulate(self, micro_batches: Sequence[Batch], counts: Mapping[str, int]) -> Tensor:
        batches = self._as_many(list(micro_batches))
        self.states.start()
        stage = self.layer.stage
        stage.counts, stage.sums = counts, []
        self.layer.batches, self.layer.number = [self.backend.to_device(b) for b in batches], 0
        with deepspeed_setup.quiet():
            self.ds.train_batch(_stand_ins(self.backend.device))
        sums = self._zero_sums()
        for share in stage.sums:
            sums += share.to(sums)
        sums = self.states.finish(sums)
        self.tied.sum_(self.ledger)
        return self.stages.all_reduce_(sums)

    # endregion

    def _as_many(self, batches: list[Batch]) -> list[Batch]:
        """Raises ValueError on every rank unless all have as many micro-batches as the layout."""
        wrong = torch.tensor([int(len(batches) != self.layout.micro_batches)], device=self.backend.device)
        if int(self.mesh.axis(*self.mesh.grid.order).all_reduce_(wrong)):
            raise ValueError(
                f"DeepSpeed's pipeline runs micro_batches={self.layout.micro_batches} micro-batches on each "
                f"rank; this one has {len(batches)}: use engine='fmlab'"
            )
        return batches

    def close(self) -> None:
        Engine.close(self)
        self.ds.destroy()
        self.mesh.close()


def _stand_ins(device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        yield torch.zeros(1, device=device), torch.zeros(1, device=device)


def _config(layout: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,  # the engine cuts the batch
        "gradient_accumulation_steps": layout.micro_batches,
        "gradient_clipping": 0.0,
        "steps_per_print": 2**31,
    }
