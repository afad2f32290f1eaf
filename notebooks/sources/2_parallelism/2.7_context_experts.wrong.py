# Plausible wrong answers to the exercises of 2.7_context_experts.py, each with the hint that it must earn.


# %% exercise="2.7.1" hint="that is the mean"
def put_together(
    parts: list[tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]:
    whole = torch.stack([total for _, total in parts]).logsumexp(0)
    return sum(part for part, _ in parts) / len(parts), whole


# %% exercise="2.7.1" hint="divided by its own sum"
def put_together(
    parts: list[tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]:
    whole = torch.stack([total for _, total in parts]).logsumexp(0)
    return sum(part for part, _ in parts), whole


# %% exercise="2.7.1" hint="more than a float can hold"
def put_together(
    parts: list[tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]:
    sums = torch.stack([total.exp() for _, total in parts])
    mixed = sum(s[:, None] * part for s, (part, _) in zip(sums, parts, strict=True))
    return mixed / sums.sum(0)[:, None], sums.sum(0).log()


# %% exercise="2.7.1" hint="such a row must give zeros"
def put_together(
    parts: list[tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]:
    totals = torch.stack([total for _, total in parts])
    shares = totals.softmax(0)
    mixed = sum(share[:, None] * part for share, (part, _) in zip(shares, parts, strict=True))
    return mixed, totals.logsumexp(0)


# %% exercise="2.7.1" hint="the log-sum-exp is not"
def put_together(
    parts: list[tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]:
    totals = torch.stack([total for _, total in parts])
    whole = totals.logsumexp(0)
    shares = (totals - whole.masked_fill(whole.isinf(), 0)).exp()
    mixed = sum(share[:, None] * part for share, (part, _) in zip(shares, parts, strict=True))
    return mixed, totals.amax(0)


# %% exercise="2.7.2" hint="give each rank some from both ends"
def mirrored(rank: int, ranks: int, length: int) -> list[int]:
    size = length // ranks
    return list(range(rank * size, (rank + 1) * size))


# %% exercise="2.7.2" hint="give each rank some from both ends"
def mirrored(rank: int, ranks: int, length: int) -> list[int]:
    return list(range(rank, length, ranks))


# %% exercise="2.7.2" hint="exactly one rank"
def mirrored(rank: int, ranks: int, length: int) -> list[int]:
    size = length // (2 * ranks)
    chunks = (rank, 2 * ranks - rank)
    return [column for chunk in chunks for column in range(chunk * size, (chunk + 1) * size)]


# %% exercise="2.7.2" hint="in ascending order"
def mirrored(rank: int, ranks: int, length: int) -> list[int]:
    size = length // (2 * ranks)
    chunks = (2 * ranks - 1 - rank, rank)
    return [column for chunk in chunks for column in range(chunk * size, (chunk + 1) * size)]


# %% exercise="2.7.2" hint="in other pieces"
def mirrored(rank: int, ranks: int, length: int) -> list[int]:
    rounds = [range(start, start + 2 * ranks) for start in range(0, length, 2 * ranks)]
    return sorted(column for r in rounds for column in (r[rank], r[2 * ranks - 1 - rank]))


# %% exercise="2.7.3" hint="is nobody"
def departures(choices: torch.Tensor, experts: int, ranks: int) -> list[int]:
    owners = (choices.flatten() // (experts // ranks)).clamp(max=ranks - 1)
    return torch.bincount(owners, minlength=ranks).tolist()


# %% exercise="2.7.3" hint="one number for each rank"
def departures(choices: torch.Tensor, experts: int, ranks: int) -> list[int]:
    return torch.bincount(choices.flatten(), minlength=experts)[:experts].tolist()


# %% exercise="2.7.3" hint="by turns"
def departures(choices: torch.Tensor, experts: int, ranks: int) -> list[int]:
    seated = choices[choices < experts]
    return torch.bincount(seated % ranks, minlength=ranks).tolist()


# %% exercise="2.7.3" hint="travels twice"
def departures(choices: torch.Tensor, experts: int, ranks: int) -> list[int]:
    owners = choices // (experts // ranks)
    return [int((owners == rank).any(1).sum()) for rank in range(ranks)]
