# %% exercise="1.6.1" hint="square root"
def image_and_noise(sample, v, abar):
    return abar * sample - (1 - abar) * v, (1 - abar) * sample + abar * v


# %% exercise="1.6.1" hint="the image comes first"
def image_and_noise(sample, v, abar):
    signal, level = abar**0.5, (1 - abar) ** 0.5
    return level * sample + signal * v, signal * sample - level * v


# %% exercise="1.6.1" hint="signal and noise level are swapped"
def image_and_noise(sample, v, abar):
    signal, level = abar**0.5, (1 - abar) ** 0.5
    return level * sample - signal * v, signal * sample + level * v


# %% exercise="1.6.1" hint="mind the sign"
def image_and_noise(sample, v, abar):
    signal, level = abar**0.5, (1 - abar) ** 0.5
    return signal * sample - level * v, level * sample - signal * v


# %% exercise="1.6.1" hint="two unknowns"
def image_and_noise(sample, v, abar):
    signal, level = abar**0.5, (1 - abar) ** 0.5
    return signal * sample + level * v, level * sample + signal * v


# %% exercise="1.6.2" hint="that is the predicted image"
def ddim_step(sample, noise, before, after):
    return (sample - (1 - before) ** 0.5 * noise) / before**0.5


# %% exercise="1.6.2" hint="the noise of the new level is missing"
def ddim_step(sample, noise, before, after):
    return after**0.5 * (sample - (1 - before) ** 0.5 * noise) / before**0.5


# %% exercise="1.6.2" hint="the old level of noise"
def ddim_step(sample, noise, before, after):
    clean = (sample - (1 - before) ** 0.5 * noise) / before**0.5
    return after**0.5 * clean + (1 - before) ** 0.5 * noise


# %% exercise="1.6.2" hint="share of the variance"
def ddim_step(sample, noise, before, after):
    clean = (sample - (1 - before) ** 0.5 * noise) / before**0.5
    return after * clean + (1 - after) * noise


# %% exercise="1.6.2" hint="has the level `before`"
def ddim_step(sample, noise, before, after):
    clean = (sample - (1 - after) ** 0.5 * noise) / after**0.5
    return after**0.5 * clean + (1 - after) ** 0.5 * noise


# %% exercise="1.6.3" hint="the last must be exactly 0"
def zero_terminal(signal):
    return signal * signal[0] / (signal[0] - signal[-1])


# %% exercise="1.6.3" hint="the first has moved"
def zero_terminal(signal):
    return signal - signal[-1]


# %% exercise="1.6.3" hint="only the last has changed"
def zero_terminal(signal):
    signal[-1] = 0
    return signal


# %% exercise="1.6.3" hint="not on its square"
def zero_terminal(signal):
    abar = signal**2
    return ((abar - abar[-1]) * abar[0] / (abar[0] - abar[-1])) ** 0.5
