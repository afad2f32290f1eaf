# %% exercise="3.6.1" hint="skips cross the cut"
def sent(blocks, cut):
    return sum(size for name, size in blocks[cut - 1][1].items() if name in blocks[cut][0])


# %% exercise="3.6.1" hint="nobody reads"
def sent(blocks, cut):
    return sum(
        {name: size for _, writes in blocks[:cut] for name, size in writes.items()}.values()
    )


# %% exercise="3.6.1" hint="written anew"
def sent(blocks, cut):
    before = {name: size for _, writes in blocks[:cut] for name, size in writes.items()}
    needed = {name for reads, _ in blocks[cut:] for name in reads}
    return sum(before[name] for name in needed if name in before)


# %% exercise="3.6.1" hint="it is sent once"
def sent(blocks, cut):
    before = {name: size for _, writes in blocks[:cut] for name, size in writes.items()}
    total, anew = 0, set()
    for reads, writes in blocks[cut:]:
        total += sum(before.get(name, 0) for name in reads if name not in anew)
        anew |= set(writes)
    return total


# %% exercise="3.6.2" hint="two rows"
def padding(requests, sizes):
    sizes, used, real, run = sorted(sizes), set(), 0, 0
    for rows, _ in requests:
        real += rows
        while rows > 0:
            size = next((size for size in sizes if size >= rows), sizes[-1])
            used.add(size)
            run += size
            rows -= size
    return len(used), (run - real) / run


# %% exercise="3.6.2" hint="sort them"
def padding(requests, sizes):
    used, real, run = set(), 0, 0
    for pictures, scale in requests:
        rows = pictures if scale == 1 else 2 * pictures
        real += rows
        while rows > 0:
            size = next((size for size in sizes if size >= rows), sizes[-1])
            used.add(size)
            run += size
            rows -= size
    return len(used), (run - real) / run


# %% exercise="3.6.2" hint="of all rows that run"
def padding(requests, sizes):
    sizes, used, real, run = sorted(sizes), set(), 0, 0
    for pictures, scale in requests:
        rows = pictures if scale == 1 else 2 * pictures
        real += rows
        while rows > 0:
            size = next((size for size in sizes if size >= rows), sizes[-1])
            used.add(size)
            run += size
            rows -= size
    return len(used), (run - real) / real


# %% exercise="3.6.2" hint="at least once"
def padding(requests, sizes):
    sizes, real, run = sorted(sizes), 0, 0
    for pictures, scale in requests:
        rows = pictures if scale == 1 else 2 * pictures
        real += rows
        while rows > 0:
            size = next((size for size in sizes if size >= rows), sizes[-1])
            run += size
            rows -= size
    return len(sizes), (run - real) / run


# %% exercise="3.6.3" hint="early steps"
def average(weights, decay):
    kept = weights[0]
    for weight in weights[1:]:
        kept = decay * kept + (1 - decay) * weight
    return kept


# %% exercise="3.6.3" hint="the old average"
def average(weights, decay):
    kept = weights[0]
    for n, weight in enumerate(weights[1:], start=2):
        share = min(decay, (1 + n) / (10 + n))
        kept = share * weight + (1 - share) * kept
    return kept


# %% exercise="3.6.3" hint="count from 1"
def average(weights, decay):
    kept = weights[0]
    for n, weight in enumerate(weights[1:], start=1):
        share = min(decay, (1 + n) / (10 + n))
        kept = share * kept + (1 - share) * weight
    return kept
