"""Any layout that torch's own parts can run: FSDP2, DTensor, torch.distributed.pipelining, checkpointing."""

import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from fmlab.parallel import expert, fsdp
from fmlab.parallel.build import Build
from fmlab.parallel.composed import Composed
from fmlab.parallel.engine import Engine
from fmlab.parallel.engines import refusals, torch_mesh, torch_recompute, torch_shard, torch_tensor
from fmlab.parallel.engines.torch_ddp import _leaves
from fmlab.parallel.engines.torch_ledger import TorchLedger
from fmlab.parallel.engines.torch_pipeline import Pipeline
from fmlab.parallel.grid import AXES, Grid
from fmlab.parallel.layout import Batch, Layout
from fmlab.parallel.ledger import Ledger
from fmlab.parallel.mesh import Mesh
from fmlab.parallel.pipeline.stages import cut_blocks
from fmlab.parallel.states import States


class TorchStates(States):
    """FSDP2 sums gradients inside the backward passes, which every rank must therefore make alike."""

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self.lockstep = self.summed.size > 1

    def start(self) -> None:
        for parameter in self.ledger.trainable().values():
            parameter.grad = None

    def finish(self, sums: Tensor) -> Tensor:
        """Gradients that are sums over ranks still to be taken (of norms under sequence parallelism) are
        taken."""
        for parameter in self.ledger.trainable().values():
            gradient = parameter.grad
            if not isinstance(gradient, DTensor) or not isinstance(parameter, DTensor):
                continue
            if gradient.placements != parameter.placements:
                parameter.grad = gradient.redistribute(placements=parameter.placements)
        return self.summed.all_reduce_(sums)


class TorchEngine(Composed):
    """Runs a layout by torch's parts, in the order tensor, recompute, pipeline, states.

    Starts from the first rank's weights. FSDP2 and DTensor change the model for good: after `close` it
    cannot be given to another engine.
    """

    name = "torch"
    dropout_seed: int | None = None  # type: ignore[assignment]  # masks are torch's own

    def _divide(self, ledger: Ledger) -> Ledger:
        layout, model = self.layout, self.model
        refusals.check("torch", layout, model)
        if fsdp.is_on_meta(model):
            raise ValueError(
                "engine 'torch' starts from weights that are there, and this model is on the meta device: "
                "build it on a device, or use engine='fmlab', which fills a model piece by piece"
            )
        grid = _grid(layout)
        self.mesh = Mesh(grid)
        self.data, self.stages = self.mesh.axis("data"), self.mesh.axis("pipeline")
        self._start_equal()
        self._gathered: dict[str, nn.Parameter] = {}
        self.devices = torch_mesh.device_mesh(grid, self.backend.device.type)
        torch_ledger = TorchLedger(model, self.mesh)
        torch_ledger.arranged = {}
        declared: Any = getattr(model, "parallel_plan", None)
        build = Build(model, layout, self.mesh, declared() if declared else None, torch_ledger, self.backend)
        if layout.tensor > 1:
            plan = build.need_plan("tensor parallelism")
            mesh = torch_mesh.part(self.devices, "tensor")
            starts: list[int] = []
            if layout.pipeline > 1:
                number = layout.pipeline * layout.virtual_stages
                starts = [stage.start for stage in cut_blocks(model, plan, number, layout.stage_cuts)]
            torch_tensor.apply(model, plan, torch_ledger, mesh, layout.sequence_parallel, starts)
        self.counts_together = expert.count_over_ranks(build)
        torch_recompute.apply(model, layout.recompute)
        self.pipeline: Pipeline | None = None  # type: ignore[assignment]
        roots: list[nn.Module] = [model]
        if layout.pipeline > 1:
            plan = build.need_plan("a pipeline")
            self.pipeline = Pipeline(self, plan, self.mesh, torch_ledger)
            roots = list(self.pipeline.stages.values())
        if layout.data > 1:
            self._shard(roots, torch_ledger)
        self.build = build
        self.states = TorchStates(build)
        return torch_ledger

    def _shard(self, roots: Sequence[nn.Module], ledger: TorchLedger) -> None:
        mesh = torch_mesh.part(self.devices, "replica", "shard")
        for root in roots:
            torch_shard.apply(root, list(getattr(root, "blocks", [])), mesh, self.layout)
        ledger.follow(self.model)
        paths = {id(module): path for path, module in self.model.named_modules()}
        divided = [module for module in torch_shard.divided(self.model) if module is not self.model]
        inner = tuple(f"{paths[id(module)]}." for module in divided)
        for module in torch_shard.divided(self.model):
            prefix = "" if module is self.model else f"{paths[id(module)]}."
            hook = partial(self._remember_leaves, prefix, () if prefix else inner)
            module.register_forward_pre_hook(hook)  # type: ignore[attr-defined]

    def _remember_leaves(self, prefix: str, others: tuple[str, ...], module: nn.Module, args: Any) -> None:
        """While a group is gathered, its parameters are other tensors: those are what a graph ends in."""
        for name, parameter in module.named_parameters():
            if not (others and name.startswith(others)):
                self._gathered[prefix + name] = parameter

    # region accumulate
    def _accumulate(self, micro_batches: Sequence[Batch], counts: Mapping[str, int]) -> Tensor:
        self.states.start()
        self._used: set[str] = set()
        if self.pipeline is not None:
            return self._pipelined(list(micro_batches), counts)
        batches = self._in_step(self._with_targets(micro_batches))
        sums = self._zero_sums()
        with self._loss_context(), warnings.catch_warnings():
            # FSDP2 warns of outputs that are views; no block here changes what it is given
            warnings.filterwarnings("ignore", message=".*returned a view tensor", category=UserWarning)
            for batch in batches:
                share, of_batch = self._forward(batch, counts)
                self._touch_unused(share).backward()
                sums += of_batch
        return self._forget_unused(self.states.finish(sums))

    # endregion

    def _pipelined(self, batches: list[Batch], counts: Mapping[str, int]) -> Tensor:
        """Raises ValueError on every rank unless all have as many micro-batches as the layout, alike."""
        assert self.pipeline is not None
        shapes = [{name: tuple(t.shape) for name, t in batch.items()} for batch in batches]
        wrong = len(batches) != self.layout.micro_batches or any(shape != shapes[0] for shape in shapes)
        world = self.mesh.axis(*self.mesh.grid.order)
        if int(world.all_reduce_(torch.tensor([int(wrong)], device=self.backend.device))):
            here = f"this one has {len(batches)} with {shapes}" if wrong else "another rank has not"
            raise ValueError(
                f"torch's pipeline runs micro_batches={self.layout.micro_batches} micro-batches of one shape "
                f"on each rank; {here}: pad them, or use engine='fmlab'"
            )
        with self._loss_context(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*returned a view tensor", category=UserWarning)
            sums = self.states.finish(self.pipeline.run(batches, counts))
        self.pipeline.tied.sum_(self.ledger)
        if not any(counts.values()):  # gradients are zeros, by which weights would still decay
            self.states.start()
        return self.stages.all_reduce_(sums)

    def _loss_context(self) -> AbstractContextManager[object]:
        return loss_parallel() if self.layout.tensor > 1 else nullcontext()

    def _touch_unused(self, share: Tensor) -> Tensor:
        """Add zero to the loss for each parameter that is not in its graph.

        FSDP2 leaves out of its reduce-scatter what has no gradient, so that ranks which use different
        parameters would add up gradients of different ones, without an error.
        """
        leaves = self._gathered if self.layout.data > 1 else dict(self.ledger.parameters())
        reached = _leaves(share)
        for name, parameter in leaves.items():
            if id(parameter) in reached:
                self._used.add(name)
            elif parameter.requires_grad and self.layout.data > 1:
                plain = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                share = share + plain.flatten()[:0].sum()
        return share

    def _forget_unused(self, sums: Tensor) -> Tensor:
        """A parameter that no rank used gets no gradient, as on one device."""
        if self.layout.data == 1:
            return sums
        trainable = self.ledger.trainable()
        used = torch.tensor([float(name in self._used) for name in trainable])
        for parameter, ranks in zip(
            trainable.values(), self.states.summed.all_reduce_(used).tolist(), strict=True
        ):
            if ranks == 0:
                parameter.grad = None
        return sums

    def close(self) -> None:
        Engine.close(self)
        self.mesh.close()


def _grid(layout: Layout) -> Grid:
    """The layout's grid, in which whole replicas are shards of one rank."""
    states = layout.zero > 0 or layout.fsdp
    sizes = {axis: getattr(layout, axis) for axis in AXES}
    return Grid(sizes, layout.axis_order, layout.data // layout.replicas if states else 1)
