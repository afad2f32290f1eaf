# %% exercise="1.7.1" hint="labels are shifted already"
def response_only(prompt, response, end):
    ids = [*prompt, *response, end]
    return ids, [-100] * len(prompt) + [*response, end]


# %% exercise="1.7.1" hint="also trains the model to write prompts"
def response_only(prompt, response, end):
    ids = [*prompt, *response, end]
    return ids[:-1], ids[1:]


# %% exercise="1.7.1" hint="learn where to stop"
def response_only(prompt, response, end):
    ids = [*prompt, *response]
    return ids[:-1], [-100] * (len(prompt) - 1) + list(response)


# %% exercise="1.7.1" hint="first token of the response is never asked for"
def response_only(prompt, response, end):
    ids = [*prompt, *response, end]
    return ids[:-1], [-100] * len(prompt) + ids[len(prompt) + 1 :]


# %% exercise="1.7.2" hint="bins with many samples weigh more"
def calibration_error(confidence, right, bins: int) -> float:
    place = (confidence * bins).ceil().clamp(min=1)
    gaps = []
    for k in range(1, bins + 1):
        inside = place == k
        if inside.any():
            gaps.append((confidence[inside].mean() - right[inside].float().mean()).abs())
    return float(sum(gaps) / len(gaps))


# %% exercise="1.7.2" hint="gaps of different sign cancel"
def calibration_error(confidence, right, bins: int) -> float:
    return float(abs(confidence.mean() - right.float().mean()))


# %% exercise="1.7.2" hint="never 70% right"
def calibration_error(confidence, right, bins: int) -> float:
    return float((confidence - right.float()).abs().mean())


# %% exercise="1.7.2" hint="a share of samples is missing"
def calibration_error(confidence, right, bins: int) -> float:
    place = (confidence * bins).ceil().clamp(min=1)
    total = 0.0
    for k in range(1, bins + 1):
        inside = place == k
        total += float((confidence[inside] - right[inside].float()).sum().abs())
    return total


# %% exercise="1.7.2" hint="the mean of nothing is not a number"
def calibration_error(confidence, right, bins: int) -> float:
    place = (confidence * bins).ceil().clamp(min=1)
    total = 0.0
    for k in range(1, bins + 1):
        inside = place == k
        gap = confidence[inside].mean() - right[inside].float().mean()
        total += float(inside.float().mean() * gap.abs())
    return total


# %% exercise="1.7.3" hint="scaled before it is added"
def merge(weight, a, b, alpha):
    return weight + b @ a


# %% exercise="1.7.3" hint="alpha alone is not the scale"
def merge(weight, a, b, alpha):
    return weight + alpha * b @ a


# %% exercise="1.7.3" hint="upside down"
def merge(weight, a, b, alpha):
    return weight + len(a) / alpha * b @ a


# %% exercise="1.7.3" hint="leave the base as it is"
def merge(weight, a, b, alpha):
    weight += alpha / len(a) * b @ a
    return weight


# %% exercise="1.7.3" hint="takes another size for r"
def merge(weight, a, b, alpha):
    return weight + alpha / a.shape[1] * b @ a
