# %% exercise="3.3.1" hint="two documents of a row see each other"
def packed_mask(documents, real):
    return real[:, None, :].expand(-1, real.shape[1], -1)


# %% exercise="3.3.1" hint="hidden as a key"
def packed_mask(documents, real):
    return (documents[:, :, None] == documents[:, None, :]) & real[:, :, None]


# %% exercise="3.3.1" hint="both directions"
def packed_mask(documents, real):
    same = (documents[:, :, None] == documents[:, None, :]) & real[:, None, :]
    return same & torch.ones_like(same[0]).tril()


# %% exercise="3.3.1" hint="padding must be hidden too"
def packed_mask(documents, real):
    return documents[:, :, None] == documents[:, None, :]


# %% exercise="3.3.2" hint="temperature squared"
def distil_loss(student, teacher, temperature):
    log_p = (teacher / temperature).log_softmax(-1)
    log_q = (student / temperature).log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1).mean()


# %% exercise="3.3.2" hint="which of the two is the truth"
def distil_loss(student, teacher, temperature):
    log_p = (student / temperature).log_softmax(-1)
    log_q = (teacher / temperature).log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1).mean() * temperature**2


# %% exercise="3.3.2" hint="sum over the vocabulary"
def distil_loss(student, teacher, temperature):
    log_p = (teacher / temperature).log_softmax(-1)
    log_q = (student / temperature).log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).mean() * temperature**2


# %% exercise="3.3.3" hint="length of the weight"
def lamb_step(weight, update, lr, decay):
    return weight - lr * (update + decay * weight)


# %% exercise="3.3.3" hint="before its norm is taken"
def lamb_step(weight, update, lr, decay):
    share = weight.norm() / update.norm() if weight.norm() and update.norm() else 1.0
    return weight - lr * (share * update + decay * weight)


# %% exercise="3.3.3" hint="a share of the WEIGHT"
def lamb_step(weight, update, lr, decay):
    step = update + decay * weight
    return weight - lr * step / step.norm()


# %% exercise="3.3.3" hint="must move too"
def lamb_step(weight, update, lr, decay):
    step = update + decay * weight
    return weight - lr * weight.norm() / step.norm().clamp(min=1e-12) * step
