# %% [markdown]
# **You will learn** what a diffusion model predicts, and how pure noise becomes the picture that a caption asks for.

# %% tags=["setup"]
import torch
from fmlab.lab import (
    LiveCurve,
    Row,
    Table,
    caption,
    check,
    compare,
    figure,
    predict,
    progress,
    show_source,
    within,
)

# %% tags=["setup"]
torch.set_num_threads(1)  # so small a model loses more to a second thread than it gains


def show(pictures, titles, kind, text, **how):
    """Pictures [b,3,h,w] in [0, 1] in one row."""
    side = min(0.95, 7.2 / len(pictures))
    fig, axes = figure(
        x=[""] * len(pictures), y="", width=side * len(pictures), height=side + 0.25
    )
    for ax, picture, title in zip(axes, pictures, titles, strict=True):
        ax.imshow(picture.permute(1, 2, 0).numpy(), vmin=0, vmax=1)
        ax.set_title(title, fontsize=8, fontweight="normal")
        ax.set_axis_off()
    return caption(fig, kind=kind, text=text, **how)


# %% tags=["setup"]
import math
from types import SimpleNamespace

from fmlab.data.shapes import ShapesDataset, agreement
from fmlab.models import CLIPText, StableDiffusion, UNet, diffusion
from fmlab.models.diffusion import DDIM, DPMSolver2M, Euler, NoiseSchedule, denoise
from fmlab.models.diffusion.clip_tokenizer import CLIPTokenizer
from fmlab.objectives import Denoising
from torch.nn.functional import pixel_shuffle, pixel_unshuffle

# %% [markdown]
# ## 1 · Noise, step by step
# The **forward process** mixes a picture with Gaussian noise. `abar` is what is left of the picture's variance: nearly
# 1 at step 0, nearly 0 at step 999.
#
# $$x_t = \sqrt{\bar\alpha_t}\, x_0 + \sqrt{1 - \bar\alpha_t}\; \varepsilon$$

# %%
sd = NoiseSchedule("scaled_linear")  # Stable Diffusion's
data = ShapesDataset(count=4000, size=16, objects=(1,))
steps = torch.tensor([0, 100, 300, 500, 999])
clean = data.images([3]).expand(5, -1, -1, -1)
noise = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0)).expand(
    5, -1, -1, -1
)
noisy = sd.add_noise(clean, noise, steps)
said = (
    f"{data.captions[3]}. Drawn from -2, black, to 2, white: so its black ground, -1, is grey."
)
show((noisy / 4 + 0.5).clamp(0, 1), [f"t = {t}" for t in steps], "measured", said)

# %%
guess_left = predict(
    "Stable Diffusion: what share of the picture's variance is left at the end?", unit="%"
)
guess_left

# %%
betas = torch.linspace(math.sqrt(0.00085), math.sqrt(0.012), 1000, dtype=torch.float64) ** 2
formula, measured = (100 * float(a[-1]) for a in ((1 - betas).cumprod(0), sd.alphas_cumprod))
compare(
    "abar at step 999", yours=guess_left, formula=formula, measured=measured, unit="%", digits=3
)

# %%
zero = NoiseSchedule("scaled_linear", zero_terminal_snr=True)
fig, ax = figure(x="timestep [steps]", y="signal, root of abar [1]", height=2.2)
for name, one in (
    ("linear", NoiseSchedule("linear")),
    ("scaled linear (SD)", sd),
    ("cosine", NoiseSchedule("cosine")),
    ("SD, zero terminal SNR", zero),
):
    ax.plot(range(0, 1000, 111), one.alphas_cumprod.sqrt()[::111], label=name)
ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
caption(fig, kind="measured", text="Each ends near 0. Only the last ends at 0.")

# %% [markdown]
# The share looks harmless, but its root is 0.068: a faint picture that sampling, which starts from pure noise, never
# has. Section 7 shows the harm. (*SNR*: signal-to-noise ratio.)

# %% [markdown]
# ## 2 · What is predicted?
# The network sees $x_t$ and $t$. It may predict the noise ε, the picture $x_0$, or the **velocity** v: a turn of the
# two by a right angle. Any one of them gives the others.

# %%
show_source(diffusion.prediction.target)

# %%
t = torch.tensor([0, 250, 500, 750, 999])
abar = sd.alphas_cumprod[t]
signal, level = abar.sqrt(), (1 - abar).sqrt()
columns = {
    "signal": [f"{a:.3f}" for a in signal],
    "from ε": [f"{x:.2f}" for x in level / signal],
    "from v": [f"{x:.2f}" for x in level],
    "from x₀": ["1.00"] * 5,
    "noise in v": [f"{100 * a:.0f} %" for a in abar],
}
kinds = dict.fromkeys(columns, "modelled") | {"timestep": "given"}
Table({"timestep": t.tolist()} | columns, kinds=kinds)

# %% [markdown]
# *from*: how an error of the network grows into one of the picture, with ε 15-fold at the end, without bound where the
# signal is 0. So that pair is refused. The last column: the noise's share of v's variance.

# %%
try:
    DDIM(zero, "epsilon")
except ValueError as error:
    print(error)

# %% [markdown]
# ## 3 · A tiny text-to-image model
# Stable Diffusion's three parts, small: a text encoder, a *UNet* (convolutions that shrink and regrow an image) that
# looks at the text by cross-attention, and in place of an autoencoder one that only folds 16x16 pixels into 8x8
# *latents*.


# %%
class Fold(torch.nn.Module):
    """3x16x16 pixels to 12x8x8 latents, and back: nothing is lost, nothing learned."""

    config = SimpleNamespace(latent_channels=12, downscale=2)

    def encode(self, pixels):
        return pixel_unshuffle(pixels, 2)

    def decode(self, latents):
        return pixel_shuffle(latents, 2)


# %%
torch.manual_seed(0)
tokenizer = CLIPTokenizer.train(data.captions[:500], vocab_size=560, max_length=8)
small = dict(
    channels=(32, 64), heads=(2, 2), attention=(False, True), sample_size=8, norm_groups=8
)
unet = UNet.from_preset("unet-tiny", in_channels=12, out_channels=12, **small)
words = dict(vocab_size=tokenizer.vocab_size, eos_token_id=tokenizer.eos, max_positions=8)
text = CLIPText.from_preset("clip-tiny", num_layers=1, **words)
torch.nn.init.normal_(text.blocks[0].tokens.weight)  # words further apart: little time to learn
noisier = NoiseSchedule("linear", zero_terminal_snr=True)
sampler = DDIM(noisier, "x0", spacing="trailing")
model = StableDiffusion(unet, text, Fold(), sampler, tokenizer)
print(f"UNet {unet.num_parameters():,} parameters, text encoder {text.num_parameters():,}")

# %% [markdown]
# The pictures: twelve captions, one large shape in the middle of each. Every picture brings a seed, from which its
# timestep and its noise follow: ranks and resumed runs agree.

# %%
grid = torch.arange(16.0)
lit = (data.images() > 0).any(1).float()
middle = torch.stack([(lit.sum(dim) @ grid) / lit.sum((1, 2)) for dim in (1, 2)])
large = torch.tensor(["small" not in text for text in data.captions])
chosen = (((middle - 7.5).abs() < 1.5).all(0) & large).nonzero().flatten().tolist()
captions = sorted({data.captions[i] for i in chosen})
pictures, ids = data.images(chosen), tokenizer.batch([data.captions[i] for i in chosen])


def batch(step, rows=12):
    pick = torch.randint(len(chosen), (rows,), generator=torch.Generator().manual_seed(step))
    seeds = step * rows + torch.arange(rows)
    return {"pixel_values": pictures[pick], "input_ids": ids[pick], "noise_seed": seeds}


print(f"{len(chosen)} pictures, {len(captions)} captions, such as {captions[0]!r}")

# %% [markdown]
# A training step: add noise, predict, take the squared error. One caption in ten is dropped: the model also learns to
# draw without one. We predict $x_0$, since at small t v is nearly all noise (table above).

# %%
show_source(Denoising, region="step")

# %%
nothing = {"input_ids": tokenizer.batch([""])[0]}
objective = Denoising(noisier, "x0", empty=nothing, encode=model.autoencoder.encode)
STEPS = 500
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.99), fused=True)
rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=STEPS, pct_start=0.1)


def train_step(step):
    term = objective(model, batch(step))["denoising"]
    loss = term.sum / term.count
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    rate.step()
    return loss.item()


# %% tags=["timing"]
with LiveCurve("The error of the predicted picture falls.", y="loss [squared pixel]") as curve:
    losses = []
    for step in range(STEPS):
        losses.append(train_step(step))
        if step % 20 == 19:
            curve.add(step + 1, train=sum(losses[-20:]) / 20)

# %%
plain = (pictures - pictures.mean(0)).square().mean()
print(f"always predicting the mean picture: {plain:.2f}")
within("the network, at the end", sum(losses[-50:]) / 50, below=round(plain.item() / 2, 2))

# %% [markdown]
# ## 4 · From noise to a picture
# Sampling starts from pure noise. At each step the network predicts the picture; the scheduler mixes that picture and
# the noise it implies anew, with a little less noise (DDIM).

# %%
show_source(denoise, region="loop")

# %% tags=["timing"]
seen = []
model.eval().generate(
    ["a red square"], steps=8, guidance=2, on_step=lambda i, x: seen.append(x)
)
kept = torch.cat([model.autoencoder.decode(x) for x in seen])
titles = [f"step {i + 1}" for i in range(8)]
show((kept / 4 + 0.5).clamp(0, 1), titles, "measured", "a red square", noisy=True)

# %% [markdown]
# ## 5 · Guidance, measured
# **Classifier-free guidance** runs the network with and without the caption, and goes further along the difference.
# Since a program can read our pictures back, we can count how many show what was asked.

# %%
show_source(diffusion.guidance.guide)


# %%
asked = captions * 4


def accuracy(scale, steps=5, scheduler=None):
    images = model.generate(asked, steps, scale, seed=1, scheduler=scheduler)
    return 100 * agreement(2 * images - 1, asked)


guess_right = predict("Of 100 pictures drawn with a caption, how many show it?", unit="%")
guess_right

# %% tags=["timing"]
scales = [0, 1, 2, 4, 8]
right = [accuracy(scale) for scale in progress(scales)]
fig, ax = figure(x="guidance scale [1]", y="pictures as asked [%]", width=5, height=2.4)
ax.plot(scales, right, marker="o")
caption(fig, kind="measured", text="Scale 0 ignores the caption, 1 is plain.", noisy=True)

# %%
compare("scale 1", yours=guess_right, measured=right[1], unit="%", noisy=True)

# %% tags=["timing"]
images = model.generate(captions[:6], steps=5, guidance=1)
show(images, [name[2:] for name in captions[:6]], "measured", "No guidance.", noisy=True)

# %%
within("without the caption", right[0], below=25, unit="%")
within("with it", right[1], above=25, unit="%")
within("scale 8, against scale 1", right[-1] - right[1], below=0, unit="points")

# %% [markdown]
# Guessing among twelve captions is right in 8 %. Guidance trades: it exaggerates what the caption changes. Ours reads
# exact captions, and needs little; Stable Diffusion, trained on millions of loose ones, is usually run at 7.5.

# %% [markdown]
# ## 6 · How many steps?
# For data that follow a normal distribution the best prediction and the exact path are formulas. So the error of each
# method is known, not judged by eye.


# %%
def perfect(one, std, kind="epsilon"):
    """What a perfect network predicts for numbers with mean 0 and this deviation."""

    def predict_at(sample, t):
        abar = float(one.alphas_cumprod[int(t[0])])
        image = sample * math.sqrt(abar) * std**2 / (abar * std**2 + 1 - abar)
        implied = diffusion.prediction.noise_from("x0", image, sample, abar)
        return diffusion.prediction.target(kind, image, implied, abar)

    return predict_at


# %%
def path_error(method, steps, std=0.5):
    """Distance from the exact end, where each point keeps its number of deviations."""
    one = NoiseSchedule("cosine")
    scheduler = method(one, "epsilon", spacing="trailing", final="first")
    start = torch.linspace(-2, 2, 9, dtype=torch.float64).reshape(9, 1)
    end = denoise(perfect(one, std), scheduler, steps, start)
    if method is Euler:
        end = end * math.sqrt(scheduler.final_abar)  # its samples are scaled differently
    deviation = [math.sqrt(a * std**2 + 1 - a) for a in (scheduler.final_abar, 0)]
    return float((end - start * deviation[0] / deviation[1]).abs().max())


# %%
guess_order = predict(
    "DPM-Solver with twice the steps: how many times smaller is its error?", unit="x"
)
guess_order

# %%
counts, methods = [20, 40, 80, 160], [DDIM, Euler, DPMSolver2M]
errors = {method.__name__: [path_error(method, n) for n in counts] for method in methods}
fig, ax = figure(x="steps [runs of the network]", y="error [1]", width=5, height=2.2)
wide = {"linewidth": 6, "alpha": 0.4, "markersize": 10}  # seen under Euler's
for name, values in errors.items():
    ax.loglog(counts, values, marker="o", label=name, **(wide if name == "DDIM" else {}))
ax.set_xticks(counts, counts)
ax.tick_params(axis="x", which="minor", labelbottom=False)
ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
text = "Euler lies on DDIM: both halve their error, DPM-Solver quarters it."
caption(fig, kind="measured", text=text)

# %%
twice = {name: values[-2] / values[-1] for name, values in errors.items()}
compare(
    Row("DDIM", formula=2, measured=twice["DDIM"], unit="x", digits=2),
    Row("Euler", formula=2, measured=twice["Euler"], unit="x", digits=2),
    Row(
        "DPM-Solver",
        yours=guess_order,
        formula=4,
        measured=twice["DPMSolver2M"],
        unit="x",
        digits=2,
    ),
)

# %% [markdown]
# Euler is DDIM in other coordinates: the same line. DPM-Solver also uses the prediction of the step before, so its
# error has order 2, at no further run of the network. Is it better on our pictures, too?

# %% tags=["timing"]
few = [1, 2, 4, 8]
found = {
    method.__name__: [accuracy(1, n, method) for n in progress(few, method.__name__)]
    for method in (DDIM, DPMSolver2M)
}
shown = {name: [f"{value:.0f} %" for value in values] for name, values in found.items()}
Table({"steps": few} | shown, kinds=dict.fromkeys(found, "measured") | {"steps": "given"})

# %%
within("one step", found["DDIM"][0], above=20, unit="%")

# %% [markdown]
# Twelve simple captions need hardly a step, and order does not matter. For Stable Diffusion diffusers takes 50 by default.

# %% [markdown]
# ## 7 · A white picture that cannot be drawn
# Take pictures of one brightness each, from black (-2) to white (2). The brightness of 64x64x3 numbers stands out
# of their noise even at step 999, where Stable Diffusion keeps 0.5 %. So the network has learned to read it there.

# %% [markdown]
# But sampling starts from noise without any brightness. What does a *perfect* network draw then?

# %%
guess_spread = predict("Brightness spreads by 1 in the data. By how much in what is drawn?")
guess_spread

# %% [markdown]
# For a perfect network this is a formula: $1/\sqrt{1 + n\,\bar\alpha_T}$, with n numbers a picture. And we can sample:


# %%
def drawn_brightness(one, pictures=400, n=3 * 64 * 64):
    """Mean brightness of pictures drawn by a perfect network; its noise is 1/sqrt(n)."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(pictures, 1, generator=generator, dtype=torch.float64)
    scheduler = DDIM(one, "v", spacing="trailing")
    return denoise(perfect(one, math.sqrt(n), "v"), scheduler, 1000, start) / math.sqrt(n)


# %%
grey, full = drawn_brightness(sd), drawn_brightness(zero)
formula = 1 / math.sqrt(1 + 3 * 64 * 64 * float(sd.alphas_cumprod[-1]))
compare(
    Row(
        "as trained", yours=guess_spread, formula=formula, measured=float(grey.std()), digits=2
    ),
    Row("zero terminal SNR", formula=1, measured=float(full.std()), digits=1),
)

# %%
shades = torch.cat([grey[:6], full[:6]])[:, :, None, None].expand(-1, 3, 4, 4)
names = ["as trained", *[""] * 5, "zero SNR", *[""] * 5]
show(
    (shades / 4 + 0.5).clamp(0, 1).float(),
    names,
    "measured",
    "The same noise, two schedules: grey is 0.",
)

# %% [markdown]
# The remedy: move and scale the signal so that it ends at 0 (exercise 1.6.3), and predict v or $x_0$: ε says nothing
# there.

# %% [markdown]
# ## 8 · What breaks: sampled as what it was not trained for
# Nothing crashes when a network that predicts one thing is sampled as if it predicted another. Which one it is stands
# only in a configuration file, as `prediction_type`.

# %% tags=["timing"]
model.scheduler = DDIM(noisier, "v", spacing="trailing")  # it was trained to predict x0
broken = model.generate(captions[:6], steps=5, guidance=1)
model.scheduler = sampler
show(broken, [name[2:] for name in captions[:6]], "measured", "Read as v.", noisy=True)

# %%
level = noisier.abar(torch.tensor([999]), torch.zeros(1, 1))
read_as_v = diffusion.prediction.clean_from("v", torch.ones(1, 1), torch.zeros(1, 1), level)
print(f"at the last timestep a white pixel (1) is read as {float(read_as_v):.0f}")
print("pictures as asked:", f"{100 * agreement(2 * broken - 1, captions[:6]):.0f} %")

# %% [markdown]
# The number that gives it away: at pure noise v is **minus** the picture. White is read as black.

# %% [markdown]
# ## What production systems do
# Stable Diffusion 1.5 is this notebook, larger: 64x64x4 latents from a trained autoencoder, 77 tokens, guidance 7.5.

# %%
with torch.device("meta"):
    real = StableDiffusion.from_preset("sd-1.5")
parts = {"UNet": real.unet, "text encoder": real.text_encoder, "autoencoder": real.autoencoder}
Table(
    {
        "part": [*parts, "all"],
        "parameters": [*(p.num_parameters() for p in parts.values()), real.num_parameters()],
        "runs a picture": ["2 x 50", "2", "1 (decoder)", ""],
    },
    kinds={"parameters": "measured", "runs a picture": "given"},
)

# %% [markdown]
# `StableDiffusion.from_pretrained(folder)` reads such a checkpoint; our tests compare its latents and pictures with
# diffusers', step by step, on small random weights. The UNet runs a hundred times a picture: half the steps, half the
# time.

# %% [markdown]
# ## Exercises
# ### Exercise 1.6.1 (core): image and noise from v


# %% exercise="1.6.1"
def image_and_noise(
    sample: torch.Tensor, v: torch.Tensor, abar: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x_0 and the noise, from x_t = `sample` and the velocity v at the same level.

    sample = sqrt(abar) · x_0 + sqrt(1 - abar) · noise
    v = sqrt(abar) · noise - sqrt(1 - abar) · x_0
    """
    # BEGIN SOLUTION
    signal, level = math.sqrt(abar), math.sqrt(1 - abar)
    return signal * sample - level * v, level * sample + signal * v
    # END SOLUTION


# %% check="1.6.1"
check("1.6.1", image_and_noise)

# %% [markdown]
# ### Exercise 1.6.2 (core): one step of DDIM


# %% exercise="1.6.2"
def ddim_step(
    sample: torch.Tensor, noise: torch.Tensor, before: float, after: float
) -> torch.Tensor:
    """Return the sample at abar = `after`, from that at abar = `before` and its predicted noise.

    No new noise is drawn.
    """
    # BEGIN SOLUTION
    image = (sample - math.sqrt(1 - before) * noise) / math.sqrt(before)
    return math.sqrt(after) * image + math.sqrt(1 - after) * noise
    # END SOLUTION


# %% check="1.6.2"
check("1.6.2", ddim_step)

# %% [markdown]
# ### Exercise 1.6.3 (optional): no signal at the end


# %% exercise="1.6.3"
def zero_terminal(signal: torch.Tensor) -> torch.Tensor:
    """Return the signal (root of abar, [T]), moved and scaled: last 0, first as before."""
    # BEGIN SOLUTION
    first, last = signal[0], signal[-1]
    return (signal - last) * first / (first - last)
    # END SOLUTION


# %% check="1.6.3"
check("1.6.3", zero_terminal)

# %% [markdown] tags=["reading"]
# ## Further reading
# - Ho et al. 2020, *Denoising Diffusion Probabilistic Models*, sections 2 and 3: the forward process, ε.
# - Salimans and Ho 2022, *Progressive Distillation*, section 4 and appendix D: v.
# - Song et al. 2021, *Denoising Diffusion Implicit Models*, equation 12; Lu et al. 2022, *DPM-Solver++*, algorithm 2.
# - Ho and Salimans 2022, *Classifier-Free Diffusion Guidance*.
# - Lin et al. 2023, *Common Diffusion Noise Schedules and Sample Steps Are Flawed*: zero terminal SNR.
# - Rombach et al. 2022, *High-Resolution Image Synthesis with Latent Diffusion Models*: Stable Diffusion.
