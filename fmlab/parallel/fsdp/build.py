"""From a model to units: which parameters come and go together, among whom they are divided, in what type."""

from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor, nn

from fmlab.parallel.build import Build
from fmlab.parallel.fsdp.chunks import Chunks
from fmlab.parallel.fsdp.messages import Group, Unit
from fmlab.parallel.fsdp.sharded import Sharded, make_room, memory_order
from fmlab.parallel.fsdp.units import blocks_of, homes_of
from fmlab.parallel.mesh import Axis
from fmlab.parallel.placeholder import DividedParameter

Owners = dict[int, list[tuple[nn.Module, str]]]


def make_units(build: Build) -> tuple[Unit, list[Unit], list[nn.Module]]:
    """Divide the model's parameters: the root unit, the others, and the module of each of those.

    The ledger notes the cuts; from now on the modules hold shards.
    """
    divider = _Divider(build)
    blocks = blocks_of(build.model)
    homes = homes_of(build.model, blocks)
    by_home: dict[int, list[str]] = defaultdict(list)
    for name, parameter in build.ledger.parameters():
        by_home[homes[id(parameter)]].append(name)
    modules = [(i, block) for i, block in enumerate(blocks) if by_home[i]]
    names = {id(module): name for name, module in build.model.named_modules()}
    units = [
        Unit(names[id(block)], place, divider.groups(by_home[i])) for place, (i, block) in enumerate(modules)
    ]
    return Unit("root", -1, divider.groups(by_home[-1])), units, [block for _, block in modules]


class _Divider:
    def __init__(self, build: Build) -> None:
        self.build, self.ledger, mesh = build, build.ledger, build.mesh
        self.states = mesh.axis("shard"), mesh.axis("context", "replica")
        #: Experts are divided already: their copies divide what is left, and sum over no one else.
        self.experts = self.states
        if build.layout.expert > 1:
            self.experts = mesh.axis("expert_replica"), mesh.axis("context")
        self.parameters = dict(self.ledger.parameters())
        self.owners: Owners = defaultdict(list)
        for module in build.model.modules():
            for leaf, parameter in module._parameters.items():
                if parameter is not None:
                    self.owners[id(parameter)].append((module, leaf))

    def groups(self, names: list[str]) -> list[Group]:
        """Divide these parameters and put together what travels together."""
        kinds: dict[tuple[bool, torch.dtype], list[Sharded]] = {}
        for name in names:
            key = (self._is_expert(name), self.parameters[name].dtype)
            kinds.setdefault(key, []).append(self._divide(name))
        groups = []
        for (expert, _), parameters in kinds.items():
            axis, copies = self.experts if expert else self.states
            groups.append(Group(axis, copies, parameters))
            if self.build.initial is not None:
                self._fill(parameters, self.build.initial)
        return groups

    @torch.no_grad()
    def _fill(self, parameters: list[Sharded], first_value: Callable[[str], Tensor]) -> None:
        """Give shards of a model on the meta device their first values; one parameter is whole at a time."""
        for p in parameters:
            p.shard.copy_(self.ledger.piece(p.name, first_value(p.name)))

    def _is_expert(self, name: str) -> bool:
        return any(cut.axis.name == "expert" for cut in self.ledger.entries[name].cuts)

    def _axis(self, name: str) -> Axis:
        return (self.experts if self._is_expert(name) else self.states)[0]

    # region divide
    def _divide(self, name: str) -> Sharded:
        """Keep this rank's rows of a parameter, and free the memory of the rest."""
        full = self.parameters.pop(name)
        owners, axis, rule = self.owners[id(full)], self._axis(name), Chunks()
        device = self.build.backend.device
        rows = rule.shard(full.detach(), axis.rank, axis.size)
        if full.is_meta:
            rows = torch.empty(rows.shape, dtype=rows.dtype, device=device)
        order = memory_order(full)
        shard = nn.Parameter(rows, requires_grad=full.requires_grad)
        full, room = make_room(full, axis.size, self._gathered_dtype(name, full), device)
        self.ledger.cut(name, axis, rule, shard)
        absent = DividedParameter.standing_for(name, full, axis.size, "fsdp")
        sharded = Sharded(name, shard, full, room, room.numel() // axis.size, order, owners, absent)
        sharded.show(shard)
        return sharded

    # endregion

    # region precision
    def _gathered_dtype(self, name: str, parameter: nn.Parameter) -> torch.dtype:
        """bfloat16 for the matrices that autocast casts anyway: half the bytes and not a bit lost.

        Vectors, tables of the vocabulary (looked up in fp32, and as output matrices they sum their gradient
        in fp32), and matrices that the plan keeps whole (a router of experts, which decides in fp32) stay as
        they are: one device does not use them in bfloat16 either.
        """
        matrix = parameter.dim() >= 2 and parameter.dtype == torch.float32
        tables = any(isinstance(module, nn.Embedding) for module, _ in self.owners[id(parameter)])
        if self.build.layout.precision != "bf16" or not matrix or tables:
            return parameter.dtype
        plan = self.build.plan
        wide = plan is not None and plan.rule(name).kind in ("vocab", "replicate")
        return parameter.dtype if wide else torch.bfloat16

    # endregion
