"""What an engine cannot run of a layout, part by part, before any process is asked."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from fmlab.models.plan import ParallelPlan
from fmlab.parallel.layout import Layout

_Refusals = Iterator[tuple[str, str]]


def refusals(engine: str, layout: Layout, model: nn.Module | None = None) -> dict[str, str]:
    """The parts of `layout` that an engine ("fmlab", "torch", "deepspeed") does not run: part -> the reason,
    with a way around; empty if it runs all. No process is needed.

    model: may be on the meta device; says what fits the model besides.

    Raises ValueError for an unknown engine.
    """
    if engine not in _CHECKS:
        raise ValueError(f"there is no engine {engine!r}; legal are {', '.join(_CHECKS)}")
    if layout.plain_data and (engine != "deepspeed" or layout.data == 1):
        return {}
    declared: Any = getattr(model, "parallel_plan", None)
    return dict(_CHECKS[engine](layout, model, declared() if declared else None))


def check(engine: str, layout: Layout, model: nn.Module | None = None) -> None:
    """Raise ValueError with all refusals, if there are any."""
    found = refusals(engine, layout, model)
    if found:
        reasons = "; ".join(f"{part}: {reason}" for part, reason in found.items())
        raise ValueError(f"engine {engine!r} cannot run {layout}: {reasons}")


def _common(layout: Layout) -> _Refusals:
    if layout.collectives == "fmlab":
        yield "collectives", "its collectives are torch.distributed's own; leave collectives='torch'"
    if layout.recompute == "budget":
        yield "recompute", "torch.utils.checkpoint has no budget; use 'full', 'selective' or engine='fmlab'"
    if layout.expert > 1:
        yield "expert", "it knows no experts that this engine could divide by a plan; use engine='fmlab'"


def _torch(layout: Layout, model: nn.Module | None, plan: ParallelPlan | None) -> _Refusals:
    yield from _common(layout)
    if layout.context > 1:
        yield (
            "context",
            "torch's context_parallel (experimental) divides the attention kernels of CUDA; on a CPU it ends "
            "with 'Operator aten._scaled_dot_product_flash_attention_for_cpu.default does not have a "
            "sharding strategy registered'. Use engine='fmlab', whose ring and Ulysses need no such kernel",
        )
    if layout.zero == 1 and layout.world_size > layout.data:
        yield (
            "zero",
            "ZeroRedundancyOptimizer shares out whole parameters of a data-parallel replica, and cannot do "
            "so with DTensors or stages; use zero=2, which is FSDP2",
        )
    if layout.zero == 1 and layout.replicas > 1:
        yield "replicas", "ZeroRedundancyOptimizer has one group of ranks; use zero=2, which is FSDP2"
    if layout.zero == 1 and layout.recompute != "none":
        yield "recompute", "DistributedDataParallel runs as a plain replica here; use zero=2, which is FSDP2"
    if layout.offload == "optimizer":
        yield (
            "offload",
            "FSDP2's CPUOffloadPolicy moves parameters, gradients and optimizer state, all or nothing; use "
            "offload='parameters' with zero=3 or fsdp=True",
        )
    if layout.zero >= 2 or layout.fsdp:
        for name, parameter in [] if model is None else model.named_parameters():
            if not parameter.is_contiguous():
                part = "fsdp" if layout.fsdp else "zero"
                why = f"FSDP2 shards contiguous parameters only, and {name} lies in memory channels last"
                yield part, f"{why}; build the model with channels first, or use engine='fmlab'"
                break
    if layout.tensor > 1:
        yield from _torch_tensor(layout, model, plan)
    if layout.pipeline > 1:
        yield from _torch_pipeline(layout, model, plan)


def _torch_tensor(layout: Layout, model: nn.Module | None, plan: ParallelPlan | None) -> _Refusals:
    if plan is None or model is None:
        return
    behind = [module for block in list(getattr(model, "blocks", ()))[1:] for module in block.modules()]
    if any(isinstance(module, nn.modules.conv._ConvNd) for module in behind):
        yield (
            "tensor",
            "there are convolutions behind divided matrices, for which torch has no style: a plain one ends "
            "with 'got mixed torch.Tensor and DTensor'; use engine='fmlab'",
        )
        return
    for name, parameter in model.named_parameters():
        rule = plan.rule(name)
        if rule.kind == "expert":
            yield "tensor", f"{name} is stacked by expert, for which DTensor has no style; use engine='fmlab'"
            return
        degree = layout.tensor
        if degree not in rule.degrees(parameter.shape, degree) or rule.copies(parameter.shape, degree) > 1:
            yield (
                "tensor",
                f"{name} {list(parameter.shape)} has no {degree} equal parts of whole heads, and a DTensor "
                "is divided or copied along a mesh; few key/value heads would have to be some of both: "
                "use fewer ranks, or engine='fmlab'",
            )
            return
    streams = [stream.name for stream in plan.streams]
    if layout.sequence_parallel and streams != ["hidden"]:
        yield (
            "sequence_parallel",
            f"the model has the streams {streams}, and torch's styles give each module one input whose "
            "placement is known; what attends to another stream takes two. Use engine='fmlab'",
        )


def _beginnings(model: nn.Module) -> int:
    """How many blocks read nothing that a block before them has written."""
    written: set[str] = set()
    found = 0
    for block in getattr(model, "blocks", ()):
        found += written.isdisjoint(block.reads)
        written.update(block.writes)
    return found


def _sends_to_itself() -> bool:
    """Whether this torch runs a V by the old executor, which has messages only."""
    from torch.distributed.pipelining import schedules

    return not issubclass(schedules.ScheduleZBVZeroBubble, schedules._PipelineScheduleRuntime)


def _torch_pipeline(layout: Layout, model: nn.Module | None, plan: ParallelPlan | None) -> _Refusals:
    n, stages = layout.micro_batches, layout.pipeline * layout.virtual_stages
    zero_bubble = layout.schedule.startswith("zb")
    if zero_bubble and ((layout.fsdp and layout.reshard) or layout.zero == 3):
        yield (
            "schedule",
            "with a backward pass in two parts FSDP2, which gives parameters back after the first, leaves "
            "wrong gradients and no error; use schedule='1f1b', or zero=2, which keeps parameters gathered",
        )
    if zero_bubble and any("GroupNorm" in type(m).__name__ for m in (model.modules() if model else ())):
        yield (
            "schedule",
            "torch's group norm, asked for the gradients of its weights alone in channels_last memory, ends "
            "the process on a CPU; use schedule='1f1b', or engine='fmlab'",
        )
    if layout.schedule == "zbv" and _sends_to_itself():
        yield (
            "schedule",
            "torch 2.9 sends what passes between the two stages of a rank to that rank itself, at which gloo "
            "ends with 'Pair is not connected'; use schedule='zb-h1', or a later torch",
        )
    if layout.schedule == "zbv" and model is not None and _beginnings(model) > 1:
        yield (
            "schedule",
            "blocks that begin anew from the inputs, such as a second tower, lie off the way along which "
            "torch takes the backward pass apart; CLIP's gradients came out wrong with it, without an error. "
            "Use schedule='1f1b', or engine='fmlab'",
        )
    if layout.schedule == "1f1b" and n < stages:
        yield (
            "micro_batches",
            f"Schedule1F1B wants as many micro-batches as stages, got {n} for {stages}; use schedule='gpipe' "
            "or more micro-batches",
        )
    rounds = max(1, n // layout.pipeline)
    if layout.schedule in ("interleaved", "zb-h1") and n % rounds:
        yield (
            "micro_batches",
            f"torch wants a multiple of {rounds} rounds, got {n}; use {n - n % layout.pipeline}",
        )
    if layout.schedule == "zbv" and layout.data > 1 and plan is not None and plan.tied:
        yield (
            "data",
            "in a V the first rank holds the first and the last stage, each an FSDP root of its own, which "
            "would take a tied table apart twice; use schedule='1f1b', or untie it",
        )
    if zero_bubble and plan is not None and len(plan.streams) > 1:
        yield (
            "schedule",
            "torch takes the backward pass apart along the graph of a stage, and with more than one tensor "
            "between stages ends with 'Trying to backward through the graph a second time'; use '1f1b'",
        )
    if zero_bubble and layout.recompute != "none":
        yield (
            "recompute",
            "torch's checkpoint computes a layer again once, and a backward pass in two parts would need it "
            "twice; use schedule='1f1b'",
        )


def _deepspeed(layout: Layout, model: nn.Module | None, plan: ParallelPlan | None) -> _Refusals:
    yield from _common(layout)
    if layout.fsdp:
        yield "fsdp", "its name for dividing everything is zero=3"
    if layout.replicas > 1:
        yield "replicas", "hybrid sharding is an engine of its own there (MiCS), which fmlab does not set up"
    if layout.tensor > 1:
        yield (
            "tensor",
            "its AutoTP finds the layers to divide by the names of Hugging Face's architectures, not by a "
            "plan; use engine='torch' or 'fmlab'",
        )
    if layout.context > 1:
        yield (
            "context",
            "DeepSpeed-Ulysses is an attention module for a model to be written with, not a change of one "
            "that is there; use engine='fmlab'",
        )
    if layout.pipeline > 1:
        yield from _deepspeed_pipeline(layout)
    if layout.zero == 0 and layout.world_size == layout.data and not layout.fsdp:
        yield "zero", "without ZeRO it is data parallelism, which engine='torch' runs; set zero=1, 2 or 3"
    if model is not None and any(p.dtype.itemsize == 8 for p in model.parameters()):
        yield (
            "fp64",
            "ZeRO keeps weights, gradients and optimizer state in fp32 and would round a model in fp64 "
            "without a word, and the pipeline ends with 'attempting to reduce an unsupported grad type: "
            "torch.float64'; compare in fp32",
        )


def _deepspeed_pipeline(layout: Layout) -> _Refusals:
    if layout.schedule != "1f1b":
        yield "schedule", "its PipelineEngine has one schedule, 1F1B; use engine='torch' or 'fmlab'"
    if layout.zero:
        yield (
            "zero",
            "its PipelineEngine asserts 'ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism', and "
            "the first stage hides the gradients of a tied table until they are applied; use zero=0",
        )
    if layout.axis_order.index("data") > layout.axis_order.index("pipeline"):
        yield "axis_order", "its grid numbers data ranks first and stages last; leave axis_order as it is"


def _by_hand(layout: Layout, model: nn.Module | None, plan: ParallelPlan | None) -> _Refusals:
    from fmlab.parallel import pipeline

    if layout.fsdp and layout.offload != "none":
        yield "offload", "FSDP keeps its shards on the device here; use zero=1, 2 or 3, which can offload"
    try:
        pipeline.check_split(layout)
    except ValueError as error:
        yield "schedule", str(error)


_CHECKS: dict[str, Callable[[Layout, nn.Module | None, ParallelPlan | None], _Refusals]] = {
    "fmlab": _by_hand,
    "torch": _torch,
    "deepspeed": _deepspeed,
}
