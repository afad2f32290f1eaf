# %% exercise="0.1.1" hint="the same piece"
def next_pieces(ids):
    return list(ids)


# %% exercise="0.1.1" hint="came before"
def next_pieces(ids):
    return [-100, *ids[:-1]]


# %% exercise="0.1.1" hint="one label for each piece"
def next_pieces(ids):
    return ids[1:]


# %% exercise="0.1.1" hint="nothing follows the last piece"
def next_pieces(ids):
    return [*ids[1:], ids[0]] if ids else []


# %% exercise="0.1.1" hint="without pieces"
def next_pieces(ids):
    return [*ids[1:], -100]


# %% exercise="0.1.2" hint="read more than once"
def rows_of_rank(rows, rank, ranks):
    return list(range(rows))


# %% exercise="0.1.2" hint="never read"
def rows_of_rank(rows, rank, ranks):
    share = rows // ranks
    return list(range(rank * share, (rank + 1) * share))


# %% exercise="0.1.2" hint="two rows more"
def rows_of_rank(rows, rank, ranks):
    share = rows // ranks
    return list(range(rank * share, rows if rank == ranks - 1 else (rank + 1) * share))


# %% exercise="0.1.2" hint="read more than once"
def rows_of_rank(rows, rank, ranks):
    share = rows // ranks
    return list(range(rank * share, min(rows, (rank + 1) * share + 1)))


# %% exercise="0.1.3" hint="add up to 1"
def top_k_probabilities(logits, k, temperature):
    chance = (logits / temperature).softmax(0)
    top = chance.topk(k)
    return torch.zeros_like(logits).scatter(0, top.indices, top.values)


# %% exercise="0.1.3" hint="temperature"
def top_k_probabilities(logits, k, temperature):
    top = logits.topk(k)
    return torch.zeros_like(logits).scatter(0, top.indices, top.values.softmax(0))


# %% exercise="0.1.3" hint="more than k"
def top_k_probabilities(logits, k, temperature):
    return (logits / temperature).softmax(0)


# %% exercise="0.1.3" hint="temperature"
def top_k_probabilities(logits, k, temperature):
    top = (logits * temperature).topk(k)
    return torch.zeros_like(logits).scatter(0, top.indices, top.values.softmax(0))
