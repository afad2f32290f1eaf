# %% exercise="1.8.1" hint="keys and values"
def paged_bytes(lengths, page_size, layers, kv_heads, head_size, itemsize) -> int:
    pages = sum(-(-length // page_size) for length in lengths)
    return pages * page_size * layers * kv_heads * head_size * itemsize


# %% exercise="1.8.1" hint="held whole"
def paged_bytes(lengths, page_size, layers, kv_heads, head_size, itemsize) -> int:
    return sum(lengths) * 2 * layers * kv_heads * head_size * itemsize


# %% exercise="1.8.1" hint="pages of its own"
def paged_bytes(lengths, page_size, layers, kv_heads, head_size, itemsize) -> int:
    pages = -(-sum(lengths) // page_size)
    return pages * page_size * 2 * layers * kv_heads * head_size * itemsize


# %% exercise="1.8.1" hint="one text alone"
def paged_bytes(lengths, page_size, layers, kv_heads, head_size, itemsize) -> int:
    pages = sum(length // page_size + 1 for length in lengths)
    return pages * page_size * 2 * layers * kv_heads * head_size * itemsize


# %% exercise="1.8.2" hint="they overlap"
def decode_seconds(parameters, batch, itemsize, cache_bytes, flops, bandwidth) -> float:
    return (
        2 * parameters * batch / flops
        + (parameters * itemsize + batch * cache_bytes) / bandwidth
    )


# %% exercise="1.8.2" hint="read once for all"
def decode_seconds(parameters, batch, itemsize, cache_bytes, flops, bandwidth) -> float:
    read = batch * (parameters * itemsize + cache_bytes) / bandwidth
    return max(2 * parameters * batch / flops, read)


# %% exercise="1.8.2" hint="keys and values of every text"
def decode_seconds(parameters, batch, itemsize, cache_bytes, flops, bandwidth) -> float:
    return max(2 * parameters * batch / flops, parameters * itemsize / bandwidth)


# %% exercise="1.8.2" hint="two operations"
def decode_seconds(parameters, batch, itemsize, cache_bytes, flops, bandwidth) -> float:
    read = (parameters * itemsize + batch * cache_bytes) / bandwidth
    return max(6 * parameters * batch / flops, read)


# %% exercise="1.8.3" hint="writes next"
def admit(waiting, free_pages, page_size, running) -> int:
    free, count = free_pages - running, 0
    for tokens in waiting:
        free -= -(-tokens // page_size)
        if free < 0:
            break
        count += 1
    return count


# %% exercise="1.8.3" hint="kept for"
def admit(waiting, free_pages, page_size, running) -> int:
    free, count = free_pages, 0
    for tokens in waiting:
        free -= -(-(tokens + 1) // page_size)
        if free < 0:
            break
        count += 1
    return count


# %% exercise="1.8.3" hint="nobody overtakes"
def admit(waiting, free_pages, page_size, running) -> int:
    free, count = free_pages - running, 0
    for tokens in waiting:
        needed = -(-(tokens + 1) // page_size)
        if needed <= free:
            free -= needed
            count += 1
    return count
