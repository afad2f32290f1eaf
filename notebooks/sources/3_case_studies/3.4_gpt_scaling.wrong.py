# Plausible wrong answers to the exercises of 3.4_gpt_scaling.py, each with the hint that it must earn.


# %% exercise="3.4.1" hint="is one character and two bytes"
def bits_per_byte(losses: list[float], counts: list[int], text: str) -> float:
    nats = sum(loss * count for loss, count in zip(losses, counts, strict=True))
    return nats / math.log(2) / len(text)


# %% exercise="3.4.1" hint="these are nats, not bits"
def bits_per_byte(losses: list[float], counts: list[int], text: str) -> float:
    return sum(loss * n for loss, n in zip(losses, counts, strict=True)) / len(text.encode())


# %% exercise="3.4.1" hint="a short row weighs less"
def bits_per_byte(losses: list[float], counts: list[int], text: str) -> float:
    mean = sum(losses) / len(losses)
    return mean * sum(counts) / math.log(2) / len(text.encode())


# %% exercise="3.4.1" hint="this is per token"
def bits_per_byte(losses: list[float], counts: list[int], text: str) -> float:
    nats = sum(loss * count for loss, count in zip(losses, counts, strict=True))
    return nats / sum(counts) / math.log(2)


# %% exercise="3.4.2" hint="cost 6 FLOPs"
def best_size(A: float, alpha: float, B: float, beta: float, flops: float) -> float:
    g = (alpha * A / (beta * B)) ** (1 / (alpha + beta))
    return g * flops ** (beta / (alpha + beta))


# %% exercise="3.4.2" hint="these are the tokens"
def best_size(A: float, alpha: float, B: float, beta: float, flops: float) -> float:
    g = (alpha * A / (beta * B)) ** (1 / (alpha + beta))
    return (flops / 6) ** (alpha / (alpha + beta)) / g


# %% exercise="3.4.2" hint="another rule"
def best_size(A: float, alpha: float, B: float, beta: float, flops: float) -> float:
    return math.sqrt(flops / 6 / 20)


# %% exercise="3.4.3" hint="by how often a word occurs"
def kneser_ney(text: list[str], context: str, word: str, discount: float) -> float:
    pairs = list(pairwise(text))
    after = [pair for pair in pairs if pair[0] == context]
    freed = discount * len(set(after)) / len(after)
    kept = max(after.count((context, word)) - discount, 0) / len(after)
    return kept + freed * text.count(word) / len(text)


# %% exercise="3.4.3" hint="given to no one"
def kneser_ney(text: list[str], context: str, word: str, discount: float) -> float:
    after = [b for a, b in pairwise(text) if a == context]
    return max(after.count(word) - discount, 0) / len(after)


# %% exercise="3.4.3" hint="from each different word after the context"
def kneser_ney(text: list[str], context: str, word: str, discount: float) -> float:
    pairs = list(pairwise(text))
    after = [pair for pair in pairs if pair[0] == context]
    share = sum(b == word for _, b in set(pairs)) / len(set(pairs))
    kept = max(after.count((context, word)) - discount, 0) / len(after)
    return kept + discount * share
