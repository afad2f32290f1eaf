# Plausible wrong answers to the exercises of 2.1_compute_memory.py, each with the hint that it must earn.


# %% exercise="2.1.1" hint="a frozen weight has no gradient"
def state_bytes(trained: int, frozen: int, mixed: bool) -> int:
    return (trained + frozen) * 16


# %% exercise="2.1.1" hint="two moments"
def state_bytes(trained: int, frozen: int, mixed: bool) -> int:
    weight = 2 if mixed else 4
    optimizer = 8 if mixed else 4
    return trained * (2 * weight + optimizer) + frozen * weight


# %% exercise="2.1.1" hint="an fp32 copy"
def state_bytes(trained: int, frozen: int, mixed: bool) -> int:
    weight = 2 if mixed else 4
    return trained * (2 * weight + 8) + frozen * weight


# %% exercise="2.1.1" hint="frozen weights are there too"
def state_bytes(trained: int, frozen: int, mixed: bool) -> int:
    return trained * 16


# %% exercise="2.1.2" hint="what goes into it stays"
def choose(layers: list[tuple[int, int, int]], budget: int) -> list[int]:
    from itertools import combinations

    best, least = [], sum(operations for _, _, operations in layers)
    for count in range(1, len(layers) + 1):
        for keep in combinations(range(len(layers)), count):
            taken = sum(layers[i][0] for i in keep)
            cost = sum(
                operations for i, (_, _, operations) in enumerate(layers) if i not in keep
            )
            if taken <= budget and cost < least:
                best, least = list(keep), cost
    return best


# %% exercise="2.1.2" hint="operations for each byte"
def choose(layers: list[tuple[int, int, int]], budget: int) -> list[int]:
    used, keep = sum(given for _, given, _ in layers), []
    for i in sorted(range(len(layers)), key=lambda i: -layers[i][2]):
        kept, given, _ = layers[i]
        if used + kept - given <= budget:
            used += kept - given
            keep.append(i)
    return sorted(keep)


# %% exercise="2.1.2" hint="the order of the layers does not matter"
def choose(layers: list[tuple[int, int, int]], budget: int) -> list[int]:
    used, keep = sum(given for _, given, _ in layers), []
    for i, (kept, given, _) in enumerate(layers):
        if used + kept - given > budget:
            break
        used += kept - given
        keep.append(i)
    return keep


# %% exercise="2.1.2" hint="one choice after the other is not always the best"
def choose(layers: list[tuple[int, int, int]], budget: int) -> list[int]:
    used, keep = sum(given for _, given, _ in layers), []
    for i in sorted(
        range(len(layers)), key=lambda i: -layers[i][2] / (layers[i][0] - layers[i][1])
    ):
        kept, given, _ = layers[i]
        if used + kept - given <= budget:
            used += kept - given
            keep.append(i)
    return sorted(keep)


# %% exercise="2.1.3" hint="it keeps"
def run_again(function, x: torch.Tensor) -> torch.Tensor:
    return function(x)


# %% exercise="2.1.3" hint="other random numbers"
def run_again(function, x: torch.Tensor) -> torch.Tensor:
    numbers, values = iter(range(10**9)), []
    hooks = torch.autograd.graph.saved_tensors_hooks

    def unpack(number):
        if not values:
            with (
                torch.enable_grad(),
                hooks(lambda t: values.append(t.detach()), lambda _: None),
            ):
                function(x)
        return values[number]

    with hooks(lambda tensor: next(numbers), unpack):
        return function(x)


# %% exercise="2.1.3" hint="as it finds it"
def run_again(function, x: torch.Tensor) -> torch.Tensor:
    before, numbers, values = torch.get_rng_state(), iter(range(10**9)), []
    hooks = torch.autograd.graph.saved_tensors_hooks

    def unpack(number):
        if not values:
            torch.set_rng_state(before)
            with (
                torch.enable_grad(),
                hooks(lambda t: values.append(t.detach()), lambda _: None),
            ):
                function(x)
        return values[number]

    with hooks(lambda tensor: next(numbers), unpack):
        return function(x)


# %% exercise="2.1.3" hint="no gradient reaches the weights"
def run_again(function, x: torch.Tensor) -> torch.Tensor:
    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            ctx.state = torch.get_rng_state()
            return function(x)

        @staticmethod
        def backward(ctx, d_y):
            (x,) = ctx.saved_tensors
            now = torch.get_rng_state()
            torch.set_rng_state(ctx.state)
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                y = function(x)
            torch.set_rng_state(now)
            return torch.autograd.grad(y, x, d_y)[0]

    return Again.apply(x)
