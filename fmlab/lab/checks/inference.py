"""Checkers of notebook 1.8."""

import math

from fmlab.lab.exercises import Answer, NotYet, exercise


@exercise("1.8.1", "bytes of the pages", returns=int)
def paged_bytes(answer: Answer) -> str:
    cases = [
        ([10, 33], 16, 2, 3, 8, 4),
        ([1, 1, 1], 4, 1, 1, 1, 1),
        ([16, 32], 16, 2, 2, 4, 2),
        ([], 8, 3, 2, 4, 2),
    ]
    for lengths, size, layers, heads, width, itemsize in cases:
        each = 2 * layers * heads * width * itemsize * size
        right = each * sum(math.ceil(n / size) for n in lengths)
        got = answer(list(lengths), size, layers, heads, width, itemsize)
        if got == right:
            continue
        what = f"got {got:,} bytes, right are {right:,}, for lengths {lengths} and pages of {size} tokens"
        if 2 * got == right:
            raise NotYet(what, "both keys and values are kept")
        if got * size == each * sum(lengths):
            raise NotYet(what, "a page that is begun is held whole", "round up for each text")
        if got == each * math.ceil(sum(lengths) / size):
            raise NotYet(what, "every text has pages of its own", "round up each text, then add")
        raise NotYet(
            what,
            "try one text alone, of exactly one page",
            "the pages of a text: its length / page size, rounded up",
        )
    return f"{len(cases)} pools, to the byte"


@exercise("1.8.2", "the least time of a decode step", returns=(int, float))
def decode_seconds(answer: Answer) -> str:
    cases = [
        (1e6, 1, 4, 1e5, 1e9, 1e9),
        (1e6, 64, 2, 0, 1e9, 1e9),
        (5e5, 8, 2, 4e6, 1e12, 1e8),
        (7e9, 300, 2, 1e6, 1e14, 1e12),
    ]
    for parameters, batch, itemsize, cache, flops, bandwidth in cases:
        compute = 2 * parameters * batch / flops
        read = (parameters * itemsize + batch * cache) / bandwidth
        right = max(compute, read)
        got = answer(parameters, batch, itemsize, cache, flops, bandwidth)
        if math.isclose(got, right, rel_tol=1e-9):
            continue
        what = f"got {got:.4g} s, right are {right:.4g} s, for {parameters:.0e} parameters and {batch} texts"
        if math.isclose(got, compute + read, rel_tol=1e-9):
            raise NotYet(what, "computing and reading: they overlap", "the longer of the two decides")
        if math.isclose(got, max(compute, parameters * itemsize / bandwidth), rel_tol=1e-9):
            raise NotYet(what, "the keys and values of every text are read too")
        if math.isclose(got, max(compute, batch * (parameters * itemsize + cache) / bandwidth), rel_tol=1e-9):
            raise NotYet(what, "the weights are read once for all texts of the batch")
        raise NotYet(
            what,
            "each weight does two operations a text: there is no backward pass",
            "max(2·N·b / flops, bytes / bandwidth)",
        )
    return f"{len(cases)} steps"


@exercise("1.8.3", "who may come in", returns=int)
def admit(answer: Answer) -> str:
    cases = [
        ([15], 1, 16, 0),
        ([16], 1, 16, 0),
        ([4, 4], 2, 8, 1),
        ([30, 5, 40, 2], 6, 8, 0),
        ([], 9, 8, 2),
        ([3], 1, 8, 2),
    ]
    for waiting, free, size, running in cases:
        left, right = free - running, 0
        for tokens in waiting:
            left -= math.ceil((tokens + 1) / size)
            if left < 0:
                break
            right += 1
        got = answer(list(waiting), free, size, running)
        if got == right:
            continue
        what = (
            f"let {got} in, right are {right}, for lengths {waiting}, {free} free pages of {size} tokens and "
            f"{running} running"
        )
        if waiting == [16]:
            raise NotYet(what, "a text also needs room for the token it writes next")
        if running:
            raise NotYet(what, "a page is kept for each text that runs")
        if got > right:
            raise NotYet(
                what,
                "nobody overtakes: who does not fit holds up those behind",
                "stop at the first that does not fit",
            )
        raise NotYet(what, "a text comes in if its pages are free")
    return f"{len(cases)} queues"
