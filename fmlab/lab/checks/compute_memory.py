"""Checkers of notebook 2.1."""

from itertools import combinations
from typing import Any

from fmlab.lab.exercises import Answer, NotYet, exercise


@exercise("2.1.1", "count the states", returns=int)
def state_bytes(answer: Answer) -> str:
    for trained, frozen, mixed in ((100, 0, False), (1_000, 0, True), (10, 5_000, False), (70, 900, True)):
        weight, moments, copy = (2, 8, 4) if mixed else (4, 8, 0)
        right = trained * (2 * weight + moments + copy) + frozen * weight
        got = answer(trained, frozen, mixed)
        if got == right:
            continue
        what = f"got {got:,} for {trained:,} trained and {frozen:,} frozen parameters, mixed={mixed}"
        if frozen and got == trained * (2 * weight + moments + copy):
            raise NotYet(what, "frozen weights are there too", "a frozen parameter takes its weight's bytes")
        if frozen and got > right:
            raise NotYet(
                what,
                "a frozen weight has no gradient",
                "and no optimizer state: it takes its weight's bytes only",
            )
        if right - got == 4 * trained and mixed and got % trained == 0:
            raise NotYet(
                what,
                "4 bytes of each trained parameter are missing: is there an fp32 copy?",
                "16-bit weights lose small updates, so AdamW updates an fp32 copy",
            )
        if right - got == 4 * trained:
            raise NotYet(what, "AdamW has two moments of each", "4 bytes for each of them")
        raise NotYet(
            what, "write down the bytes of one trained parameter", "weight + gradient + moments (+ copy)"
        )
    return "fp32 and mixed, all trained and mostly frozen"


LAYERS = (
    ([(100, 10, 50)] * 4, 250),
    ([(60, 10, 50), (200, 10, 60), (60, 10, 50)], 220),
    ([(60, 5, 30), (80, 5, 30), (20, 5, 30)], 95),
    ([(500, 20, 60), (120, 20, 45), (130, 20, 40), (90, 20, 10)], 330),
    ([(70, 10, 61), (60, 10, 50), (60, 10, 50)], 130),
    ([(100, 30, 5), (100, 30, 5)], 40),
    ([(40, 10, 9), (50, 10, 7)], 1000),
)


@exercise("2.1.2", "choose the layers", returns=list)
def choose(answer: Answer) -> str:
    for layers, budget in LAYERS:
        got = answer(list(layers), budget)
        what = f"got {got} for {layers} and a budget of {budget}"
        legal = sorted(set(got)) == got and all(i in range(len(layers)) for i in got)
        if not legal:
            raise NotYet(what, "return the numbers of layers, from 0, ascending, each once")
        taken, cost = _price(layers, got)
        least = min(
            (
                _price(layers, keep)[1]
                for count in range(len(layers) + 1)
                for keep in combinations(range(len(layers)), count)
                if _price(layers, keep)[0] <= budget
            ),
            default=None,
        )
        if least is None:
            if got:
                raise NotYet(what, "nothing fits here: what goes into it stays, of all layers")
            continue
        if taken > budget:
            raise NotYet(
                f"{what}: they take {taken}",
                "more than the budget: a layer that runs again is not free, what goes into it stays",
                "add up `kept` of the chosen layers and `given` of the others",
            )
        if cost > least:
            hints = _hints(layers, got, budget)
            raise NotYet(f"{what}: {cost} operations run again, {least} would do", *hints)
    return f"{len(LAYERS)} models, all as good as exhaustive search"


def _price(layers: Any, keep: Any) -> tuple[int, int]:
    taken = sum(kept if i in keep else given for i, (kept, given, _) in enumerate(layers))
    return taken, sum(operations for i, (_, _, operations) in enumerate(layers) if i not in keep)


def _greedy(layers: Any, budget: int, order: Any) -> list[int]:
    used, keep = sum(given for _, given, _ in layers), []
    for i in order:
        kept, given, _ = layers[i]
        if used + kept - given <= budget:
            used += kept - given
            keep.append(i)
    return sorted(keep)


def _hints(layers: Any, got: list[int], budget: int) -> tuple[str, ...]:
    numbers = range(len(layers))
    first = next((n for n in numbers if _price(layers, numbers[: n + 1])[0] > budget), len(layers))
    by_ratio = sorted(numbers, key=lambda i: -layers[i][2] / (layers[i][0] - layers[i][1]))
    if got == _greedy(layers, budget, by_ratio):
        return (
            "one choice after the other is not always the best: two small layers may beat a good one",
            "with 12 layers at most you can try all sets (itertools.combinations)",
        )
    if got == list(range(first)):
        return ("the order of the layers does not matter here", "look at what each saves, and what it takes")
    return (
        "compare the operations for each byte, not the operations alone",
        "with 12 layers at most you can try all sets (itertools.combinations)",
    )


@exercise("2.1.3", "write recomputation")
def run_again(answer: Answer) -> str:
    import torch

    from fmlab.meter import saved_activations

    torch.manual_seed(21)
    weight = torch.randn(32, 32, requires_grad=True)

    def function(x: Any) -> Any:
        return torch.nn.functional.dropout((x @ weight).exp().sin(), 0.5).square()

    x = torch.randn(64, 32, requires_grad=True)
    wanted = _gradients(function, x, weight)
    with saved_activations([x, weight]) as kept:
        torch.manual_seed(1)
        y = answer(function, x)
    if kept.live > x.nbytes:
        raise NotYet(
            f"it keeps {kept.live:,} bytes, x has {x.nbytes:,}",
            "give autograd something small in place of each tensor",
            "pack can return a number, and unpack computes the tensors again",
        )
    after = torch.rand(1)
    x.grad = weight.grad = None
    y.sum().backward()
    now = torch.get_rng_state()
    if weight.grad is None:
        raise NotYet(
            "no gradient reaches the weights",
            "run the function itself under the hooks: its graph must lead to everything that it uses",
        )
    got = (y.detach(), x.grad, weight.grad, after)
    names = ("result", "gradient of x", "gradient of the weights", "next random number")
    for name, one, other in zip(names, wanted, got, strict=True):
        if other is None or not torch.equal(one, other):
            raise NotYet(
                f"the {name} differs",
                "does the second run draw other random numbers?",
                "note torch.get_rng_state() before the first run, and set it for the second",
            )
    torch.manual_seed(1)
    torch.nn.functional.dropout(x, 0.5)
    torch.rand(1)
    if not torch.equal(torch.get_rng_state(), now):
        raise NotYet(
            "the backward pass moved the generator",
            "leave it as it finds it",
            "note the state before the second run, and set it back afterwards",
        )
    return "the same gradients bit for bit, and nothing kept but x"


def _gradients(function: Any, x: Any, weight: Any) -> tuple[Any, ...]:
    import torch

    torch.manual_seed(1)
    y = function(x)
    after = torch.rand(1)
    y.sum().backward()
    return y.detach(), x.grad.clone(), weight.grad.clone(), after
