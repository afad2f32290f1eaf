# %% exercise="0.3.1" hint="the phase comes first"
def time_by_layer(events, seconds):
    found = dict.fromkeys(("front end", "graph", "kernels", "bits", "states", "wires"), 0.0)
    for operator, phase, spent in events:
        if operator in ("mm", "addmm", "bmm") or "attention" in operator:
            found["kernels"] += spent
        elif operator in ("_to_copy", "all_reduce"):
            found["bits" if operator == "_to_copy" else "wires"] += spent
        else:
            found["states" if phase == "optimizer" else "graph"] += spent
    found["front end"] = seconds - sum(found.values())
    return found


# %% exercise="0.3.1" hint="the chip is idle where no event runs"
def time_by_layer(events, seconds):
    found = dict.fromkeys(("front end", "graph", "kernels", "bits", "states", "wires"), 0.0)
    for operator, phase, spent in events:
        if phase == "optimizer":
            found["states"] += spent
        elif operator in ("mm", "addmm", "bmm") or "attention" in operator:
            found["kernels"] += spent
        else:
            found[{"_to_copy": "bits", "all_reduce": "wires"}.get(operator, "graph")] += spent
    return found


# %% exercise="0.3.1" hint="which operators are matrix products"
def time_by_layer(events, seconds):
    found = dict.fromkeys(("front end", "graph", "kernels", "bits", "states", "wires"), 0.0)
    for operator, phase, spent in events:
        if phase == "optimizer":
            found["states"] += spent
        elif operator in ("mm", "addmm", "attention"):
            found["kernels"] += spent
        else:
            found[{"_to_copy": "bits", "all_reduce": "wires"}.get(operator, "graph")] += spent
    found["front end"] = seconds - sum(found.values())
    return found


# %% exercise="0.3.1" hint="all six layers are in it"
def time_by_layer(events, seconds):
    found = {}
    for operator, phase, spent in events:
        layer = "graph"
        if phase == "optimizer":
            layer = "states"
        elif operator in ("mm", "addmm", "bmm") or "attention" in operator:
            layer = "kernels"
        elif operator == "_to_copy":
            layer = "bits"
        elif operator == "all_reduce":
            layer = "wires"
        found[layer] = found.get(layer, 0.0) + spent
    found["front end"] = seconds - sum(found.values())
    return found


# %% exercise="0.3.2" hint="costs nothing"
def exposed(computing, messages):
    return float(sum(end - start for start, end in messages))


# %% exercise="0.3.2" hint="count only the time in which a message is under way"
def exposed(computing, messages):
    last = max(end for _, end in computing + messages)
    return float(last - sum(end - start for start, end in computing))


# %% exercise="0.3.2" hint="two messages may be under way at once"
def exposed(computing, messages):
    total = 0.0
    for start, end in messages:
        hidden = sum(max(0.0, min(end, b) - max(start, a)) for a, b in computing)
        total += end - start - hidden
    return total


# %% exercise="0.3.2" hint="two computations may run at once"
def exposed(computing, messages):
    edges = sorted({edge for span in messages for edge in span})
    covered = [(a, b) for a, b in pairwise(edges) if any(s <= a < e for s, e in messages)]
    total = 0.0
    for start, end in covered:
        hidden = sum(max(0.0, min(end, b) - max(start, a)) for a, b in computing)
        total += end - start - hidden
    return total


# %% exercise="0.3.3" hint="only where bytes are the limit"
def best_pair(operators, peak, bandwidth):
    return max(range(len(operators) - 1), key=lambda at: operators[at][2])


# %% exercise="0.3.3" hint="it counts twice"
def best_pair(operators, peak, bandwidth):
    def seconds(flops, moved):
        return max(flops / peak, moved / bandwidth)

    def saved(at):
        (f, read, between), (g, taken, written) = operators[at : at + 2]
        fused = seconds(f + g, read + between + taken - between + written)  # still writes it
        return seconds(f, read + between) + seconds(g, taken + written) - fused

    return max(range(len(operators) - 1), key=saved)


# %% exercise="0.3.3" hint="the slowest pair"
def best_pair(operators, peak, bandwidth):
    times = [max(f / peak, (r + w) / bandwidth) for f, r, w in operators]
    return max(range(len(times) - 1), key=lambda at: times[at] + times[at + 1])
