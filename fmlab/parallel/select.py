"""From a layout to an engine."""

from collections.abc import Callable

import torch.distributed as dist
from torch import nn

from fmlab.backends import Backend, get_backend
from fmlab.parallel.composed import Composed
from fmlab.parallel.ddp import DataParallel, replicas
from fmlab.parallel.engine import Engine, Objective, OptimizerFactory
from fmlab.parallel.engines.torch_ddp import TorchDataParallel
from fmlab.parallel.expert import counting_modules
from fmlab.parallel.fsdp import check_meta, is_on_meta
from fmlab.parallel.layout import Layout
from fmlab.parallel.single import SingleDevice

EngineChoice = str | Callable[..., Engine]


def _by_hand(layout: Layout) -> type[Engine]:
    return DataParallel if layout.plain_data else Composed


def _torch(layout: Layout) -> type[Engine]:
    if layout.plain_data:
        return TorchDataParallel
    # FSDP, DTensor and pipelining take seconds to import.
    if layout.zero == 1 and layout.world_size == layout.data:
        from fmlab.parallel.engines.torch_zero1 import TorchZeroOne

        return TorchZeroOne
    from fmlab.parallel.engines.torch_engine import TorchEngine

    return TorchEngine


def _deepspeed(layout: Layout) -> type[Engine]:
    if layout.pipeline > 1:
        from fmlab.parallel.engines.deepspeed_pipeline import DeepSpeedPipeline

        return DeepSpeedPipeline
    from fmlab.parallel.engines.deepspeed_engine import DeepSpeedEngine

    return DeepSpeedEngine


#: What runs a layout of several ranks, or of one with more than plain steps, by the engine's name.
ENGINES: dict[str, Callable[[Layout], type[Engine]]] = {
    "fmlab": _by_hand,
    "torch": _torch,
    "deepspeed": _deepspeed,
}


def parallelize(
    model: nn.Module,
    layout: Layout,
    objective: Objective,
    optimizer: OptimizerFactory,
    engine: EngineChoice = "fmlab",
    backend: Backend | None = None,
    max_grad_norm: float | None = None,
) -> Engine:
    """The engine that runs `layout` on `model`; every rank calls it.

    engine: "fmlab" (by hand), "torch" or "deepspeed" (production), or a class or function that takes the
    other arguments and returns an Engine. Where the layout has one rank, all names mean the same plain step
    on one device. What an engine cannot run: fmlab.parallel.engines.refusals.
    optimizer: called with (name, parameter) pairs of the trainable parameters. backend: default, this
    machine's best. The model is moved to the backend's device; with fsdp it may be on the meta device, see
    fmlab.parallel.fsdp.meta.

    Raises ValueError for an unknown engine, for a layout that fits neither the ranks nor the model (see
    Layout.validate, which a script may call before it starts any rank), and where ranks ask for different
    things.
    """
    world_size = 1
    if dist.is_available() and dist.is_initialized():
        world_size = dist.get_world_size()
        by = engine if isinstance(engine, str) else getattr(engine, "__name__", type(engine).__name__)
        asked = f"{layout} by {by}, {type(objective).__name__}, max_grad_norm={max_grad_norm}"
        replicas.check_same_settings(asked, dist.group.WORLD)
    layout.validate(world_size, model=model, objective=objective)
    if isinstance(engine, str):
        if engine not in ENGINES:
            raise ValueError(f"there is no engine {engine!r}; legal are {', '.join(ENGINES)}")
        alone = layout.world_size == 1 and layout.plain_data
        if engine != "fmlab" and not alone and not (dist.is_available() and dist.is_initialized()):
            raise ValueError(
                f"engine {engine!r} runs {layout} on ranks, and there is no process group; start it with "
                "torchrun --nproc-per-node 1, or use engine='fmlab'"
            )
        engine = SingleDevice if alone else ENGINES[engine](layout)
        if engine is DataParallel and counting_modules(model):
            engine = Composed  # whose ranks keep step, so that they can count choices of experts together
    backend = backend or get_backend()
    if is_on_meta(model):  # filled where it will live
        check_meta(model, layout)
    else:
        model = backend.to_device(model)
    return engine(model, layout, objective, optimizer, backend, max_grad_norm)
