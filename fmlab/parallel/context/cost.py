"""What context parallelism sends, from shapes alone.

Shapes: b rows, h query heads, g key/value heads, l columns of this rank, k head width, n ranks.
"""


def ring_bytes(
    rows: int,
    columns: int,
    kv_heads: int,
    head_size: int,
    ranks: int,
    itemsize: int,
    gradient_itemsize: int | None = None,
    value_size: int | None = None,
) -> dict[str, int]:
    """Bytes that each rank sends in one layer: "forward", "backward", "total".

    columns: of one rank. itemsize: bytes of a number of the keys and values; gradient_itemsize: of their
    gradients on the way (default: the same, at least 4). value_size: width of a value (default: head_size).

    Forward, keys and values make n - 1 hops. Backward they make them again, and so do their gradients.
    Query heads do not matter: with 8 key/value heads for 32 query heads a ring sends a quarter.
    """
    value_size = head_size if value_size is None else value_size
    gradient = max(itemsize, 4) if gradient_itemsize is None else gradient_itemsize
    numbers = (ranks - 1) * rows * kv_heads * columns * (head_size + value_size)
    forward, backward = numbers * itemsize, numbers * (itemsize + gradient)
    return {"forward": forward, "backward": backward, "total": forward + backward}


def ulysses_bytes(
    rows: int, columns: int, heads: int, kv_heads: int, head_size: int, ranks: int, itemsize: int
) -> dict[str, int]:
    """Bytes that each rank hands to its all-to-alls in one layer: "forward", "backward", "total", and "sent",
    the part of the total that leaves the rank.

    Queries, keys, values and results, of which 1/n stays at home; fewer key/value heads than ranks are copied
    first. Backward, the same again.
    """
    copied = max(kv_heads, ranks)
    forward = rows * columns * head_size * (2 * heads + 2 * copied) * itemsize
    return {
        "forward": forward,
        "backward": forward,
        "total": 2 * forward,
        "sent": 2 * forward * (ranks - 1) // ranks,
    }
