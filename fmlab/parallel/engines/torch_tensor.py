"""Tensor and sequence parallelism by torch's DTensor, from a model's plan.

Every parameter becomes a DTensor on the tensor-parallel mesh. Matrices multiply as DTensors under torch's own
styles: ColwiseParallel where the plan says "column", RowwiseParallel for the embedding's look-up and, since
our layers add the bias of their last matrix themselves, a style like it for "row". Between them are plain
tensors, and what is not divided (norms, biases, tables of positions) is handed to its layer as one.

Shapes: b batch, l length, d hidden width, n rows (tokens), v vocabulary.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from fmlab.models.cross_entropy import IGNORE
from fmlab.models.functions import linear
from fmlab.models.plan import ParallelPlan, Rule
from fmlab.models.state import Block, State
from fmlab.parallel.engines.torch_ledger import _DIM, TorchLedger, owners


def apply(
    model: nn.Module,
    plan: ParallelPlan,
    ledger: TorchLedger,
    mesh: DeviceMesh,
    sequence_parallel: bool = False,
    stages: Sequence[int] = (),
) -> None:
    """Divide the model's matrices among the ranks of `mesh`, and its sequence too between them.

    stages: the first blocks of a pipeline's stages; what is sent from one to the next is whole.
    """
    ledger.arranged = {
        name: (plan.rule(name), mesh.size())
        for name in ledger.entries
        if plan.rule(name).kind in ("column", "row") and plan.rule(name).parts > 1
    }
    for name, parameter in list(ledger.parameters()):
        _distribute(model, ledger, name, parameter, plan.rule(name), mesh)
    blocks: list[Any] = list(cast(nn.ModuleList, model.blocks))
    region = [i for i, block in enumerate(blocks) if _kinds(plan, f"blocks.{i}", block) >= {"column", "row"}]
    switch = _Switch()
    for index, block in enumerate(blocks):
        inside = sequence_parallel and index in region
        for path, module in block.named_modules():
            _style(
                module, plan, f"blocks.{index}.{path}" if path else f"blocks.{index}", mesh, inside, switch
            )
        block.forward = switch.during(block.forward)
        if hasattr(block, "cross_entropy"):
            block.cross_entropy = vocab_parallel_cross_entropy
    if sequence_parallel:
        for index in region:
            if index - 1 not in region or index in stages:
                blocks[index].register_forward_pre_hook(partial(_scatter_sequence, mesh))
            if index + 1 not in region or index + 1 in stages:
                blocks[index].register_forward_hook(partial(_gather_sequence, mesh))


def _kinds(plan: ParallelPlan, path: str, block: Block) -> set[str]:
    return {plan.rule(f"{path}.{name}").kind for name, _ in block.named_parameters()}


# region distribute
def _distribute(
    model: nn.Module, ledger: TorchLedger, name: str, parameter: nn.Parameter, rule: Rule, mesh: DeviceMesh
) -> None:
    """Put a DTensor in the place of a parameter, under all its names."""
    placed: Placement = Replicate() if rule.kind == "replicate" else Shard(_DIM[rule.kind])
    whole = ledger.arrange(name, parameter.detach())
    # All ranks have the same weights already: src_data_rank=None spares a message each.
    divided = distribute_tensor(whole, mesh, [placed], src_data_rank=None)
    piece = nn.Parameter(divided, requires_grad=parameter.requires_grad)
    entry = ledger.entries[name]
    for module, leaf in owners(model, (name, *entry.aliases)):
        module.register_parameter(leaf, piece)
    ledger.stand_in(name, piece)


# endregion


class _Switch:
    """On while a block runs: only then its modules see plain tensors, for FSDP asks them for DTensors."""

    def __init__(self) -> None:
        self.on = False

    def during(self, forward: Callable[..., State]) -> Callable[..., State]:
        def switched(state: State) -> State:
            self.on = True
            try:
                return forward(state)
            finally:
                self.on = False

        return switched


def _style(
    module: nn.Module, plan: ParallelPlan, path: str, mesh: DeviceMesh, sequence: bool, switch: _Switch
) -> None:
    """How the parameters of one module take part, by their rules."""
    rules = {leaf: plan.rule(f"{path}.{leaf}") for leaf, _ in module.named_parameters(recurse=False)}
    if not rules:
        return
    kind = rules["weight"].kind if "weight" in rules else "replicate"
    stream: Placement = Shard(1) if sequence else Replicate()
    if kind == "column" and isinstance(module, nn.Linear):
        _Column(input_layouts=stream)._apply(module, mesh)
    elif kind == "vocab" and isinstance(module, nn.Embedding):
        _Lookup(input_layouts=Replicate())._apply(module, mesh)
    elif kind == "vocab":
        pass  # the output matrix: its block hands it to the cross-entropy as it is
    else:
        summed: Placement = Partial() if sequence else Replicate()
        plain = {
            leaf: summed if rule.kind == "replicate" else Shard(_DIM[rule.kind])
            for leaf, rule in rules.items()
            if not (kind == "row" and leaf == "weight")
        }
        product = partial(_row_product, stream) if kind == "row" else None
        _hand_out_plain(module, plain, product, switch)


class _Column(ColwiseParallel):
    """Its weights are distributed already."""

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        pass


class _Lookup(RowwiseParallel):
    """Each rank looks up the tokens of its rows, the sum is what all want."""

    def _partition_embedding_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        pass


# region row
def _row_product(stream: Placement, module: Any, x: Tensor) -> Tensor:
    """x [b,l,i/ranks] @ weight.T, the ranks' partial sums added up: whole, or each rank's positions."""
    weight: DTensor = module.weight
    partial_sums = linear(DTensor.from_local(x, weight.device_mesh, [Shard(-1)], run_check=False), weight)
    return partial_sums.redistribute(placements=[stream]).to_local()  # type: ignore[attr-defined]


# endregion


def _hand_out_plain(
    module: nn.Module,
    gradients: dict[str, Placement],
    product: Callable[..., Tensor] | None,
    switch: _Switch,
) -> None:
    """Let a module see these DTensor parameters as plain tensors; `gradients`: how theirs are placed."""

    def plain(leaf: str, placed: Placement) -> property:
        def read(self: nn.Module) -> Tensor | None:
            parameter = self._parameters[leaf]
            if not switch.on or not isinstance(parameter, DTensor):
                return parameter
            return parameter.to_local(grad_placements=[placed])

        return property(read)

    members: dict[str, Any] = {leaf: plain(leaf, placed) for leaf, placed in gradients.items()}
    if product is not None:
        members["product"] = lambda self, x: product(self, x)
    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), members)


# region loss
def vocab_parallel_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None
) -> Tensor:
    """torch's loss parallel, summed: hidden [n,d], labels [n] whole, weight [v,d], bias [v] by rows.

    Forward and backward pass must run under one `loss_parallel()` (which cannot be nested).
    """
    assert isinstance(weight, DTensor)
    whole = DTensor.from_local(hidden, weight.device_mesh, [Replicate()], run_check=False)
    logits = F.linear(whole, weight, bias)  # [n,v], each rank its part of the vocabulary
    if logits.dtype.itemsize < 4:
        logits = logits.float()
    loss = F.cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORE)
    return loss.to_local()  # type: ignore[attr-defined]


# endregion


# region sequence
def _scatter_sequence(mesh: DeviceMesh, block: Block, args: tuple[State, ...]) -> tuple[State, ...]:
    """Each rank goes on with its part of the positions. Raises ValueError for a length that cannot be cut."""
    state = args[0]
    length = state.hidden.shape[1]
    if length % mesh.size():
        raise ValueError(
            f"sequence_parallel=True divides {length} positions among {mesh.size()} ranks, which leaves a "
            f"rest; pad the batch to {-(-length // mesh.size()) * mesh.size()} positions"
        )
    whole = DTensor.from_local(state.hidden, mesh, [Replicate()], run_check=False)
    hidden: Any = whole.redistribute(placements=[Shard(1)])
    state.derived["hidden positions"] = length
    return (state.updated(hidden=hidden.to_local()),)


def _gather_sequence(mesh: DeviceMesh, block: Block, args: tuple[State, ...], state: State) -> State:
    parts = DTensor.from_local(state.hidden, mesh, [Shard(1)], run_check=False)
    hidden: Any = parts.redistribute(placements=[Replicate()])
    return state.updated(hidden=hidden.to_local())


# endregion
