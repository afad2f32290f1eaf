"""What a data-parallel step must communicate, from shapes alone.

Ring all-reduce of P bytes over n ranks: a reduce-scatter and an all-gather of n - 1 messages of P / n
bytes each, so 2 (n - 1) / n x P bytes sent by every rank (Patarasuk and Yuan, J. Parallel Distrib.
Comput. 69, 2009).
"""

from collections.abc import Iterable

from torch import nn

_COUNT_BYTES = 8  # int64, one for each loss term


def ring_bytes(op: str, payload: float, ranks: int) -> float:
    """Bytes that each rank sends in a ring algorithm for a payload of so many bytes.

    op: "all_reduce" (payload: the tensor), "all_gather" (payload: the gathered tensor) or "reduce_scatter"
    (payload: the tensor before). Raises ValueError for others.
    """
    passes = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
    if op not in passes:
        raise ValueError(f"no ring formula for {op!r}; legal are {', '.join(passes)}")
    return passes[op] * (ranks - 1) / ranks * payload


def gradient_bytes(parameters: Iterable[nn.Parameter]) -> int:
    """Bytes of the gradients of the parameters that require one; a tied weight counts once."""
    unique = {id(p): p.numel() * p.element_size() for p in parameters if p.requires_grad}
    return sum(unique.values())


def expected_payload(model: nn.Module, terms: int = 1) -> dict[str, int]:
    """All-reduce payload of one step of fmlab's engine: "gradients", "counts", "losses and use", "total".

    It does not depend on the batch, on the number of micro-batches, or on the number of ranks.
    """
    trainable = {id(p): p for p in model.parameters() if p.requires_grad}
    width = max((p.element_size() for p in model.parameters()), default=4)
    payload = {
        "gradients": gradient_bytes(trainable.values()),
        "counts": terms * _COUNT_BYTES,
        "losses and use": (terms + 1 + len(trainable)) * max(width, 4),
    }
    return {**payload, "total": sum(payload.values())}
