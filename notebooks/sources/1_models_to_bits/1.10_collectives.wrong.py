# Plausible wrong answers to the exercises of 1.10_collectives.py, each with the hint that it must earn.


# %% exercise="1.10.1" hint="log2(n) steps"
def doubling(n: int) -> list[list[tuple[int, int, list[int]]]]:
    return [[(r, (r + 1) % n, [(r - t) % n]) for r in range(n)] for t in range(n - 1)]


# %% exercise="1.10.1" hint="it does not hold that block yet"
def doubling(n: int) -> list[list[tuple[int, int, list[int]]]]:
    steps, held = [], 1
    while held < n:
        steps.append([(r, r ^ held, [(r + k) % n for k in range(held)]) for r in range(n)])
        held *= 2
    return steps


# %% exercise="1.10.1" hint="pass on what came in the steps before"
def doubling(n: int) -> list[list[tuple[int, int, list[int]]]]:
    steps, held = [], 1
    while held < n:
        steps.append([(r, r ^ held, [r]) for r in range(n)])
        held *= 2
    return steps


# %% exercise="1.10.1" hint="has that block already"
def doubling(n: int) -> list[list[tuple[int, int, list[int]]]]:
    steps, held = [], 1
    have = {r: [r] for r in range(n)}
    while held < n:
        step = [(r, r ^ 1, list(have[r])) for r in range(n)]
        have = {r: sorted({*have[r], *have[r ^ 1]}) for r in range(n)}
        steps.append(step)
        held *= 2
    return steps


# %% exercise="1.10.2" hint="one port carries all of its messages"
def threshold(n: int, latency: float, bandwidth: float) -> float:
    return (2 * (n - 1) - 1) * latency * bandwidth / abs(1 - 2 * (n - 1) / n)


# %% exercise="1.10.2" hint="one_shot has a step, too"
def threshold(n: int, latency: float, bandwidth: float) -> float:
    return 2 * (n - 1) * latency * bandwidth / ((n - 1) - 2 * (n - 1) / n)


# %% exercise="1.10.2" hint="the ring sends bytes, too"
def threshold(n: int, latency: float, bandwidth: float) -> float:
    return (2 * (n - 1) - 1) * latency * bandwidth / (n - 1)


# %% exercise="1.10.2" hint="a reduce-scatter and an all-gather"
def threshold(n: int, latency: float, bandwidth: float) -> float:
    return ((n - 1) - 1) * latency * bandwidth / ((n - 1) - (n - 1) / n)


# %% exercise="1.10.3" hint="what most ranks called"
def first_mismatch(calls: list[list[str]]) -> tuple[int, list[int]] | None:
    for number in range(max(len(one) for one in calls)):
        entered = [one[number] if number < len(one) else None for one in calls]
        wrong = [rank for rank, call in enumerate(entered) if call != entered[0]]
        if wrong:
            return number, wrong
    return None


# %% exercise="1.10.3" hint="called nothing more"
def first_mismatch(calls: list[list[str]]) -> tuple[int, list[int]] | None:
    for number, entered in enumerate(zip(*calls)):
        usual = max(set(entered), key=entered.count)
        wrong = [rank for rank, call in enumerate(entered) if call != usual]
        if wrong:
            return number, wrong
    return None


# %% exercise="1.10.3" hint="the first number"
def first_mismatch(calls: list[list[str]]) -> tuple[int, list[int]] | None:
    found = None
    for number in range(max(len(one) for one in calls)):
        entered = [one[number] if number < len(one) else None for one in calls]
        usual = max(set(entered), key=entered.count)
        wrong = [rank for rank, call in enumerate(entered) if call != usual]
        if wrong:
            found = number, wrong
    return found


# %% exercise="1.10.3" hint="None if all agree"
def first_mismatch(calls: list[list[str]]) -> tuple[int, list[int]] | None:
    for number in range(max(len(one) for one in calls)):
        entered = [one[number] if number < len(one) else None for one in calls]
        usual = max(set(entered), key=entered.count)
        wrong = [rank for rank, call in enumerate(entered) if call != usual]
        if wrong:
            return number, wrong
    return 0, []
