"""How one training step is spread over ranks, as a value: no process is needed to make or check it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from fmlab.data.batch import Batch
from fmlab.parallel import values
from fmlab.parallel.grid import AXES, Grid, divisors
from fmlab.sim.schedule import SCHEDULES, check_schedule

PRECISIONS = ("fp32", "bf16")
STAGE_CUTS = ("even", "weighted")
CHOICES: dict[str, tuple[Any, ...]] = {
    "zero": (0, 1, 2, 3),
    "schedule": SCHEDULES,
    "context_method": ("ring", "ulysses"),
    "context_balance": ("none", "striped", "mirrored"),
    "recompute": ("none", "selective", "full", "budget"),
    "offload": ("none", "optimizer", "parameters"),
    "precision": PRECISIONS,
    "collectives": ("torch", "fmlab"),
}
_DEGREES = ("data", "replicas", "tensor", "pipeline", "virtual_stages", "context", "expert", "micro_batches")
_FLAGS = ("fsdp", "reshard", "sequence_parallel")


@dataclass(frozen=True)
class Layout:
    """The degrees and settings of a parallel training step.

    Attributes:
        data: ranks, or groups of ranks, that each have their own rows of the batch
        micro_batches: parts that a rank's rows are run in, one after the other (gradient accumulation; what a
            pipeline is filled with)
        precision: "fp32": in the element type of the parameters; "bf16": matrix products in bfloat16
            (autocast), weights and gradients unchanged
        bucket_mb: gradients are summed over the data ranks in buckets of at most this many MiB (a larger
            gradient gets a bucket of its own); matters only when data > 1
        zero: what the data ranks divide among themselves: 0 nothing, 1 the optimizer's state, 2 the gradients
            too, 3 the parameters too (Rajbhandari et al. 2019, arXiv:1910.02054)
        fsdp: divide parameters, gradients and optimizer state parameter by parameter, gathered block by block
            (Zhao et al. 2023, arXiv:2304.11277)
        reshard: with fsdp: give a block's parameters back after its forward pass and gather them again
        replicas: with zero or fsdp: copies of the states among the data ranks; each copy is divided among
            data / replicas of them (hybrid sharding)
        tensor: ranks that divide every matrix (Shoeybi et al. 2019, arXiv:1909.08053)
        sequence_parallel: with tensor: they also divide the sequence where matrices are not divided
            (Korthikanti et al. 2022, arXiv:2205.05198)
        pipeline: ranks that divide the list of blocks into stages
        schedule: of a pipeline's passes: "gpipe", "1f1b", "interleaved", "zb-h1", "zbv"
        virtual_stages: stages of each pipeline rank ("interleaved", "zbv")
        stage_cuts: where a pipeline cuts the list of blocks: "even" (layers are shared out), "weighted" (the
            chunk with the most work has as little as can be, the output head counted), or the index of the
            first block of every chunk but the first; see fmlab.parallel.pipeline.stages
        context: ranks that divide each sequence, attention included
        context_method: "ring" (keys and values go round) or "ulysses" (heads are exchanged for positions)
        context_balance: how a causal ring's work is evened out: "none", "striped", "mirrored"
        expert: data ranks that divide the experts of a mixture
        recompute: "none"; "selective": attention's inside is computed again in the backward pass; "full":
            whole layers; "budget": as few layers as activation_budget asks for
        activation_budget: with recompute="budget": what the layers of a rank may keep of one micro-batch, as
            a whole number of bytes (1024 at least) or a share (0.0 to 1.0) of what they would keep
        offload: "none"; "optimizer": its state lives in the host's memory; "parameters": they do too
        collectives: who carries messages: "torch" (gloo, NCCL) or "fmlab" (our own, on send and receive)
        axis_order: the axis along which ranks are numbered first (neighbours), to the last

    Raises ValueError for a value out of range and for a setting that would do nothing.
    """

    data: int = 1
    micro_batches: int = 1
    precision: str = "fp32"
    bucket_mb: float = 25.0
    zero: int = 0
    fsdp: bool = False
    reshard: bool = True
    replicas: int = 1
    tensor: int = 1
    sequence_parallel: bool = False
    pipeline: int = 1
    schedule: str = "1f1b"
    virtual_stages: int = 1
    stage_cuts: str | tuple[int, ...] = "even"
    context: int = 1
    context_method: str = "ring"
    context_balance: str = "mirrored"
    expert: int = 1
    recompute: str = "none"
    activation_budget: int | float | None = None
    offload: str = "none"
    collectives: str = "torch"
    axis_order: tuple[str, ...] = AXES

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self)):
            object.__setattr__(self, name, self._checked(name, getattr(self, name)))
        self._check_together()
        self.grid()  # raises for parts that do not divide

    @staticmethod
    def _checked(name: str, value: Any) -> Any:
        """One setting as a plain value: numbers of other libraries become Python's. Raises ValueError."""
        given = f"Layout({name}={value!r})"
        if name in _DEGREES:
            return values.whole(value, given)
        if name in CHOICES:
            return values.one_of(value, CHOICES[name], given)
        if name in _FLAGS and not isinstance(value, bool):
            raise ValueError(f"{given}: give True or False")
        if name == "bucket_mb":
            return values.above_zero(value, given, "give a size in MiB above 0, such as 25")
        if name == "axis_order":
            return values.each_once(value, AXES, given)
        if name == "stage_cuts":
            return values.places(value, STAGE_CUTS, given)
        return value

    def _check_together(self) -> None:
        """Raise ValueError for settings that exclude each other or would do nothing."""
        states = self.zero > 0 or self.fsdp
        _check_activation_budget(self.recompute, self.activation_budget)
        idle = {
            "reshard": (not self.reshard and not self.fsdp, "fsdp=True"),
            "replicas": (self.replicas > 1 and not states, "zero above 0 or fsdp=True"),
            "sequence_parallel": (self.sequence_parallel and self.tensor == 1, "tensor above 1"),
            "schedule": (self.schedule != "1f1b" and self.pipeline == 1, "pipeline above 1"),
            "stage_cuts": (self.stage_cuts != "even" and self.pipeline == 1, "pipeline above 1"),
            "virtual_stages": (
                self.virtual_stages > 1 and self.schedule not in ("interleaved", "zbv"),
                "pipeline above 1 and schedule='interleaved' or 'zbv'",
            ),
            "context_method": (self.context_method != "ring" and self.context == 1, "context above 1"),
            "context_balance": (
                self.context_balance != "mirrored" and (self.context == 1 or self.context_method != "ring"),
                "context above 1 and context_method='ring'",
            ),
            "activation_budget": (
                self.activation_budget is not None and self.recompute != "budget",
                "recompute='budget'",
            ),
            "offload": (self.offload != "none" and not states, "zero above 0 or fsdp=True"),
        }
        for name, (does_nothing, needs) in idle.items():
            if does_nothing:
                raise ValueError(f"Layout({name}={getattr(self, name)!r}) does nothing without {needs}")
        if self.zero and self.fsdp:
            raise ValueError(f"Layout(zero={self.zero}, fsdp=True): both divide the states; choose one")
        if self.offload == "parameters" and self.zero != 3 and not self.fsdp:
            raise ValueError("Layout(offload='parameters') needs divided parameters: zero=3 or fsdp=True")
        if self.pipeline > 1:
            check_schedule(self.schedule, self.pipeline, self.micro_batches, self.virtual_stages)

    @property
    def world_size(self) -> int:
        """How many ranks the layout needs."""
        return self.data * self.tensor * self.context * self.pipeline

    def grid(self) -> Grid:
        """The coordinates of the ranks."""
        sizes = {axis: getattr(self, axis) for axis in AXES}
        if self.data % self.replicas:
            legal = divisors(self.data)
            raise ValueError(f"replicas={self.replicas} does not divide data={self.data}; legal are {legal}")
        return Grid(sizes, self.axis_order, self.data // self.replicas, self.expert)

    @property
    def plain_data(self) -> bool:
        """Whether whole replicas with their own rows are all there is."""
        return self == Layout(
            data=self.data,
            micro_batches=self.micro_batches,
            precision=self.precision,
            bucket_mb=self.bucket_mb,
            axis_order=self.axis_order,
        )

    def __str__(self) -> str:
        """The settings that are not the default."""
        changed = [f.name for f in fields(self) if getattr(self, f.name) != f.default]
        return f"Layout({', '.join(f'{name}={getattr(self, name)!r}' for name in changed)})"

    def validate(
        self,
        world_size: int,
        global_batch: int | None = None,
        model: Any = None,
        seq_len: int | None = None,
        objective: Any = None,
    ) -> None:
        """Refuse what cannot run, before any process starts.

        world_size: ranks there are. global_batch: rows of a step. model: its plan and shapes are looked at,
        so that one on the meta device is enough. seq_len: tokens of a row. objective: the loss.

        Raises ValueError with everything that is wrong, and what is legal instead; see fmlab.parallel.legal.
        """
        from fmlab.parallel import legal

        legal.check(self, world_size, global_batch, model, seq_len, objective)

    def data_rank(self, rank: int) -> int:
        """Which share of the global batch `rank` works on: its place along the data axis."""
        return self.grid().coordinates(rank)["data"]

    def split(self, batch: Batch, rank: int) -> list[Batch]:
        """The micro-batches of a place on the data axis: consecutive rows of the global batch (dim 0).

        Raises ValueError when the rows cannot be cut evenly, or when the tensors differ in rows.
        """
        rows = _rows(batch)
        self.validate(self.world_size, rows)
        if not 0 <= rank < self.data:
            raise ValueError(f"rank {rank} is not in {self}; legal are 0 to {self.data - 1}")
        size = rows // (self.data * self.micro_batches)
        first = rank * size * self.micro_batches
        return [
            {name: tensor[start : start + size] for name, tensor in batch.items()}
            for start in range(first, first + size * self.micro_batches, size)
        ]


def _check_activation_budget(recompute: str, budget: float | None) -> None:
    if budget is None:
        if recompute == "budget":
            raise ValueError(
                "Layout(recompute='budget') needs activation_budget: bytes (2_000_000_000) or a share (0.5)"
            )
        return
    share = isinstance(budget, float) and 0.0 <= budget <= 1.0
    nbytes = isinstance(budget, int) and not isinstance(budget, bool) and budget >= 1024
    if not share and not nbytes:
        raise ValueError(
            f"Layout(activation_budget={budget!r}): give a share from 0.0 to 1.0 as a float, or a whole "
            "number of bytes, 1024 at least"
        )


def _rows(batch: Batch) -> int:
    if not isinstance(batch, Mapping) or not batch or not all(map(_has_rows, batch.values())):
        kinds = {n: type(t).__name__ for n, t in batch.items()} if isinstance(batch, Mapping) else type(batch)
        raise ValueError(f"a batch is a mapping of names to tensors with rows (dim 0), got {kinds}")
    rows: Sequence[int] = sorted({tensor.shape[0] for tensor in batch.values()})
    if len(rows) != 1:
        sizes = {name: tuple(tensor.shape) for name, tensor in batch.items()}
        raise ValueError(f"every tensor of a batch needs the same number of rows, got {sizes}")
    return rows[0]


def _has_rows(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.dim() > 0
