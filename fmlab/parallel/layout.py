"""How one training step is spread over ranks, as a value: no process is needed to make or check it."""

from collections.abc import Sequence
from dataclasses import dataclass

from fmlab.data.batch import Batch

PRECISIONS = ("fp32", "bf16")


@dataclass(frozen=True)
class Layout:
    """The degrees and settings of a parallel training step.

    Attributes:
        data: replicas of the model, each with its own rows of the batch
        micro_batches: parts that a rank's rows are run in, one after the other (gradient accumulation)
        precision: "fp32": in the element type of the parameters; "bf16": matrix products in bfloat16
            (autocast), weights and gradients unchanged
        bucket_mb: gradients are all-reduced in buckets of at most this many MiB (a larger gradient gets a
            bucket of its own); matters only when data > 1

    Raises ValueError for a value out of range.
    """

    data: int = 1
    micro_batches: int = 1
    precision: str = "fp32"
    bucket_mb: float = 25.0

    def __post_init__(self) -> None:
        for name in ("data", "micro_batches"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"Layout({name}={value!r}): give a whole number, 1 or more")
        if self.precision not in PRECISIONS:
            raise ValueError(f"Layout(precision={self.precision!r}): legal are {', '.join(PRECISIONS)}")
        if not self.bucket_mb > 0:
            raise ValueError(f"Layout(bucket_mb={self.bucket_mb!r}): give a size in MiB above 0, such as 25")

    @property
    def world_size(self) -> int:
        """How many ranks the layout needs."""
        return self.data

    def validate(self, world_size: int, global_batch: int | None = None) -> None:
        """Refuse a number of ranks, or of rows in the global batch, that the layout cannot use.

        Raises ValueError that lists what is legal.
        """
        if world_size != self.world_size:
            raise ValueError(
                f"{self} needs {self.world_size} ranks (data={self.data}), but there are {world_size}; "
                f"start {self.world_size} ranks (torchrun --nproc-per-node {self.world_size}, %%ranks "
                f"{self.world_size} or fmlab.Ranks({self.world_size})) or set data={world_size}"
            )
        parts = self.data * self.micro_batches
        if global_batch is None or (global_batch > 0 and global_batch % parts == 0):
            return
        below = global_batch // parts * parts
        nearest = [size for size in (below, below + parts) if size > 0]
        degrees = [
            d for d in range(1, max(global_batch, 1) + 1) if global_batch % (d * self.micro_batches) == 0
        ]
        raise ValueError(
            f"a global batch of {global_batch} rows cannot be cut into data x micro_batches = "
            f"{self.data} x {self.micro_batches} = {parts} equal parts; "
            f"use {' or '.join(map(str, nearest))} rows"
            + (f", or data in {degrees} with micro_batches={self.micro_batches}" if degrees else "")
        )

    def split(self, batch: Batch, rank: int) -> list[Batch]:
        """The micro-batches of one rank: consecutive rows of the global batch (dimension 0 of each tensor).

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


def _rows(batch: Batch) -> int:
    rows: Sequence[int] = sorted({tensor.shape[0] for tensor in batch.values()})
    if len(rows) != 1:
        sizes = {name: tuple(tensor.shape) for name, tensor in batch.items()}
        raise ValueError(f"every tensor of a batch needs the same number of rows, got {sizes}")
    return rows[0]
