# %% exercise="1.4.1" hint="not moved"
def decoder_inputs(labels, start=0):
    return labels.masked_fill(labels == -100, start)


# %% exercise="1.4.1" hint="no piece has the number -100"
def decoder_inputs(labels, start=0):
    return torch.cat([torch.full_like(labels[:, :1], start), labels[:, :-1]], 1)


# %% exercise="1.4.1" hint="wrong way"
def decoder_inputs(labels, start=0):
    moved = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], start)], 1)
    return moved.masked_fill(moved == -100, start)


# %% exercise="1.4.1" hint="`start` is not always 0"
def decoder_inputs(labels, start=0):
    moved = torch.cat([torch.zeros_like(labels[:, :1]), labels[:, :-1]], 1)
    return moved.masked_fill(moved == -100, 0)


# %% exercise="1.4.1" hint="as long as the labels"
def decoder_inputs(labels, start=0):
    moved = torch.cat([torch.full_like(labels[:, :1], start), labels], 1)
    return moved.masked_fill(moved == -100, start)


# %% exercise="1.4.1" hint="changed the labels themselves"
def decoder_inputs(labels, start=0):
    labels[:, 1:] = labels[:, :-1].clone()
    labels[:, 0] = start
    return labels.masked_fill_(labels == -100, start)


# %% exercise="1.4.2" hint="which span is which"
def corrupt(tokens, spans):
    shown, target, at = [], [], 0
    for i, (first, stop) in enumerate(spans):
        shown += [*tokens[at:first], f"<{i}>"]
        target += tokens[first:stop]
        at = stop
    return [*shown, *tokens[at:], "</s>"], [*target, "</s>"]


# %% exercise="1.4.2" hint="one sentinel a span"
def corrupt(tokens, spans):
    shown, target, at = [], [], 0
    for i, (first, stop) in enumerate(spans):
        shown += [*tokens[at:first], *[f"<{i}>"] * (stop - first)]
        target += [f"<{i}>", *tokens[first:stop]]
        at = stop
    return [*shown, *tokens[at:], "</s>"], [*target, "</s>"]


# %% exercise="1.4.2" hint="numbered"
def corrupt(tokens, spans):
    shown, target, at = [], [], 0
    for first, stop in spans:
        shown += [*tokens[at:first], "<0>"]
        target += ["<0>", *tokens[first:stop]]
        at = stop
    return [*shown, *tokens[at:], "</s>"], [*target, "</s>"]


# %% exercise="1.4.2" hint="both end with </s>"
def corrupt(tokens, spans):
    shown, target, at = [], [], 0
    for i, (first, stop) in enumerate(spans):
        shown += [*tokens[at:first], f"<{i}>"]
        target += [f"<{i}>", *tokens[first:stop]]
        at = stop
    return [*shown, *tokens[at:]], target


# %% exercise="1.4.2" hint="after the last span"
def corrupt(tokens, spans):
    shown, target, at = [], [], 0
    for i, (first, stop) in enumerate(spans):
        shown += [*tokens[at:first], f"<{i}>"]
        target += [f"<{i}>", *tokens[first:stop]]
        at = stop
    return [*shown, "</s>"], [*target, "</s>"]


# %% exercise="1.4.2" hint="stop is exclusive"
def corrupt(tokens, spans):
    shown, target, at = [], [], 0
    for i, (first, stop) in enumerate(spans):
        shown += [*tokens[at:first], f"<{i}>"]
        target += [f"<{i}>", *tokens[first : stop + 1]]
        at = stop + 1
    return [*shown, *tokens[at:], "</s>"], [*target, "</s>"]


# %% exercise="1.4.2" hint="what stands between two spans stays"
def corrupt(tokens, spans):
    shown, target = [], []
    for i, (first, stop) in enumerate(spans):
        shown += [f"<{i}>"]
        target += [f"<{i}>", *tokens[first:stop]]
    return [*shown, *tokens[spans[-1][1] :], "</s>"], [*target, "</s>"]


# %% exercise="1.4.3" hint="both ways"
def prefix_mask(length, prefix):
    return torch.ones(length, length, dtype=torch.bool).tril()


# %% exercise="1.4.3" hint="what it must write"
def prefix_mask(length, prefix):
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    mask[:prefix] = True
    return mask


# %% exercise="1.4.3" hint="rows are queries"
def prefix_mask(length, prefix):
    mask = torch.ones(length, length, dtype=torch.bool).triu()
    mask[:prefix, :prefix] = True
    return mask


# %% exercise="1.4.3" hint="may look at itself"
def prefix_mask(length, prefix):
    mask = torch.ones(length, length, dtype=torch.bool).tril(-1)
    mask[:prefix, :prefix] = True
    return mask
