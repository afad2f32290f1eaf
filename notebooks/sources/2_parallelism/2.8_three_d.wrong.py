# Plausible wrong answers to the exercises of 2.8_three_d.py, each with the hint that it must earn.


# %% exercise="2.8.1" hint="the order read backwards"
def groups(sizes: dict[str, int], order: list[str], axis: str) -> list[list[int]]:
    ranks, stride = 1, 1
    for name in sizes:
        ranks *= sizes[name]
    for name in order[order.index(axis) + 1 :]:
        stride *= sizes[name]
    firsts = [rank for rank in range(ranks) if rank // stride % sizes[axis] == 0]
    return [[first + i * stride for i in range(sizes[axis])] for first in firsts]


# %% exercise="2.8.1" hint="neighbours along the first axis only"
def groups(sizes: dict[str, int], order: list[str], axis: str) -> list[list[int]]:
    ranks = 1
    for name in sizes:
        ranks *= sizes[name]
    size = sizes[axis]
    return [list(range(first, first + size)) for first in range(0, ranks, size)]


# %% exercise="2.8.1" hint="each of the 8 ranks is in exactly one group"
def groups(sizes: dict[str, int], order: list[str], axis: str) -> list[list[int]]:
    stride = 1
    for name in order[: order.index(axis)]:
        stride *= sizes[name]
    return [[first + i * stride for i in range(sizes[axis])] for first in range(stride)]


# %% exercise="2.8.1" hint="the right groups in another order"
def groups(sizes: dict[str, int], order: list[str], axis: str) -> list[list[int]]:
    ranks, stride = 1, 1
    for name in sizes:
        ranks *= sizes[name]
    for name in order[: order.index(axis)]:
        stride *= sizes[name]
    firsts = [rank for rank in range(ranks) if rank // stride % sizes[axis] == 0]
    firsts.sort(key=lambda rank: (rank % stride, rank))
    return [[first + i * stride for i in range(sizes[axis])] for first in firsts]


# %% exercise="2.8.2" hint="every copy counts here"
def global_norm(ranks, places, divided) -> float:
    total = sum(
        float(piece.double().square().sum()) for held in ranks for piece in held.values()
    )
    return total**0.5


# %% exercise="2.8.2" hint="only the last stage holds is missing"
def global_norm(ranks, places, divided) -> float:
    total = 0.0
    for held, place in zip(ranks, places, strict=True):
        for name, piece in held.items():
            if all(at == 0 for axis, at in place.items() if axis not in divided[name]):
                total += float(piece.double().square().sum())
    return total**0.5


# %% exercise="2.8.2" hint="a table on two stages is one parameter"
def global_norm(ranks, places, divided) -> float:
    total = 0.0
    for held, place in zip(ranks, places, strict=True):
        for name, piece in held.items():
            copied = [axis for axis in ("tensor", "data") if axis not in divided[name]]
            if all(place[axis] == 0 for axis in copied):
                total += float(piece.double().square().sum())
    return total**0.5


# %% exercise="2.8.2" hint="norms do not add up"
def global_norm(ranks, places, divided) -> float:
    seen, total = set(), 0.0
    for held, place in zip(ranks, places, strict=True):
        for name, piece in held.items():
            part = (name, *(place[axis] for axis in sorted(divided[name])))
            if part not in seen:
                seen.add(part)
                total += float(piece.double().norm())
    return total


# %% exercise="2.8.2" hint="an empty piece has no mean"
def global_norm(ranks, places, divided) -> float:
    seen, total = set(), 0.0
    for held, place in zip(ranks, places, strict=True):
        for name, piece in held.items():
            part = (name, *(place[axis] for axis in sorted(divided[name])))
            if part not in seen:
                seen.add(part)
                total += float(piece.double().square().mean()) * piece.numel()
    return total**0.5


# %% exercise="2.8.3" hint="tensor goes first, up to the host"
def degrees(parameters, layers, chips, per_host, room):
    for pipeline in (p for p in range(1, layers + 1) if layers % p == 0):
        if chips % pipeline == 0 and 16 * parameters / pipeline <= room:
            return 1, pipeline, chips // pipeline
    return None


# %% exercise="2.8.3" hint="leaves the host"
def degrees(parameters, layers, chips, per_host, room):
    tensor = 1
    while tensor <= chips:
        if chips % tensor == 0 and 16 * parameters / tensor <= room:
            return tensor, 1, chips // tensor
        tensor *= 2
    return None


# %% exercise="2.8.3" hint="stages do not divide"
def degrees(parameters, layers, chips, per_host, room):
    tensors = [2**i for i in range(per_host.bit_length())]
    for tensor, pipeline in [(t, 1) for t in tensors] + [
        (per_host, p) for p in range(2, chips)
    ]:
        if chips % (tensor * pipeline) == 0 and 16 * parameters / (tensor * pipeline) <= room:
            return tensor, pipeline, chips // (tensor * pipeline)
    return None


# %% exercise="2.8.3" hint="the degrees do not multiply"
def degrees(parameters, layers, chips, per_host, room):
    tensors = [2**i for i in range(per_host.bit_length())]
    pipelines = [p for p in range(2, layers + 1) if layers % p == 0]
    for tensor, pipeline in [(t, 1) for t in tensors] + [(per_host, p) for p in pipelines]:
        if 16 * parameters / (tensor * pipeline) <= room:
            return tensor, pipeline, chips // (tensor * pipeline)
    return None
