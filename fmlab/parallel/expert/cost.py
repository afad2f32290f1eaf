"""What expert parallelism sends, from shapes alone."""


def dispatch_bytes(
    pairs: int, hidden_size: int, ranks: int, itemsize: int, experts: int, mixtures: int = 1
) -> dict[str, float]:
    """Bytes that each rank hands to all-to-alls in a step: "tokens", "counts", "total"; and "sent", what
    leaves the rank if all experts are used alike.

    pairs: (token, choice) pairs of one rank that found a seat, in one layer. experts: of all ranks.
    mixtures: how many layers have experts.

    A pair travels to its expert and back, and so does its gradient. The counts are 8 bytes for each expert.
    What a rank receives depends on how the routers use its experts.
    """
    tokens = 4 * pairs * hidden_size * itemsize * mixtures
    counts = 8 * experts * mixtures
    away = (ranks - 1) / ranks
    return {"tokens": tokens, "counts": counts, "total": tokens + counts, "sent": away * (tokens + counts)}
