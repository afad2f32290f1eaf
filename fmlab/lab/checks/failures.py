"""Checkers of notebook 2.10."""

import math

from fmlab.lab.exercises import Answer, NotYet, exercise

#: The calls of each rank, and who is to blame.
HANGS: tuple[tuple[list[list[str]], list[int]], ...] = (
    ([["reduce", "barrier"], ["reduce", "reduce"], ["reduce", "reduce"]], [0]),
    ([["reduce"] * 3, ["reduce"] * 3, ["reduce"] * 2, ["reduce"] * 3], [2]),
    ([["gather", "reduce"], ["reduce", "reduce"], ["gather", "reduce"]], [1]),
    ([["reduce"] * 2, ["reduce"] * 2, ["reduce"], ["reduce"]], [2, 3]),
    ([["reduce", "barrier"], ["reduce"], ["reduce"], ["reduce"]], [0]),
    ([["gather"], ["gather"], ["reduce"], ["reduce"]], [2, 3]),
    ([["reduce", "gather"]] * 3, []),
)


@exercise("2.10.1", "name the culprit", returns=list)
def culprits(answer: Answer) -> str:
    for calls, right in HANGS:
        got = list(answer([list(mine) for mine in calls]))
        if got == right:
            continue
        what = f"got {got}, not {right}, for {calls}"
        if not right:
            raise NotYet(what, "all ranks made the same calls: nobody is to blame", "return []")
        lengths = [len(mine) for mine in calls]
        if len({mine[-1] for mine in calls}) == 1 and len(set(lengths)) == 1:
            raise NotYet(
                what,
                "the ranks differ at an earlier place than the last",
                "the first place where they differ is the one that matters; what comes after follows from it",
            )
        if len(set(lengths)) == 1 and got == []:
            raise NotYet(
                what,
                "all lists are equally long, and yet they differ",
                "compare what was called, place by place, not only how often",
            )
        if sorted([*got, *right]) == list(range(len(calls))):
            raise NotYet(
                what,
                "you blamed the other side: what most ranks did is right, whoever rank 0 is",
                "count at that place; on a tie a call beats nothing, then the lower rank's call",
            )
        raise NotYet(
            what,
            "a rank whose list has ended did nothing at that place, which counts like a call",
            "pad the lists, count what each did at the first place where they differ, and blame all others",
        )
    return f"{len(HANGS)} hangs, one of which is none"


@exercise("2.10.2", "the last batches", returns=list)
def batches_of(answer: Answer) -> str:
    cases = [(22, 3, 2), (1050, 4, 2), (16, 4, 2), (5, 4, 2), (9, 1, 4)]
    for rows, ranks, size in cases:
        every = [[list(one) for one in answer(rows, ranks, size, rank)] for rank in range(ranks)]
        case = f"for {rows} rows, {ranks} ranks, size {size}"
        counts = [len(mine) for mine in every]
        if len(set(counts)) > 1:
            raise NotYet(
                f"{case}: the ranks have {counts} batches",
                "then one rank waits for ever: all need the same number",
                "the number of batches follows from rows, ranks and size, not from rank",
            )
        sizes = {len(one) for mine in every for one in mine}
        if sizes - {size}:
            raise NotYet(
                f"{case}: batches have {sorted(sizes)} entries",
                f"each must have {size}: another size is another shape, and another program",
                "fill up with -1",
            )
        read = [row for mine in every for one in mine for row in one if row != -1]
        if len(read) != len(set(read)):
            raise NotYet(
                f"{case}: {len(read) - len(set(read))} rows are read twice",
                "nothing may start again from row 0: a row that is read twice counts twice",
                "where rows are missing, write -1, which has no targets",
            )
        if sorted(read) != list(range(rows)):
            raise NotYet(
                f"{case}: {len(set(range(rows)) - set(read))} rows are lost",
                "every row must come once, the last ones too",
                "round the number of batches up, not down",
            )
        fewest = -(-rows // (ranks * size))
        if counts[0] != fewest:
            raise NotYet(
                f"{case}: {counts[0]} batches", f"{fewest} are enough", "a step takes ranks x size rows"
            )
    return f"{len(cases)} data sets, on all ranks"


@exercise("2.10.3", "the checkpoint interval", returns=int)
def steps_between(answer: Answer) -> str:
    cases = [
        (419, 54 * 24.0, 16_384, 65_536, 60.0, 5.0),
        (3, 240.0, 64, 1024, 30.0, 2.0),
        (10, 100.0, 512, 512, 20.0, 8.0),
        (50, 10.0, 1000, 4000, 0.5, 60.0),
    ]
    for case in cases:
        failures, hours, chips, planned, stop, step = case
        between = hours * 3600 / failures * chips / planned
        right = max(1, round(math.sqrt(2 * stop * between) / step))
        got = answer(*case)
        if got == right:
            continue
        run = f"{failures} failures of {chips:,} chips in {hours:g} hours, {planned:,} planned"
        what = f"got {got}, not {right}, for {run}"

        def steps(seconds: float, stop: float = stop, step: float = step) -> int:
            return max(1, round(math.sqrt(2 * stop * seconds) / step))

        if got < 1:
            raise NotYet(what, "a run cannot save more often than after each step", "at least 1")
        if chips != planned and got == steps(hours * 3600 / failures):
            raise NotYet(
                what,
                "more chips fail more often",
                "the time between failures shrinks as chips grow: x chips / planned",
            )
        if chips != planned and got == steps(hours * 3600 / failures * planned / chips):
            raise NotYet(what, "that is the wrong way round: more chips fail more often", "x chips / planned")
        if got == steps(between / 3600):
            raise NotYet(what, "hours and seconds are mixed", "3,600 seconds an hour")
        if got == max(1, round(math.sqrt(2 * stop * between))):
            raise NotYet(what, "those are seconds, not steps", "divide by the seconds of a step")
        raise NotYet(what, "sqrt(2 x stop x between), in steps", "rounded to the nearest step, not down")
    return f"{len(cases)} runs"
