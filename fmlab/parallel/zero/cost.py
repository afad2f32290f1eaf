"""What a step of each stage sends."""

from fmlab.parallel.ddp.cost import ring_bytes


# region cost
def sent_bytes(
    parameters: int,
    ranks: int,
    stage: int,
    micro_batches: int = 1,
    *,
    parameter_bytes: float = 4,
    gradient_bytes: float = 4,
) -> dict[str, float]:
    """Bytes that each rank sends in a step with ring algorithms: by collective, and "total".

    With P bytes of parameters and as many of gradients: 2 P (n - 1) / n in stages 0, 1 and 2, once a step;
    in stage 3 half as much again, for every micro-batch: two all-gathers, since parameters are given up in
    between, and one reduce-scatter, since a rank has no room for other gradients than its own.

    Padding (less than `ranks` elements a vector) and a few numbers (losses, counts, the norm) are not in it.
    Raises ValueError for a stage that does not exist.
    """
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage={stage!r}: legal are 0, 1, 2, 3")
    weights, gradients = parameters * parameter_bytes, parameters * gradient_bytes
    if stage == 0:
        sent = {"all_reduce": ring_bytes("all_reduce", gradients, ranks)}
    else:
        passes = micro_batches if stage == 3 else 1
        gathers = 2 * micro_batches if stage == 3 else 1
        sent = {
            "reduce_scatter": passes * ring_bytes("reduce_scatter", gradients, ranks),
            "all_gather": gathers * ring_bytes("all_gather", weights, ranks),
        }
    return {**sent, "total": sum(sent.values())}


# endregion
