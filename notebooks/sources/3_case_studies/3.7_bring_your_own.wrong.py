# Plausible wrong answers to the exercises of 3.7_bring_your_own.py, each with the hint that it must earn.


# %% exercise="3.7.1" hint="the first steps compile"
def refuse(
    cpu: list[float], chip: list[float], seconds: list[float], planned: float
) -> list[str]:
    reasons = []
    if len(chip) < len(cpu) or not all(abs(b - a) <= 0.01 * a for a, b in zip(cpu, chip)):
        reasons.append("losses")
    mean = sum(seconds) / len(seconds)
    if mean > 1.3 * planned:
        reasons.append("slow")
    if max(seconds[3:]) > 5 * mean:
        reasons.append("recompile")
    return reasons


# %% exercise="3.7.1" hint="too low is as wrong"
def refuse(
    cpu: list[float], chip: list[float], seconds: list[float], planned: float
) -> list[str]:
    reasons = []
    if len(chip) < len(cpu) or not all(b <= 1.01 * a for a, b in zip(cpu, chip)):
        reasons.append("losses")
    steady = sorted(seconds[3:])
    median = (steady[(len(steady) - 1) // 2] + steady[len(steady) // 2]) / 2
    if median > 1.3 * planned:
        reasons.append("slow")
    if steady[-1] > 5 * median:
        reasons.append("recompile")
    return reasons


# %% exercise="3.7.1" hint="is not within 1 %"
def refuse(
    cpu: list[float], chip: list[float], seconds: list[float], planned: float
) -> list[str]:
    reasons = []
    if len(chip) < len(cpu) or any(abs(b - a) > 0.01 * a for a, b in zip(cpu, chip)):
        reasons.append("losses")
    steady = sorted(seconds[3:])
    median = (steady[(len(steady) - 1) // 2] + steady[len(steady) // 2]) / 2
    if median > 1.3 * planned:
        reasons.append("slow")
    if steady[-1] > 5 * median:
        reasons.append("recompile")
    return reasons


# %% exercise="3.7.1" hint="losses that never came"
def refuse(
    cpu: list[float], chip: list[float], seconds: list[float], planned: float
) -> list[str]:
    reasons = []
    if not all(abs(b - a) <= 0.01 * a for a, b in zip(cpu, chip)):
        reasons.append("losses")
    steady = sorted(seconds[3:])
    median = (steady[(len(steady) - 1) // 2] + steady[len(steady) // 2]) / 2
    if median > 1.3 * planned:
        reasons.append("slow")
    if steady[-1] > 5 * median:
        reasons.append("recompile")
    return reasons


# %% exercise="3.7.1" hint="is another program"
def refuse(
    cpu: list[float], chip: list[float], seconds: list[float], planned: float
) -> list[str]:
    reasons = []
    if len(chip) < len(cpu) or not all(abs(b - a) <= 0.01 * a for a, b in zip(cpu, chip)):
        reasons.append("losses")
    steady = seconds[3:]
    mean = sum(steady) / len(steady)
    if mean > 1.3 * planned:
        reasons.append("slow")
    if max(steady) > 5 * mean:
        reasons.append("recompile")
    return reasons


# %% exercise="3.7.1" hint="the mean of the two in the middle"
def refuse(
    cpu: list[float], chip: list[float], seconds: list[float], planned: float
) -> list[str]:
    reasons = []
    if len(chip) < len(cpu) or not all(abs(b - a) <= 0.01 * a for a, b in zip(cpu, chip)):
        reasons.append("losses")
    steady = sorted(seconds[3:])
    median = steady[len(steady) // 2]
    if median > 1.3 * planned:
        reasons.append("slow")
    if steady[-1] > 5 * median:
        reasons.append("recompile")
    return reasons


# %% exercise="3.7.2" hint="the price of an hour is not in it"
def break_even(
    step_seconds: float, usd_per_hour: float, flops: float, peak: float, price: float
) -> float:
    return flops / (peak * step_seconds)


# %% exercise="3.7.2" hint="has to be fuller, not emptier"
def break_even(
    step_seconds: float, usd_per_hour: float, flops: float, peak: float, price: float
) -> float:
    return flops * usd_per_hour / (peak * step_seconds * price)


# %% exercise="3.7.2" hint="upside down"
def break_even(
    step_seconds: float, usd_per_hour: float, flops: float, peak: float, price: float
) -> float:
    return peak * step_seconds * usd_per_hour / (flops * price)


# %% exercise="3.7.3" hint="a part of a run saves nothing"
def runs_until_paid(
    porting: float, here: float, there: float, failed: float = 0.0
) -> int | None:
    saved = here - there * (1 + failed)
    return None if saved <= 0 else int(porting // saved)


# %% exercise="3.7.3" hint="runs that cost more never pay"
def runs_until_paid(
    porting: float, here: float, there: float, failed: float = 0.0
) -> int | None:
    saved = abs(here - there * (1 + failed))
    return int(-(-porting // saved)) if saved else None


# %% exercise="3.7.3" hint="what fails is paid twice"
def runs_until_paid(
    porting: float, here: float, there: float, failed: float = 0.0
) -> int | None:
    saved = here - there
    return None if saved <= 0 else int(-(-porting // saved))


# %% exercise="3.7.3" hint="is paid at once"
def runs_until_paid(
    porting: float, here: float, there: float, failed: float = 0.0
) -> int | None:
    saved = here - there * (1 + failed)
    return None if saved <= 0 else int(-(-porting // saved))
