# Plausible wrong answers to the exercises of 2.3_zero.py, each with the hint that it must earn.


# %% exercise="2.3.1" hint="not past the end of the parameter"
def owners(offset: int, numel: int, length: int, ranks: int) -> list[tuple[int, int]]:
    return [
        (max(rank * length - offset, 0), max((rank + 1) * length - offset, 0))
        for rank in range(ranks)
    ]


# %% exercise="2.3.1" hint="counts from the beginning of the vector"
def owners(offset: int, numel: int, length: int, ranks: int) -> list[tuple[int, int]]:
    found = []
    for rank in range(ranks):
        first = max(rank * length, offset)
        end = min((rank + 1) * length, offset + numel)
        found.append((first, end) if end > first else (0, 0))
    return found


# %% exercise="2.3.1" hint="the vector is cut, not each parameter"
def owners(offset: int, numel: int, length: int, ranks: int) -> list[tuple[int, int]]:
    each = -(-numel // ranks)
    return [(min(r * each, numel), min((r + 1) * each, numel)) for r in range(ranks)]


# %% exercise="2.3.1" hint="a range that ends before it begins"
def owners(offset: int, numel: int, length: int, ranks: int) -> list[tuple[int, int]]:
    return [
        (max(rank * length - offset, 0), min((rank + 1) * length - offset, numel))
        for rank in range(ranks)
    ]


# %% exercise="2.3.2" hint="a copy counts on one rank only"
def global_norm(
    ranks: list[dict[str, torch.Tensor]], copied: set[str], tied: list[tuple[str, str]]
) -> float:
    second_names = {second for _, second in tied}
    total = sum(
        piece.square().sum().item()
        for pieces in ranks
        for name, piece in pieces.items()
        if name not in second_names
    )
    return total**0.5


# %% exercise="2.3.2" hint="two names, one parameter"
def global_norm(
    ranks: list[dict[str, torch.Tensor]], copied: set[str], tied: list[tuple[str, str]]
) -> float:
    total = sum(
        piece.square().sum().item()
        for rank, pieces in enumerate(ranks)
        for name, piece in pieces.items()
        if rank == 0 or name not in copied
    )
    return total**0.5


# %% exercise="2.3.2" hint="norms do not add up"
def global_norm(
    ranks: list[dict[str, torch.Tensor]], copied: set[str], tied: list[tuple[str, str]]
) -> float:
    second_names = {second for _, second in tied}
    return sum(
        piece.norm().item()
        for rank, pieces in enumerate(ranks)
        for name, piece in pieces.items()
        if name not in second_names and (rank == 0 or name not in copied)
    )


# %% exercise="2.3.2" hint="the slices of the other ranks are missing"
def global_norm(
    ranks: list[dict[str, torch.Tensor]], copied: set[str], tied: list[tuple[str, str]]
) -> float:
    second_names = {second for _, second in tied}
    mine = [piece.norm() for name, piece in ranks[0].items() if name not in second_names]
    return torch.stack(mine).norm().item()


# %% exercise="2.3.3" hint="the optimizer's state is divided first"
def first_stage(parameters: float, ranks: int, room: float, k: float = 12) -> int | None:
    for stage in range(4):
        weights = 2 / (ranks if stage >= 1 else 1)
        gradients = 2 / (ranks if stage >= 2 else 1)
        optimizer = k / (ranks if stage >= 3 else 1)
        if parameters * (weights + gradients + optimizer) <= room:
            return stage
    return None


# %% exercise="2.3.3" hint="None, not a stage that does not fit"
def first_stage(parameters: float, ranks: int, room: float, k: float = 12) -> int | None:
    for stage in range(3):
        weights = 2
        gradients = 2 / (ranks if stage >= 2 else 1)
        optimizer = k / (ranks if stage >= 1 else 1)
        if parameters * (weights + gradients + optimizer) <= room:
            return stage
    return 3


# %% exercise="2.3.3" hint="K is an argument"
def first_stage(parameters: float, ranks: int, room: float, k: float = 12) -> int | None:
    for stage in range(4):
        weights = 2 / (ranks if stage >= 3 else 1)
        gradients = 2 / (ranks if stage >= 2 else 1)
        optimizer = 12 / (ranks if stage >= 1 else 1)
        if parameters * (weights + gradients + optimizer) <= room:
            return stage
    return None


# %% exercise="2.3.3" hint="that is the last stage that fits"
def first_stage(parameters: float, ranks: int, room: float, k: float = 12) -> int | None:
    return 3 if parameters * (4 + k) / ranks <= room else None
