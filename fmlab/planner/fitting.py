"""Which layouts a model and its chips can have, and which others are near one that does not fit."""

from collections.abc import Mapping
from typing import Any

from fmlab.parallel import Layout
from fmlab.planner.flops import RECOMPUTE
from fmlab.planner.hardware import Hardware
from fmlab.planner.modelshape import ModelShape
from fmlab.planner.setup import Setup
from fmlab.planner.stages import chunks_of_stage


def check_layout(shape: ModelShape, layout: Layout, lengths: Mapping[str, int], machine: Hardware) -> None:
    """Raise ValueError, with what is legal, for a layout that this model or these chips cannot have.

    Ranks, rows and schedules are fmlab.parallel.legal's to check, which needs no model for them.
    """
    one = machine.calibration
    if layout.offload != "none" and not (one.host_link and one.host_memory):
        raise ValueError(
            f"offload={layout.offload!r}: no source gives the link to the host's memory, nor its speed; give "
            "yours, in bytes a second of a chip, as Calibration(host_link=…, host_memory=…) or --host-link "
            "and --host-memory, or divide the states among more chips (zero=3 or fsdp=True)"
        )
    chunks = layout.pipeline * layout.virtual_stages
    if isinstance(layout.stage_cuts, tuple) and len(layout.stage_cuts) != chunks - 1:
        raise ValueError(
            f"stage_cuts={layout.stage_cuts}: {chunks} chunks need {chunks - 1} blocks to begin at"
        )
    chunks_of_stage(shape, layout, 0)
    for part in shape.parts:  # each raises for degrees that do not divide it
        part.on(layout.tensor)
    if layout.expert > 1:
        if not shape.experts:
            raise ValueError(
                f"expert={layout.expert}: {shape.name} has no experts to divide; leave expert out"
            )
        for group in shape.layers:
            group.experts_on(1, layout.expert)
    if layout.context > 1:
        _check_context(shape, layout, lengths)
    if layout.world_size > 1:
        machine.need_wires(layout.world_size)


def _check_context(shape: ModelShape, layout: Layout, lengths: Mapping[str, int]) -> None:
    if len(lengths) > 1 or not shape.vocab_size:
        raise ValueError(
            f"context={layout.context}: only a model of one stream of tokens has a sequence to divide, and "
            f"{shape.name} works on {', '.join(lengths)}; use data or tensor ranks"
        )
    if layout.context_method == "ulysses":
        for group in shape.layers:
            heads = group.heads // layout.tensor
            if heads % layout.context:
                raise ValueError(
                    f"context={layout.context} with ulysses exchanges whole heads, and a rank has {heads}; "
                    "choose a degree that divides them, or context_method='ring'"
                )


Change = tuple[str, dict[str, Any]]


def nearby(setup: Setup, kind: str) -> list[Change]:
    """Changes that save memory on as many chips: of how "states" are divided, or "activations" are kept."""
    return _states(setup) if kind == "states" else _activations(setup)


def _states(setup: Setup) -> list[Change]:
    layout, found = setup.layout, list[Change]()
    if layout.data > 1 and not layout.fsdp:
        found += [(f"zero={zero}", dict(zero=zero)) for zero in range(layout.zero + 1, 4)]
        if not layout.zero:
            found.append(("fsdp=True", dict(fsdp=True)))
    if layout.data > 1 and layout.offload == "none":  # refused where the host's rates are not known
        least = dict(offload="optimizer") | (dict() if layout.fsdp else dict(zero=max(1, layout.zero)))
        found.append((", ".join(f"{name}={value!r}" for name, value in least.items()), least))
    for axis in ("tensor", "pipeline"):
        if layout.data % 2 == 0:
            degrees = {axis: getattr(layout, axis) * 2, "data": layout.data // 2}
            degrees["micro_batches"] = layout.micro_batches * 2
            found.append((", ".join(f"{name}={number}" for name, number in degrees.items()), degrees))
    return found


def _activations(setup: Setup) -> list[Change]:
    layout, found = setup.layout, list[Change]()
    if layout.tensor > 1 and not layout.sequence_parallel:
        found.append(("sequence_parallel=True", dict(sequence_parallel=True)))
    for again in RECOMPUTE[RECOMPUTE.index(setup.recompute) + 1 :]:
        found.append((f"recompute={again!r}", dict(recompute=again)))
    parts = [number for number in range(2, min(setup.rows, 64) + 1) if setup.rows % number == 0]
    for number in parts:
        more = layout.micro_batches * number
        found.append((f"micro_batches={more}", dict(micro_batches=more)))
    return found
