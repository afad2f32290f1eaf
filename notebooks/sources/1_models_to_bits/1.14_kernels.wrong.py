# %% exercise="1.14.1" hint="B is loaded once for each row of tiles"
def product(nc, at, b):
    c = nc.hbm((at.shape[1], b.shape[1]), at.dtype)
    ks = pieces(at.shape[0], 128)
    for m in pieces(at.shape[1], 128):
        a_tiles = [nc.load(at[k, m]) for k in ks]
        for n in pieces(b.shape[1], 512):
            total = nc.psum((length(m), length(n)))
            for i, k in enumerate(ks):
                nc.matmul(a_tiles[i], nc.load(b[k, n]), out=total, accumulate=i > 0)
            nc.store(c[m, n], nc.copy(total, dtype=c.dtype))
    return c


# %% exercise="1.14.1" hint="A is loaded once for each column of tiles"
def product(nc, at, b):
    c = nc.hbm((at.shape[1], b.shape[1]), at.dtype)
    ks = pieces(at.shape[0], 128)
    b_tiles = [nc.load(b[k]) for k in ks]
    for m in pieces(at.shape[1], 128):
        for n in pieces(b.shape[1], 512):
            total = nc.psum((length(m), length(n)))
            for i, k in enumerate(ks):
                nc.matmul(nc.load(at[k, m]), b_tiles[i][:, n], out=total, accumulate=i > 0)
            nc.store(c[m, n], nc.copy(total, dtype=c.dtype))
    return c


# %% exercise="1.14.1" hint="each product must be added"
def product(nc, at, b):
    c = nc.hbm((at.shape[1], b.shape[1]), at.dtype)
    ks = pieces(at.shape[0], 128)
    b_tiles = [nc.load(b[k]) for k in ks]
    for m in pieces(at.shape[1], 128):
        a_tiles = [nc.load(at[k, m]) for k in ks]
        for n in pieces(b.shape[1], 512):
            total = nc.psum((length(m), length(n)))
            for i in range(len(ks)):
                nc.matmul(a_tiles[i], b_tiles[i][:, n], out=total)
            nc.store(c[m, n], nc.copy(total, dtype=c.dtype))
    return c


# %% exercise="1.14.1" hint="there are 128"
def product(nc, at, b):
    c = nc.hbm((at.shape[1], b.shape[1]), at.dtype)
    at_tile, b_tile = nc.load(at), nc.load(b)
    nc.store(c, nc.copy(nc.matmul(at_tile, b_tile), dtype=c.dtype))
    return c


# %% exercise="1.14.1" hint="the last tile may be shorter"
def product(nc, at, b):
    c = nc.hbm((at.shape[1], b.shape[1]), at.dtype)
    ks = pieces(at.shape[0], 128)
    b_tiles = [nc.load(b[k]) for k in ks]
    for row in range(at.shape[1] // 128):
        m = slice(128 * row, 128 * row + 128)
        a_tiles = [nc.load(at[k, m]) for k in ks]
        for n in pieces(b.shape[1], 512):
            total = nc.psum((128, length(n)))
            for i in range(len(ks)):
                nc.matmul(a_tiles[i], b_tiles[i][:, n], out=total, accumulate=i > 0)
            nc.store(c[m, n], nc.copy(total, dtype=c.dtype))
    return c


# %% exercise="1.14.2" hint="as if both sets weighed the same"
def merge(out, logsumexp, new_out, new_logsumexp):
    return (out + new_out) / 2, torch.logaddexp(logsumexp, new_logsumexp)


# %% exercise="1.14.2" hint="exp of a score in the thousands"
def merge(out, logsumexp, new_out, new_logsumexp):
    old, new = logsumexp.exp(), new_logsumexp.exp()
    total = (old + new).clamp(min=1e-30)
    mixed = (old[:, None] * out + new[:, None] * new_out) / total[:, None]
    return mixed, (old + new).log()


# %% exercise="1.14.2" hint="saw no key at all"
def merge(out, logsumexp, new_out, new_logsumexp):
    both = torch.logaddexp(logsumexp, new_logsumexp)
    old, new = (logsumexp - both).exp(), (new_logsumexp - both).exp()
    return old[:, None] * out + new[:, None] * new_out, both


# %% exercise="1.14.2" hint="add up to 1"
def merge(out, logsumexp, new_out, new_logsumexp):
    larger = torch.maximum(logsumexp, new_logsumexp)
    shift = larger.masked_fill(larger == -torch.inf, 0)
    old, new = (logsumexp - shift).exp(), (new_logsumexp - shift).exp()
    mixed = old[:, None] * out + new[:, None] * new_out
    return mixed, torch.logaddexp(logsumexp, new_logsumexp)


# %% exercise="1.14.2" hint="the log-sum-exp of both"
def merge(out, logsumexp, new_out, new_logsumexp):
    both = torch.logaddexp(logsumexp, new_logsumexp)
    shift = both.masked_fill(both == -torch.inf, 0)
    old, new = (logsumexp - shift).exp(), (new_logsumexp - shift).exp()
    return old[:, None] * out + new[:, None] * new_out, torch.maximum(logsumexp, new_logsumexp)


# %% exercise="1.14.3" hint="does not fit"
def best_tile(m, n, memory, itemsize):
    sides = [2**power for power in range(4, 11)]
    fits = [
        (ft.matmul_bytes(m, n, 1, tm, tn, itemsize).total, tm * tn, tm, tn)
        for tm in sides
        for tn in sides
        if 32 * (tm + tn) * itemsize <= memory
    ]
    return min(fits)[2:]


# %% exercise="1.14.3" hint="need not be square"
def best_tile(m, n, memory, itemsize):
    sides = [2**power for power in range(4, 11)]
    return max((s, s) for s in sides if 64 * s * itemsize + 4 * s * s <= memory)


# %% exercise="1.14.3" hint="fewest sums"
def best_tile(m, n, memory, itemsize):
    sides = [2**power for power in range(4, 11)]
    fits = [
        (ft.matmul_bytes(m, n, 1, tm, tn, itemsize).total, -tm * tn, tm, tn)
        for tm in sides
        for tn in sides
        if 32 * (tm + tn) * itemsize + 4 * tm * tn <= memory
    ]
    return min(fits)[2:]


# %% exercise="1.14.3" hint="more bytes than needed"
def best_tile(m, n, memory, itemsize):
    sides = [2**power for power in range(4, 11)]
    fits = [
        (tm * tn, tm, tn)
        for tm in sides
        for tn in sides
        if 32 * (tm + tn) * itemsize + 4 * tm * tn <= memory
    ]
    return max(fits)[1:]
