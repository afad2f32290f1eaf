"""The end of a training step: sum what several ranks hold, agree on the gradient's norm, update, share.

The order is Megatron's: gradients between replicas (behind the backward pass), those of norms and biases
under sequence parallelism, those of tied tables, then the norm, AdamW, and with ZeRO 1 and 2 the new weights.
"""

from collections.abc import Mapping, Sequence

from fmlab.chips import Chip
from fmlab.sim.fabric import Fabric
from fmlab.sim.ledger import state_bytes
from fmlab.sim.program import Program
from fmlab.sim.schedule import Action
from fmlab.sim.split import Split
from fmlab.sim.step import Builder, Step


def step_tasks(
    program: Program,
    actions: Sequence[Sequence[Action]],
    chip: Chip,
    fabric: Fabric | None,
    expand: bool = False,
    slow: Mapping[int, float] | None = None,
) -> Step:
    """All tasks of a training step; arguments as for Builder. chip: prices the optimizer."""
    builder = Builder(program, actions, fabric, expand, slow)
    builder.passes()
    _sum_replicated(builder)
    _sum_tied(builder)
    _update(builder, chip)
    return builder.finish()


def _sum_replicated(builder: Builder) -> None:
    """Sequence parallelism: norms and biases saw a share of the positions; add up their gradients."""
    split = builder.split
    if not split.sequence_parallel:
        return
    for stage in range(split.pipeline):
        weights = [w for chunk in builder.program.of_stage(stage) for block in chunk.weights for w in block]
        payload = sum(w.numel for w in weights if not w.divided) * split.gradient_dtype.itemsize
        seconds = builder.price("all_reduce", payload, split.tensor_group(stage))
        for replica in builder.replicas:
            ranks = [split.rank(stage, replica, shard) for shard in builder.shards]
            after = [key for rank in ranks for key in builder.reduced(rank)]
            lanes = [(rank, "compute") for rank in ranks]
            builder.add(("norms", stage, replica), "all_reduce norms", seconds, lanes, after, "tensor")


def _sum_tied(builder: Builder) -> None:
    """A table that two stages hold has two gradients; both get their sum."""
    split = builder.split
    for tie in builder.program.ties:
        stages = sorted({chunk % split.pipeline for chunk in tie.chunks})
        if len(stages) < 2:
            continue
        payload = tie.numel * split.gradient_dtype.itemsize
        for replica, shard in builder.members:
            group, *beside = (
                tuple(split.rank(stage, replica, (shard + other) % split.tensor) for stage in stages)
                for other in range(split.tensor)
            )
            after = [key for rank in group for key in builder.reduced(rank)]
            lanes = [(rank, "compute") for rank in group]
            seconds = builder.price("all_reduce", payload, group, beside)
            builder.add(
                ("tie", tie.name, replica, shard), f"all_reduce {tie.name}", seconds, lanes, after, "tied"
            )


def _update(builder: Builder, chip: Chip) -> None:
    split, ranks = builder.split, builder.ranks()
    for rank in ranks:
        seconds = norm_bytes(builder.program, split.coordinates(rank)[0]) / chip.memory_bandwidth
        seconds *= builder.slow.get(rank, 1.0)
        lanes, after = [(rank, "compute")], builder.reduced(rank)
        builder.add(("norm", rank), "gradient norm", seconds, lanes, after, "optimizer")
    if split.world_size > 1:
        seconds = builder.price("all_reduce", 8, range(split.world_size))
        builder.add("agree", "all_reduce norm", seconds, [(rank, "compute") for rank in ranks], [], "tied")
    for rank in ranks:
        seconds = adamw_bytes(builder.program, split.coordinates(rank)[0]) / chip.memory_bandwidth
        seconds *= builder.slow.get(rank, 1.0)
        builder.add(("update", rank), "AdamW", seconds, [(rank, "compute")], [], "optimizer")
    if split.zero not in (1, 2):
        return
    for stage in range(split.pipeline):
        payload = builder.program.numel(stage) * split.dtype.itemsize
        updated = {s: [("update", rank) for rank in builder.members_of(stage, s)] for s in builder.shards}
        builder.between_replicas(("new", stage), stage, "all_gather", payload, "gather", updated)


def _owned(numel: int, split: Split) -> int:
    return -(-numel // split.data) if split.zero else numel


def norm_bytes(program: Program, stage: int) -> int:
    """Memory traffic of the gradient's norm on a rank: each gradient that it owns is read once."""
    return _owned(program.numel(stage), program.split) * program.split.gradient_dtype.itemsize


def adamw_bytes(program: Program, stage: int) -> int:
    """Memory traffic of a fused AdamW on a rank: gradients read, states read and written, weights written."""
    split, numel = program.split, program.numel(stage)
    states = state_bytes(numel, split)
    weights = split.dtype.itemsize * (2 if split.precision == "fp32" else 1)  # without a master they are read
    moved = _owned(numel, split) * (split.gradient_dtype.itemsize + weights)
    return moved + 2 * (states["master weights"] + states["moments"])
