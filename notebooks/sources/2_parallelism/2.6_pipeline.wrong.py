# Plausible wrong answers to the exercises of 2.6_pipeline.py, each with the hint that it must earn.


# %% exercise="2.6.1" hint="micro-batches at once, 1F1B only"
def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> list[str]:
    return [f"{letter}{i}" for letter in "FB" for i in range(micro_batches)]


# %% exercise="2.6.1" hint="the warm-up is stages - 1 - stage forward passes long"
def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> list[str]:
    return [f"{letter}{i}" for i in range(micro_batches) for letter in "FB"]


# %% exercise="2.6.1" hint="each micro-batch passes forward once and backward once"
def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> list[str]:
    ahead = min(stages - 1 - stage, micro_batches)
    order = [f"F{i}" for i in range(ahead)]
    for i in range(micro_batches - ahead):
        order += [f"F{i + ahead}", f"B{i}"]
    return order


# %% exercise="2.6.1" hint="micro-batches at once, 1F1B only"
def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> list[str]:
    ahead = min(stages - stage, micro_batches)
    order = [f"F{i}" for i in range(ahead)]
    for i in range(micro_batches - ahead):
        order += [f"F{i + ahead}", f"B{i}"]
    return order + [f"B{i}" for i in range(micro_batches - ahead, micro_batches)]


# %% exercise="2.6.2" hint="with so few the bubble is larger"
def fewest_micro_batches(stages: int, chunks: int, bubble: float) -> int:
    return max(1, int((stages - 1) * (1 / bubble - 1) / chunks) - 1)


# %% exercise="2.6.2" hint="in groups of as many as there are stages"
def fewest_micro_batches(stages: int, chunks: int, bubble: float) -> int:
    m = 1
    while (stages - 1) / (chunks * m + stages - 1) > bubble + 1e-9:
        m += 1
    return m


# %% exercise="2.6.2" hint="every stage has several chunks"
def fewest_micro_batches(stages: int, chunks: int, bubble: float) -> int:
    step = stages if chunks > 1 else 1
    m = step
    while (stages - 1) / (m + stages - 1) > bubble + 1e-9:
        m += step
    return m


# %% exercise="2.6.2" hint="only interleaved needs whole groups"
def fewest_micro_batches(stages: int, chunks: int, bubble: float) -> int:
    m = stages
    while (stages - 1) / (chunks * m + stages - 1) > bubble + 1e-9:
        m += stages
    return m


# %% exercise="2.6.3" hint="as many blocks each is not as much work each"
def cut_by_work(work: list[int], stages: int) -> list[int]:
    return [i * len(work) // stages for i in range(1, stages)]


# %% exercise="2.6.3" hint="ascending starts"
def cut_by_work(work: list[int], stages: int) -> list[int]:
    return [i * len(work) // stages for i in range(stages)]


# %% exercise="2.6.3" hint="the slowest stage sets the pace"
def cut_by_work(work: list[int], stages: int) -> list[int]:
    starts, filled = [], 0
    for i, cost in enumerate(work):
        left = len(work) - i == stages - 1 - len(starts)
        if i and len(starts) < stages - 1 and (filled >= sum(work) / stages or left):
            starts.append(i)
            filled = 0
        filled += cost
    return starts
