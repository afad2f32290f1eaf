# Plausible wrong answers to the exercises of 2.5_tensor_parallel.py, each with the hint that it must earn.


# %% exercise="2.5.1" hint="an equal piece of the whole matrix"
def rows_of(rank: int, ranks: int, heads: int, kv_heads: int, head_size: int) -> list[int]:
    size = (heads + 2 * kv_heads) * head_size // ranks
    return list(range(rank * size, (rank + 1) * size))


# %% exercise="2.5.1" hint="has no keys"
def rows_of(rank: int, ranks: int, heads: int, kv_heads: int, head_size: int) -> list[int]:
    mine = range(rank * heads // ranks, (rank + 1) * heads // ranks)
    share = kv_heads // ranks
    used = range(rank * share, (rank + 1) * share)
    found = [*mine, *(heads + g for g in used), *(heads + kv_heads + g for g in used)]
    return [head * head_size + row for head in found for row in range(head_size)]


# %% exercise="2.5.1" hint="of another rank's queries"
def rows_of(rank: int, ranks: int, heads: int, kv_heads: int, head_size: int) -> list[int]:
    mine = range(rank * heads // ranks, (rank + 1) * heads // ranks)
    used = (
        [rank % kv_heads]
        if kv_heads <= ranks
        else range(rank * kv_heads // ranks, (rank + 1) * kv_heads // ranks)
    )
    found = [*mine, *(heads + g for g in used), *(heads + kv_heads + g for g in used)]
    return [head * head_size + row for head in found for row in range(head_size)]


# %% exercise="2.5.1" hint="more keys than its queries use"
def rows_of(rank: int, ranks: int, heads: int, kv_heads: int, head_size: int) -> list[int]:
    mine = range(rank * heads // ranks, (rank + 1) * heads // ranks)
    found = [*mine, *range(heads, heads + 2 * kv_heads)]
    return [head * head_size + row for head in found for row in range(head_size)]


# %% exercise="2.5.1" hint="those are numbers of heads"
def rows_of(rank: int, ranks: int, heads: int, kv_heads: int, head_size: int) -> list[int]:
    mine = range(rank * heads // ranks, (rank + 1) * heads // ranks)
    used = sorted({i // (heads // kv_heads) for i in mine})
    return [*mine, *(heads + g for g in used), *(heads + kv_heads + g for g in used)]


# %% exercise="2.5.2" hint="too large for a float"
def loss_of(shards: list[torch.Tensor], target: int, vocabulary: int) -> float:
    words = len(shards[0])
    real = [shard[: max(0, vocabulary - r * words)] for r, shard in enumerate(shards)]
    total = sum(shard.exp().sum() for shard in real)
    return float(total.log() - shards[target // words][target % words])


# %% exercise="2.5.2" hint="a padded word"
def loss_of(shards: list[torch.Tensor], target: int, vocabulary: int) -> float:
    words = len(shards[0])
    largest = max(shard.max() for shard in shards)
    total = sum((shard - largest).exp().sum() for shard in shards)
    return float(largest + total.log() - shards[target // words][target % words])


# %% exercise="2.5.2" hint="its own largest"
def loss_of(shards: list[torch.Tensor], target: int, vocabulary: int) -> float:
    words = len(shards[0])
    real = [shard[: max(0, vocabulary - r * words)] for r, shard in enumerate(shards)]
    total = sum((shard - shard.max()).exp().sum() for shard in real if len(shard))
    largest = max(shard.max() for shard in real if len(shard))
    return float(largest + total.log() - shards[target // words][target % words])


# %% exercise="2.5.2" hint="the loss of one rank"
def loss_of(shards: list[torch.Tensor], target: int, vocabulary: int) -> float:
    words = len(shards[0])
    rank = target // words
    shard = shards[rank][: vocabulary - rank * words]
    return float(-shard.log_softmax(0)[target % words])


# %% exercise="2.5.3" hint="feed-forward network cannot be divided"
def legal(heads: int, kv_heads: int, ffn: int, most: int) -> list[int]:
    return [
        t
        for t in range(1, most + 1)
        if heads % t == 0 and (kv_heads % t == 0 or t % kv_heads == 0)
    ]


# %% exercise="2.5.3" hint="fewer key/value heads than ranks"
def legal(heads: int, kv_heads: int, ffn: int, most: int) -> list[int]:
    return [
        t for t in range(1, most + 1) if heads % t == 0 and ffn % t == 0 and kv_heads % t == 0
    ]


# %% exercise="2.5.3" hint="cannot be copied to equally many ranks"
def legal(heads: int, kv_heads: int, ffn: int, most: int) -> list[int]:
    return [t for t in range(1, most + 1) if heads % t == 0 and ffn % t == 0]
