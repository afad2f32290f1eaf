# %% exercise="1.5.1" hint="what stands where in one patch"
def cut(images, patch):
    b, c, h, w = images.shape
    if h % patch or w % patch:
        raise ValueError
    grid = images.reshape(b, c, h // patch, patch, w // patch, patch)
    return grid.permute(0, 2, 4, 3, 5, 1).reshape(b, -1, c * patch * patch)


# %% exercise="1.5.1" hint="left to right first"
def cut(images, patch):
    b, c, h, w = images.shape
    if h % patch or w % patch:
        raise ValueError
    grid = images.reshape(b, c, h // patch, patch, w // patch, patch)
    return grid.permute(0, 4, 2, 1, 3, 5).reshape(b, -1, c * patch * patch)


# %% exercise="1.5.1" hint="a reshape alone"
def cut(images, patch):
    b, c, h, w = images.shape
    if h % patch or w % patch:
        raise ValueError
    return images.reshape(b, -1, c * patch * patch)


# %% exercise="1.5.1" hint="does not divide"
def cut(images, patch):
    return torch.nn.functional.unfold(images, patch, stride=patch).mT


# %% exercise="1.5.2" hint="the other direction"
def contrastive_loss(images, texts, scale):
    images, texts = (x / x.norm(dim=-1, keepdim=True) for x in (images, texts))
    logits = scale * images @ texts.T
    return torch.nn.functional.cross_entropy(logits, torch.arange(len(logits)))


# %% exercise="1.5.2" hint="of length 1"
def contrastive_loss(images, texts, scale):
    logits = scale * images @ texts.T
    target = torch.arange(len(logits))
    return sum(torch.nn.functional.cross_entropy(x, target) for x in (logits, logits.T)) / 2


# %% exercise="1.5.2" hint="average of both directions"
def contrastive_loss(images, texts, scale):
    images, texts = (x / x.norm(dim=-1, keepdim=True) for x in (images, texts))
    logits = scale * images @ texts.T
    target = torch.arange(len(logits))
    return sum(torch.nn.functional.cross_entropy(x, target) for x in (logits, logits.T))


# %% exercise="1.5.2" hint="multiplies the products"
def contrastive_loss(images, texts, scale):
    images, texts = (x / x.norm(dim=-1, keepdim=True) for x in (images, texts))
    logits = images @ texts.T / scale
    target = torch.arange(len(logits))
    return sum(torch.nn.functional.cross_entropy(x, target) for x in (logits, logits.T)) / 2


# %% exercise="1.5.3" hint="what the others make of your rows"
def gather_backward(gradients, sizes, rank):
    first = sum(sizes[:rank])
    return gradients[rank][first : first + sizes[rank]]


# %% exercise="1.5.3" hint="a sum of losses"
def gather_backward(gradients, sizes, rank):
    first = sum(sizes[:rank])
    return (sum(gradients) / len(gradients))[first : first + sizes[rank]]


# %% exercise="1.5.3" hint="where your rows begin"
def gather_backward(gradients, sizes, rank):
    first = rank * sizes[rank]
    return sum(gradients)[first : first + sizes[rank]]
