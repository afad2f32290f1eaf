# %% exercise="1.2.1" hint="at the END"
def visible(queries, keys, window):
    distance = torch.arange(queries)[:, None] - torch.arange(keys)
    return (distance >= 0) & (distance < window)


# %% exercise="1.2.1" hint="its own position counts"
def visible(queries, keys, window):
    distance = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
    return (distance >= 0) & (distance <= window)


# %% exercise="1.2.1" hint="keys after it"
def visible(queries, keys, window):
    distance = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
    return distance.abs() < window


# %% exercise="1.2.1" hint="window is missing"
def visible(queries, keys, window):
    return torch.ones(queries, keys).tril(keys - queries).bool()


# %% exercise="1.2.1" hint="holds booleans"
def visible(queries, keys, window):
    distance = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
    return torch.zeros(queries, keys).masked_fill(
        (distance < 0) | (distance >= window), -torch.inf
    )


# %% exercise="1.2.2" hint="largest score"
def mix(tiles):
    total = sums = 0
    for scores, values in tiles:
        weights = scores.exp()
        total = total + weights.sum(-1, keepdim=True)
        sums = sums + weights @ values
    return sums / total


# %% exercise="1.2.2" hint="with the old largest score"
def mix(tiles):
    total = sums = 0
    for scores, values in tiles:
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        total = total + weights.sum(-1, keepdim=True)
        sums = sums + weights @ values
    return sums / total


# %% exercise="1.2.2" hint="softmax of its own"
def mix(tiles):
    outputs = [scores.softmax(-1) @ values for scores, values in tiles]
    return torch.stack(outputs).mean(0)


# %% exercise="1.2.2" hint="one tile at a time"
def mix(tiles):
    scores, values = zip(*list(tiles), strict=True)
    return torch.cat(scores, -1).softmax(-1) @ torch.cat(values)


# %% exercise="1.2.2" hint="divide once"
def mix(tiles):
    best = torch.tensor(-torch.inf)
    total = sums = 0
    for scores, values in tiles:
        larger = torch.maximum(best, scores.amax(-1, keepdim=True))
        weights, shrink = (scores - larger).exp(), (best - larger).exp()
        total = total * shrink + weights.sum(-1, keepdim=True)
        sums = sums * shrink + weights @ values
        best = larger
    return sums


# %% exercise="1.2.3" hint="interleave"
def split_qkv(fused, heads, kv_heads):
    b, length, total = fused.shape
    k = total // (heads + 2 * kv_heads)
    parts = fused.split([heads * k, kv_heads * k, kv_heads * k], -1)
    query, key, value = (part.view(b, length, -1, k).transpose(1, 2) for part in parts)
    return (
        query,
        key.repeat(1, heads // kv_heads, 1, 1),
        value.repeat(1, heads // kv_heads, 1, 1),
    )


# %% exercise="1.2.3" hint="different widths"
def split_qkv(fused, heads, kv_heads):
    b, length, _ = fused.shape
    query, key, value = (
        part[..., : part.shape[-1] // heads * heads]
        .reshape(b, length, heads, -1)
        .transpose(1, 2)
        for part in fused.chunk(3, -1)
    )
    return query, key, value


# %% exercise="1.2.3" hint="a query head has its own"
def split_qkv(fused, heads, kv_heads):
    b, length, total = fused.shape
    k = total // (heads + 2 * kv_heads)
    parts = fused.split([heads * k, kv_heads * k, kv_heads * k], -1)
    return tuple(part.view(b, length, -1, k).transpose(1, 2) for part in parts)


# %% exercise="1.2.3" hint="values are swapped"
def split_qkv(fused, heads, kv_heads):
    b, length, total = fused.shape
    k = total // (heads + 2 * kv_heads)
    parts = fused.split([heads * k, kv_heads * k, kv_heads * k], -1)
    query, value, key = (part.view(b, length, -1, k).transpose(1, 2) for part in parts)
    shared = heads // kv_heads
    return query, key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)


# %% exercise="1.2.3" hint="head by head"
def split_qkv(fused, heads, kv_heads):
    b, length, total = fused.shape
    k = total // (heads + 2 * kv_heads)
    parts = fused.split([heads * k, kv_heads * k, kv_heads * k], -1)
    query, key, value = (part.view(b, length, k, -1).permute(0, 3, 1, 2) for part in parts)
    shared = heads // kv_heads
    return query, key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
