# Plausible wrong answers to the exercises of 2.2_data_parallel.py, each with the hint that it must earn.


# %% exercise="2.2.1" hint="which gradient does the backward pass make first?"
def buckets_of(sizes: list[tuple[str, int]], limit: int) -> list[list[str]]:
    plan, filled = [], 0
    for name, size in sizes:
        if not plan or filled + size > limit:
            plan.append([])
            filled = 0
        plan[-1].append(name)
        filled += size
    return plan


# %% exercise="2.2.1" hint="look before you put a gradient in"
def buckets_of(sizes: list[tuple[str, int]], limit: int) -> list[list[str]]:
    plan, filled = [[]], 0
    for name, size in reversed(sizes):
        plan[-1].append(name)
        filled += size
        if filled >= limit and name != sizes[0][0]:
            plan.append([])
            filled = 0
    return plan


# %% exercise="2.2.1" hint="each gradient must be in exactly one bucket"
def buckets_of(sizes: list[tuple[str, int]], limit: int) -> list[list[str]]:
    plan, filled = [], 0
    for name, size in reversed(sizes):
        if size > limit:
            continue
        if not plan or filled + size > limit:
            plan.append([])
            filled = 0
        plan[-1].append(name)
        filled += size
    return plan


# %% exercise="2.2.1" hint="there is room for the next gradient"
def buckets_of(sizes: list[tuple[str, int]], limit: int) -> list[list[str]]:
    return [[name] for name, _ in reversed(sizes)]


# %% exercise="2.2.2" hint="that is the mean of the means"
def combine(gradients: list[torch.Tensor], counts: list[int]) -> torch.Tensor:
    kept = [gradient for gradient, count in zip(gradients, counts, strict=True) if count]
    return sum(kept) / len(kept)


# %% exercise="2.2.2" hint="0 times nan is nan"
def combine(gradients: list[torch.Tensor], counts: list[int]) -> torch.Tensor:
    return sum(
        gradient * count for gradient, count in zip(gradients, counts, strict=True)
    ) / sum(counts)


# %% exercise="2.2.2" hint="that is the gradient of the sum"
def combine(gradients: list[torch.Tensor], counts: list[int]) -> torch.Tensor:
    return sum(
        gradient * count for gradient, count in zip(gradients, counts, strict=True) if count
    )


# %% exercise="2.2.2" hint="a rank without targets is not a rank less"
def combine(gradients: list[torch.Tensor], counts: list[int]) -> torch.Tensor:
    kept = sum(
        gradient * count for gradient, count in zip(gradients, counts, strict=True) if count
    )
    return kept / sum(counts) * len([count for count in counts if count]) / len(counts)


# %% exercise="2.2.3" hint="one at a time"
def waiting(ready: list[float], seconds: list[float], backward: float) -> float:
    return max(
        0.0,
        max(full + duration for full, duration in zip(ready, seconds, strict=True)) - backward,
    )


# %% exercise="2.2.3" hint="cannot leave before it is full"
def waiting(ready: list[float], seconds: list[float], backward: float) -> float:
    return max(0.0, ready[0] + sum(seconds) - backward)


# %% exercise="2.2.3" hint="cannot wait less than 0"
def waiting(ready: list[float], seconds: list[float], backward: float) -> float:
    free = 0.0
    for full, duration in zip(ready, seconds, strict=True):
        free = max(free, full) + duration
    return free - backward


# %% exercise="2.2.3" hint="hides nothing"
def waiting(ready: list[float], seconds: list[float], backward: float) -> float:
    return sum(seconds)
