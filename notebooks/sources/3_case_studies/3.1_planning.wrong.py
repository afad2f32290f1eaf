# Plausible wrong answers to the exercises of 3.1_planning.py, each with the hint that it must earn.


# %% exercise="3.1.1" hint="a rank is a core here"
def layout_of_t5() -> Layout:
    return Layout(data=32, fsdp=True, micro_batches=4)


# %% exercise="3.1.1" hint="below its memory stands what would fit"
def layout_of_t5() -> Layout:
    return Layout(data=64)


# %% exercise="3.1.1" hint="what it has too much of"
def layout_of_t5() -> Layout:
    return Layout(
        data=2, tensor=8, sequence_parallel=True, pipeline=4, micro_batches=64, zero=1
    )


# %% exercise="3.1.1" hint="read what is legal"
def layout_of_t5() -> Layout:
    return Layout(tensor=64, sequence_parallel=True, micro_batches=32)


# %% exercise="3.1.1" hint="not its plan or its time"
def layout_of_t5() -> Layout:
    layout = Layout(data=64, fsdp=True, micro_batches=4)
    return plan("t5-3b", chip="trn1-core", layout=layout, global_batch=1024, seq_len=512)


# %% exercise="3.1.2" hint="nothing was computed again here"
def slip_in(claim: dict) -> str:
    right = 6 * claim["parameters"] * claim["tokens_second"] / (claim["chips"] * claim["peak"])
    found = {"right": right, "hfu": right * 8 / 6, "sparse": right / 2}
    found |= {"cores": right * claim["cores"], "chips": right * claim["chips"]}
    near = [name for name, mfu in found.items() if abs(claim["mfu"] / mfu - 1) <= 0.02]
    return near[0] if near else "unknown"


# %% exercise="3.1.2" hint="makes the utilisation half as large"
def slip_in(claim: dict) -> str:
    right = 6 * claim["parameters"] * claim["tokens_second"] / (claim["chips"] * claim["peak"])
    again = 8 / 6 if claim["recomputed"] == "full" else 1
    found = {"right": right, "hfu": right * again, "sparse": right * 2}
    found |= {"cores": right * claim["cores"], "chips": right * claim["chips"]}
    near = [name for name, mfu in found.items() if abs(claim["mfu"] / mfu - 1) <= 0.02]
    return near[0] if near else "unknown"


# %% exercise="3.1.2" hint="the nearest one is not near enough"
def slip_in(claim: dict) -> str:
    right = 6 * claim["parameters"] * claim["tokens_second"] / (claim["chips"] * claim["peak"])
    again = 8 / 6 if claim["recomputed"] == "full" else 1
    found = {"right": right, "hfu": right * again, "sparse": right / 2}
    found |= {"cores": right * claim["cores"], "chips": right * claim["chips"]}
    return min(found, key=lambda name: abs(claim["mfu"] / found[name] - 1))


# %% exercise="3.1.2" hint="two per cent of the figure itself"
def slip_in(claim: dict) -> str:
    right = 6 * claim["parameters"] * claim["tokens_second"] / (claim["chips"] * claim["peak"])
    again = 8 / 6 if claim["recomputed"] == "full" else 1
    found = {"right": right, "hfu": right * again, "sparse": right / 2}
    found |= {"cores": right * claim["cores"], "chips": right * claim["chips"]}
    near = [name for name, mfu in found.items() if abs(claim["mfu"] - mfu) <= 0.02]
    return near[0] if near else "unknown"


# %% exercise="3.1.3" hint="days with failures and checkpoints"
def fewest_chips(step_seconds, steps, days, chip_hours, checkpoint) -> int:
    for chips in sorted(step_seconds):
        if steps * step_seconds[chips] <= days * DAY:
            return chips
    return 0


# %% exercise="3.1.3" hint="days with failures and checkpoints"
def fewest_chips(step_seconds, steps, days, chip_hours, checkpoint) -> int:
    mean_time = 3600 * chip_hours
    interval = optimal_interval(checkpoint, mean_time)
    share = goodput_at(interval, checkpoint, mean_time, restart=600).share
    for chips in sorted(step_seconds):
        if steps * step_seconds[chips] / share <= days * DAY:
            return chips
    return 0


# %% exercise="3.1.3" hint="are enough: they take"
def fewest_chips(step_seconds, steps, days, chip_hours, checkpoint) -> int:
    return max(step_seconds)


# %% exercise="3.1.3" hint="nothing meets this deadline"
def fewest_chips(step_seconds, steps, days, chip_hours, checkpoint) -> int:
    for chips in sorted(step_seconds):
        mean_time = 3600 * chip_hours / chips
        interval = optimal_interval(checkpoint, mean_time)
        share = goodput_at(interval, checkpoint, mean_time, restart=600).share
        if steps * step_seconds[chips] / share <= days * DAY:
            break
    return chips
