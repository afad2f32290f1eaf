"""Checkers of notebook 2.6."""

from itertools import combinations, pairwise

from fmlab.lab.exercises import Answer, NotYet, exercise


@exercise("2.6.1", "write the 1F1B schedule", returns=list)
def one_forward_one_backward(answer: Answer) -> str:
    from fmlab.sim.schedule import schedule

    cases = [(4, 8), (3, 3), (8, 3), (2, 1), (4, 6)]
    for stages, micro_batches in cases:
        plan = [[str(action) for action in todo] for todo in schedule("1f1b", stages, micro_batches)]
        for stage in range(stages):
            right, got = plan[stage], list(answer(stage, stages, micro_batches))
            if got != right:
                raise _wrong_order(got, right, stage, stages, micro_batches)
    return f"{len(cases)} pipelines, every stage; also with fewer micro-batches than stages"


def _wrong_order(got: list[str], right: list[str], stage: int, stages: int, micro_batches: int) -> NotYet:
    shown = " ".join(map(str, got)) or "nothing"
    what = f"got {shown} for stage {stage} of {stages}, {micro_batches} micro-batches"
    if sorted(map(str, got)) != sorted(right):
        return NotYet(
            what,
            "each micro-batch passes forward once and backward once",
            f"this stage has {micro_batches} of each, written F0 … F{micro_batches - 1} and B0 …",
        )
    at = {name: i for i, name in enumerate(got)}
    if any(at[f"F{i}"] > at[f"B{i}"] for i in range(micro_batches)):
        return NotYet(what, "a backward pass needs its forward pass", "put F before B for each micro-batch")
    forward = [name for name in got if name.startswith("F")]
    if forward != [f"F{i}" for i in range(micro_batches)]:
        return NotYet(what, "micro-batches arrive in order", "both passes go through 0, 1, 2, …")
    held, most = 0, 0
    for name in got:
        held += 1 if name.startswith("F") else -1
        most = max(most, held)
    allowed = min(stages - stage, micro_batches)
    if most > allowed:
        return NotYet(
            what,
            f"it holds {most} micro-batches at once, 1F1B only {allowed}",
            "alternate as soon as the first gradient can be there",
            "warm up with stages - 1 - stage forward passes, then forward and backward in turn",
        )
    return NotYet(
        what,
        "the stage waits although it could do a forward pass",
        "the warm-up is stages - 1 - stage forward passes long; the last stage has none",
    )


@exercise("2.6.2", "choose the micro-batches", returns=int)
def fewest_micro_batches(answer: Answer) -> str:
    cases = [(4, 1, 0.1), (8, 1, 0.1), (4, 2, 0.1), (16, 4, 0.05), (2, 1, 0.5), (4, 2, 0.2), (8, 1, 0.3)]
    for stages, chunks, most in cases:
        right = _fewest(stages, chunks, most)
        got = answer(stages, chunks, most)
        if got == right:
            continue
        what = f"got {got} for {stages} stages of {chunks} chunks, bubble at most {most:g}; it is {right}"
        if got >= 1 and _bubble(stages, got, chunks) > most + 1e-9:
            hint = "with so few the bubble is larger: put your number into the formula"
            raise NotYet(what, hint, "round up, not down", "m >= (p-1) (1/bubble - 1) / v")
        if chunks > 1 and got % stages:
            raise NotYet(
                what,
                "interleaved walks through micro-batches in groups of as many as there are stages",
                "round up to a multiple of the stages where there are 2 chunks or more",
            )
        if chunks > 1 and got == -(-_fewest(stages, 1, most) // stages) * stages:
            raise NotYet(what, "every stage has several chunks", "the bubble is (p-1) / (v m + p-1)")
        if chunks == 1 and got % stages == 0 and got - stages < right:
            raise NotYet(what, "only interleaved needs whole groups", "1F1B runs any number of micro-batches")
        raise NotYet(what, "fewer are enough", "the smallest number whose bubble is not above the limit")
    return f"{len(cases)} pipelines, 1F1B and interleaved"


def _bubble(stages: int, micro_batches: int, chunks: int) -> float:
    return (stages - 1) / (chunks * micro_batches + stages - 1)


def _fewest(stages: int, chunks: int, most: float) -> int:
    step = stages if chunks > 1 else 1
    return next(m for m in range(step, 10_000, step) if _bubble(stages, m, chunks) <= most + 1e-9)


@exercise("2.6.3", "cut by work", returns=list)
def cut_by_work(answer: Answer) -> str:
    cases = [
        ([0, 1, 1, 1, 1, 1, 1, 1, 3], 2),
        ([0, 2, 2, 2, 2, 8], 3),
        ([5, 1, 1, 1], 2),
        ([1, 1, 1, 1, 1, 1], 4),
        ([0, 4, 3, 3, 2, 6, 1], 3),
    ]
    for work, stages in cases:
        right = _smallest_largest(work, stages)
        starts = list(answer(list(work), stages))
        what = f"got {starts} for the work {work} on {stages} stages"
        if len(starts) != stages - 1 or starts != sorted(set(starts)):
            raise NotYet(
                what,
                f"{stages} stages need {stages - 1} ascending starts",
                "leave out the first stage's, which is block 0",
            )
        if starts and not 0 < starts[0] <= starts[-1] < len(work):
            raise NotYet(what, "each stage needs a block at least", "starts lie from 1 to the last block")
        largest = max(sum(work[a:b]) for a, b in pairwise([0, *starts, len(work)]))
        if largest > right:
            even = [i * len(work) // stages for i in range(1, stages)]
            first = (
                "as many blocks each is not as much work each" if starts == even else "one stage has too much"
            )
            raise NotYet(
                f"{what}: its slowest stage has {largest}, {right} is possible",
                first,
                "the slowest stage sets the pace: make the largest sum as small as can be",
                "few blocks: try all cuts (itertools.combinations)",
            )
    return f"{len(cases)} models, among them one with a heavy head"


def _smallest_largest(work: list[int], stages: int) -> int:
    cuts = combinations(range(1, len(work)), stages - 1)
    return min(max(sum(work[a:b]) for a, b in pairwise([0, *cut, len(work)])) for cut in cuts)
