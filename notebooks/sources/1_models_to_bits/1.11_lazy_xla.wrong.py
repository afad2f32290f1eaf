# Plausible wrong answers to the exercises of 1.11_lazy_xla.py, each with the hint that it must earn.


# %% exercise="1.11.1" hint="buckets of equal width do not look at the rows"
def three_buckets(lengths: list[int], longest: int) -> list[int]:
    return [longest // 3, 2 * longest // 3, longest]


# %% exercise="1.11.1" hint="a later row may be as long as `longest`"
def three_buckets(lengths: list[int], longest: int) -> list[int]:
    rows = sorted(lengths)
    return sorted({rows[len(rows) // 3], rows[2 * len(rows) // 3], rows[-1]})


# %% exercise="1.11.1" hint="each bucket is a program"
def three_buckets(lengths: list[int], longest: int) -> list[int]:
    return [*range(16, longest, 16), longest]


# %% exercise="1.11.1" hint="that many rows share a bucket does not make them of one length"
def three_buckets(lengths: list[int], longest: int) -> list[int]:
    rows = sorted(lengths)
    return sorted({rows[len(rows) // 3], rows[2 * len(rows) // 3], longest})


# %% exercise="1.11.1" hint="in rising order"
def three_buckets(lengths: list[int], longest: int) -> list[int]:
    return [longest, min(lengths)]


# %% exercise="1.11.2" hint="another number of rows is another shape"
def count_programs(
    lengths: list[int], batch_size: int, buckets: list[int], drop_last: bool
) -> int:
    seen = set()
    for start in range(0, len(lengths), batch_size):
        batch = lengths[start : start + batch_size]
        if len(batch) == batch_size or not drop_last:
            seen.add(min(b for b in buckets if b >= max(batch)))
    return len(seen)


# %% exercise="1.11.2" hint="a bucket that no batch falls into is never compiled"
def count_programs(
    lengths: list[int], batch_size: int, buckets: list[int], drop_last: bool
) -> int:
    return len(buckets) + (len(lengths) % batch_size > 0 and not drop_last)


# %% exercise="1.11.2" hint="a batch is as long as its longest row"
def count_programs(
    lengths: list[int], batch_size: int, buckets: list[int], drop_last: bool
) -> int:
    seen = set()
    for start in range(0, len(lengths), batch_size):
        batch = lengths[start : start + batch_size]
        if len(batch) == batch_size or not drop_last:
            seen |= {(len(batch), min(b for b in buckets if b >= row)) for row in batch}
    return len(seen)


# %% exercise="1.11.2" hint="drop_last leaves the partial batch out"
def count_programs(
    lengths: list[int], batch_size: int, buckets: list[int], drop_last: bool
) -> int:
    seen = set()
    for start in range(0, len(lengths), batch_size):
        batch = lengths[start : start + batch_size]
        seen.add((len(batch), min(b for b in buckets if b >= max(batch))))
    return len(seen)


# %% exercise="1.11.3" hint="the host waits at every step"
def window_means(step, batches: list, every: int) -> list[float]:
    losses = [float(step(batch)) for batch in batches]
    windows = [losses[start : start + every] for start in range(0, len(losses), every)]
    return [sum(window) / len(window) for window in windows]


# %% exercise="1.11.3" hint="the loss of one step is not the mean of the window"
def window_means(step, batches: list, every: int) -> list[float]:
    means = []
    for start in range(0, len(batches), every):
        for batch in batches[start : start + every]:
            loss = step(batch)
        means.append(float(loss))
    return means


# %% exercise="1.11.3" hint="the last window has fewer steps"
def window_means(step, batches: list, every: int) -> list[float]:
    means = []
    for start in range(0, len(batches), every):
        window = batches[start : start + every]
        total = step(window[0])
        for batch in window[1:]:
            total = total + step(batch)
        means.append(float(total / every))
    return means


# %% exercise="1.11.3" hint="a window is missing"
def window_means(step, batches: list, every: int) -> list[float]:
    means = []
    for start in range(0, len(batches) - every + 1, every):
        window = batches[start : start + every]
        total = step(window[0])
        for batch in window[1:]:
            total = total + step(batch)
        means.append(float(total / len(window)))
    return means
