# %% exercise="1.3.1" hint="the head is the embedding"
def count_parameters(layers, width, vocab, positions):
    layer = 12 * width**2 + 13 * width
    return (2 * vocab + positions) * width + layers * layer + 2 * width


# %% exercise="1.3.1" hint="positions"
def count_parameters(layers, width, vocab, positions):
    layer = 12 * width**2 + 13 * width
    return vocab * width + layers * layer + 2 * width


# %% exercise="1.3.1" hint="norm stands at the end"
def count_parameters(layers, width, vocab, positions):
    layer = 12 * width**2 + 13 * width
    return (vocab + positions) * width + layers * layer


# %% exercise="1.3.1" hint="biases and norms"
def count_parameters(layers, width, vocab, positions):
    return (vocab + positions) * width + layers * 12 * width**2


# %% exercise="1.3.2" hint="backward pass"
def training_flops(layers, width, vocab, length):
    return 2 * (12 * layers * width**2 + vocab * width) + 4 * layers * width * length


# %% exercise="1.3.2" hint="the scores are missing"
def training_flops(layers, width, vocab, length):
    return 6 * (12 * layers * width**2 + vocab * width)


# %% exercise="1.3.2" hint="the head is a matrix"
def training_flops(layers, width, vocab, length):
    return 6 * 12 * layers * width**2 + 12 * layers * width * length


# %% exercise="1.3.2" hint="looking up"
def training_flops(layers, width, vocab, length):
    return 6 * (12 * layers * width**2 + 2 * vocab * width) + 12 * layers * width * length


# %% exercise="1.3.2" hint="computes again"
def training_flops(layers, width, vocab, length):
    return 6 * (12 * layers * width**2 + vocab * width) + 14 * layers * width * length


# %% exercise="1.3.3" hint="square root"
def attend(query, keys, values):
    scores = torch.einsum("hk,htk->ht", query, keys)
    return torch.einsum("ht,htk->hk", scores.softmax(-1), values)


# %% exercise="1.3.3" hint="over the cached pieces"
def attend(query, keys, values):
    scores = torch.einsum("hk,htk->ht", query, keys) / query.shape[-1] ** 0.5
    return torch.einsum("ht,htk->hk", scores.softmax(0), values)


# %% exercise="1.3.3" hint="square root"
def attend(query, keys, values):
    scores = torch.einsum("hk,htk->ht", query, keys) / query.shape[-1]
    return torch.einsum("ht,htk->hk", scores.softmax(-1), values)


# %% exercise="1.3.3" hint="softmax is missing"
def attend(query, keys, values):
    scores = torch.einsum("hk,htk->ht", query, keys) / query.shape[-1] ** 0.5
    return torch.einsum("ht,htk->hk", scores, values)
