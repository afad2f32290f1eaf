"""Checkers of notebook 3.1."""

from typing import Any

from fmlab.lab.exercises import Answer, NotYet, exercise

SLOWER = 1.05  # than the best layout, at most


@exercise("3.1.1", "plan T5-3B")
def layout_of_t5(answer: Answer) -> str:
    from fmlab.parallel import Layout
    from fmlab.planner import plan, search

    t5: dict[str, Any] = dict(chip="trn1-core", global_batch=1024, seq_len=512)
    layout = answer()
    if not isinstance(layout, Layout):
        raise NotYet(
            f"got {type(layout).__name__}, not a Layout", "return the Layout itself, not its plan or its time"
        )
    if layout.world_size != 64:
        what = f"{layout} takes {layout.world_size} ranks, and there are 64"
        raise NotYet(
            what,
            "a rank is a core here: two hosts x 16 chips x 2 cores",
            "data x tensor x pipeline must be 64",
        )
    try:
        one = plan("t5-3b", layout=layout, **t5)
    except ValueError as error:
        raise NotYet(
            f"{layout} is refused: {error}", "plan it by hand and read what is legal", "start from data=64"
        ) from None
    best = search("t5-3b", chips=64, **t5).best
    if not one.fits:
        worst = max(one.memory.values(), key=lambda line: line.value)
        raise NotYet(
            f"{layout} lacks {one.lacking / 2**30:.1f} GiB, most of it {worst.name}",
            "print the plan: below its memory stands what would fit",
            "divide states by fsdp=True; halve activations by twice the micro_batches",
        )
    slower = one.step_seconds / best.step_seconds
    if slower > SLOWER:
        lines = {n: line.value for n, line in one.time.items()}
        more = {n: v - (best.time[n].value if n in best.time else 0.0) for n, v in lines.items()}
        raise NotYet(
            f"{layout} fits, and takes {one.step_seconds:.2f} s a step: {slower - 1:.0%} more than the best",
            f"what it has too much of: {max(more, key=lambda name: more[name])}",
            "as little tensor, pipeline and recomputation as fits, and as many rows at once",
        )
    return f"{one.step_seconds:.2f} s a step; the best of all legal layouts takes {best.step_seconds:.2f} s"


#: parameters, tokens a second, chips, dense peak, cores, recomputed
RUNS = (
    (70e9, 337.0, 16, 312e12, 1, "none"),
    (7e9, 350e3, 256, 190e12, 2, "full"),
    (175e9, 150e3, 1024, 312e12, 1, "full"),
    (540e9, 240e3, 6144, 275e12, 2, "none"),
    (13e9, 900.0, 1, 667e12, 8, "full"),
)


@exercise("3.1.2", "audit a claim", returns=str)
def slip_in(answer: Answer) -> str:
    found = 0
    for numbers in RUNS:
        claim: dict[str, Any] = dict(
            zip(("parameters", "tokens_second", "chips", "peak", "cores", "recomputed"), numbers, strict=True)
        )
        right = _given_by(claim)
        for factor in (1.0, 1.015, 0.985):
            for mfu in (*right.values(), 1.33 * right["right"], 0.7 * right["right"]):
                if mfu > 0.95:
                    continue  # nobody prints that
                claim["mfu"] = factor * mfu
                want = next((n for n, v in right.items() if abs(claim["mfu"] / v - 1) <= 0.02), "unknown")
                got = answer(dict(claim))
                if got != want:
                    raise _wrong_slip(claim, right, got, want)
                found += 1
    return f"{found} claims, right ones and unknown ones among them"


def _given_by(claim: dict[str, Any]) -> dict[str, float]:
    right = 6 * claim["parameters"] * claim["tokens_second"] / (claim["chips"] * claim["peak"])
    again = 8 / 6 if claim["recomputed"] == "full" else 1.0
    return {
        "right": right,
        "hfu": again * right,
        "sparse": right / 2,
        "cores": claim["cores"] * right,
        "chips": claim["chips"] * right,
    }


def _wrong_slip(claim: dict[str, Any], right: dict[str, float], got: str, want: str) -> NotYet:
    about = ", ".join(f"{k}={v:g}" if isinstance(v, int | float) else f"{k}={v}" for k, v in claim.items())
    what = f'got "{got}", not "{want}", for {about}'
    if got not in (*right, "unknown"):
        return NotYet(what, f"return one of {', '.join(right)}, unknown")
    if got == "hfu" and claim["recomputed"] == "none":
        return NotYet(what, "nothing was computed again here", "look at claim['recomputed'] before 8 N")
    if want == "unknown":
        return NotYet(what, "no slip gives this figure within 2 %", "the nearest one is not near enough")
    if want == "sparse":
        return NotYet(
            what,
            "a peak twice as large makes the utilisation half as large",
            "and within 2 % means two per cent of the figure itself",
        )
    if got == "unknown":
        return NotYet(
            what,
            f'"{want}" gives {right[want]:.4g}, within 2 % of it',
            "2 % of the figure, not 0.02 of the peak; and each slip starts from the right MFU",
        )
    return NotYet(
        what,
        f'"{want}" gives {right[want]:.4g}, "{got}" gives {right[got]:.4g}',
        "two per cent of the figure itself; of several take the first in the order of the docstring",
    )


#: seconds of a step by chips, steps, days, chip hours between failures, seconds of a checkpoint
DEADLINES = (
    ({64: 12.0, 128: 6.2, 256: 3.3, 512: 1.9}, 100_000, 7.5, 50_000.0, 60.0),
    ({64: 12.0, 128: 6.2, 256: 3.3, 512: 1.9}, 100_000, 7.2, 50_000.0, 60.0),  # without failures 128 would do
    ({8192: 4.0, 16_384: 2.1, 32_768: 1.3}, 200_000, 5.6, 50_000.0, 60.0),
    ({512: 2.5, 1024: 1.3, 256: 4.9}, 400_000, 7.0, 20_000.0, 120.0),
    ({8: 1.0}, 1000, 1.0, 50_000.0, 10.0),
    ({512: 30.0, 1024: 18.0}, 100_000, 2.0, 50_000.0, 60.0),
    ({1000: 10.0, 2000: 5.2, 4000: 2.9}, 50_000, 3.1, 3_000.0, 300.0),  # fails every hour or so
)


@exercise("3.1.3", "how many chips?", returns=int)
def fewest_chips(answer: Answer) -> str:
    for case in DEADLINES:
        takes = {chips: _days(chips, *case) for chips in case[0]}
        right = next((chips for chips in sorted(takes) if takes[chips] <= case[2]), 0)
        got = answer(dict(case[0]), *case[1:])
        if got != right:
            raise _wrong_chips(got, right, takes, case)
    return f"{len(DEADLINES)} deadlines, one that nothing meets"


def _days(
    chips: int, seconds: dict[int, float], steps: int, days: float, hours: float, checkpoint: float
) -> float:
    from fmlab.planner import goodput_at, optimal_interval

    mean = 3600 * hours / chips
    share = goodput_at(optimal_interval(checkpoint, mean), checkpoint, mean, restart=600).share
    return steps * seconds[chips] / share / 86_400


def _wrong_chips(got: int, right: int, takes: dict[int, float], case: Any) -> NotYet:
    seconds, steps, days, _, _ = case
    what = f"got {got:,}, not {right:,}, for steps of {seconds} s, {steps:,} steps in {days} days"
    if right == 0:
        return NotYet(what, f"nothing meets this deadline: the best is {min(takes.values()):.2f} days")
    if got in takes and takes[got] > days:
        bare = steps * seconds[got] / 86_400
        return NotYet(
            what,
            f"{got:,} chips take {takes[got]:.2f} days with failures and checkpoints, {bare:.2f} without",
            "a run lasts 1 / share as long; seconds between its failures are 3600 x chip_hours / chips",
        )
    if got in takes and right and got > right:
        return NotYet(
            what,
            f"{right:,} chips are enough: they take {takes[right]:.2f} days",
            "from few chips to many, in order; hours are 3,600 seconds",
        )
    return NotYet(what, f"{right:,} chips take {takes[right]:.2f} days", "hours of a chip are 3,600 seconds")
