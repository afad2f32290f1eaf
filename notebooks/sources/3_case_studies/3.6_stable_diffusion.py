# Short runs are made here; the figures of a longer one are committed (fmlab/lab/stable_diffusion_run), with the commands.

# %% [markdown]
# **You will learn** what a text-to-image model is made of, how to train one, and what its UNet asks of a chip.

# %% tags=["setup"]
import torch
from fmlab import Ranks
from fmlab.backends.preflight import preflight, signatures
from fmlab.data.shapes import ShapesDataset
from fmlab.lab import LiveCurve, Row, Table, caption, check, compare, figure, predict

torch.set_num_threads(1)

# %% tags=["setup"]
from fmlab.lab import show_source, stable_diffusion, within
from fmlab.models import AutoencoderKL, UNet
from fmlab.models.diffusion import DDIM, NoiseSchedule, denoise
from fmlab.objectives import Denoising, Reconstruction
from fmlab.parallel import Layout, parity
from fmlab.planner import model_shape, plan
from fmlab.planner.cost import run_cost
from fmlab.train import averages, fine_tune
from fmlab.train.images import recipes

# %% tags=["setup"]
study = stable_diffusion.longer_run()


def show(image, rows, text, kind="measured", width=5.5):
    """A grid of pictures, the name of each row beside it."""
    fig, ax = figure(x="", y="", width=width, height=width * image.shape[0] / image.shape[1])
    ax.imshow(image, interpolation="nearest")
    ax.set_axis_off()
    step = image.shape[0] / len(rows)
    for i, name in enumerate(rows):
        ax.text(-2, step * (i + 0.5), name, ha="right", va="center", fontsize=8)
    return caption(fig, kind=kind, text=text, numbers={"rows": "; ".join(rows)})


# %% [markdown]
# ## 1 · Four parts
# [[1.6]] built the loop of diffusion. Here is the model around it, full size, without its weights. The autoencoder makes
# 48 times fewer numbers of a picture; the **UNet** works on those.

# %%
guess_ratio = predict(
    "Of the time of the UNet's products on an H100, what share is attention?", unit="%"
)
guess_ratio

# %%
one = plan("sd-1.5", chip="h100", global_batch=8, seq_len=77)
times = {line.name: 1e3 * line.value for line in one.time.values()}
products = times["matrix products"] + times["attention"]
Table(
    {"part of a step": list(times), "time": list(times.values())},
    kinds={"time": "modelled"},
    units={"time": "ms"},
    digits=2,
)

# %%
compare(
    "attention, of the time of both",
    yours=guess_ratio,
    formula=100 * times["attention"] / products,
    unit="%",
    digits=2,
)

# %% [markdown]
# Attention is small at 64x64 latents and grows with the fourth power of their side; convolutions and matrices with the
# second. And there is a third line: norms and additions, which move bytes and compute little.

# %% [markdown]
# ## 2 · The autoencoder
# It learns alone and first: to give pictures back through few numbers, with a KL term so small that it only keeps the
# numbers from growing.

# %%
show_source(Reconstruction, region="loss")

# %%
pictures = ShapesDataset(2000, size=16, objects=(1,))


class Pictures:
    """Batches of sixteen pictures, each with the seed of its noise."""

    world_size = 1

    def batch(self, step):
        chosen = [(16 * step + i) % len(pictures) for i in range(16)]
        return {"pixel_values": pictures.images(chosen), "noise_seed": torch.tensor(chosen)}


# %% tags=["timing"]
torch.manual_seed(0)
vae = recipes.quiet(AutoencoderKL.from_preset("vae-nano"))
with LiveCurve("Pictures come back.", y="loss [squared pixel]") as curve:
    losses = fine_tune(
        vae,
        Pictures(),
        Reconstruction(4, 2),
        90,
        lr=4e-3,
        each=lambda step, result: step % 10 or curve.add(step, train=result.loss),
    )

# %%
mean = pictures.images(range(400)).mean(0)
plain = (pictures.images(range(400)) - mean).square().mean().item()
print(f"always the mean picture: {plain:.2f}")
within("the autoencoder, at the end", losses[-1], below=round(0.75 * plain, 2))

# %% [markdown]
# The paper's autoencoder adds a perceptual and an adversarial loss; flat shapes do without. Its error was absolute: on a
# black ground the best guess for most pixels is then black, and ours stayed there for hundreds of steps.

# %% [markdown]
# ## 3 · A longer run
# Two commands of the shell, then a study of what they left, made **once**. Its pictures are 16x16 pixels with one shape,
# shown enlarged: enough to see guidance, samplers and forgetting at work, not how well Stable Diffusion draws.

# %%
print(study["command"])
unet = study["sd"]["sha256"]["model/unet/diffusion_pytorch_model.safetensors"]
print(f"{study['machine']}; the study took {study['seconds of this study']} s")
print(f"weights of the UNet, SHA-256: {unet[:16]}; they are not kept")

# %%
fig, axes = figure(
    x="step [optimizer steps]",
    y=["loss [squared pixel]", "loss [squared v]"],
    title=["autoencoder", "latent diffusion"],
    height=2.4,
)
for ax, name in zip(axes, ("vae", "sd")):
    values = study[name]["losses"]
    ax.plot([25 * (i + 1) for i in range(len(values))], values)
axes[0].set_yscale("log")
said = "Each point is the mean of 25 steps. Measured once, by the commands above."
caption(fig, kind="measured", text=said)

# %% [markdown]
# Does it draw what it is asked? A small **classifier**, trained on real pictures with noise and blur, reads what was
# drawn. Its own accuracy is the upper end; shuffled captions are the lower.

# %%
ends = study["ends"]
Table(
    {
        "pictures": ["real", "real, through the autoencoder", "real, captions shuffled"],
        "read as the caption says": [
            100 * ends[key] for key in ("real", "decoded", "shuffled")
        ],
    },
    kinds={"read as the caption says": "measured"},
    units={"read as the caption says": "%"},
    digits=2,
)

# %% [markdown]
# ## 4 · Guidance and samplers
# One caption in ten was left out in training, so that the model can be pushed along what the caption changes.

# %%
guess_best = predict(
    "Of pictures drawn with the best guidance, how many are read as asked?", unit="%"
)
guess_best

# %%
scales = list(study["guidance"])
right = {
    who: [100 * study["guidance"][scale][who] for scale in scales]
    for who in ("reader", "template")
}
names = {"reader": "classifier", "template": "overlap with a template"}
fig, ax = figure(x="guidance scale [1]", y="as asked [%]", width=5, height=2.3)
for who, values in right.items():
    ax.plot([float(scale) for scale in scales], values, marker="o", label=names[who])
ax.axhline(100 * ends["real"], linestyle=":", label="classifier, real pictures")
ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
caption(
    fig, kind="measured", text="Measured once: 48 pictures at each scale, 10 steps of DDIM."
)

# %%
compare("best guidance", yours=guess_best, measured=max(right["reader"]), unit="%", digits=2)

# %%
asked = ", ".join(study["shown"])
show(
    stable_diffusion.picture("guidance"),
    [f"scale {float(s):g}" for s in scales],
    f"Left to right: {asked}. The same noise in each column.",
)

# %%
counts = list(study["samplers"]["DDIM"])
columns = {
    name: [100 * found[n]["reader"] for n in counts]
    for name, found in study["samplers"].items()
}
Table(
    {"steps": [int(n) for n in counts]} | columns,
    kinds=dict.fromkeys(columns, "measured") | {"steps": "given"},
    units=dict.fromkeys(columns, "%"),
    digits=2,
)

# %%
show(
    stable_diffusion.picture("samplers"),
    list(study["samplers"]),
    "Four steps each, the same noise and captions as above.",
)

# %% [markdown]
# The template is the stricter judge: the classifier always answers something, the template only where half a shape's
# pixels agree. Report which one you asked.

# %% [markdown]
# ## 5 · Brightness that is never drawn
# At the last timestep Stable Diffusion's schedule keeps 0.5 % of the picture. Two small UNets learn flat grey pictures
# whose brightness spreads by 1: one on that schedule, one with **zero terminal SNR**.

# %%
guess_spread = predict(
    "By how much does the brightness of drawn pictures spread, on SD's schedule?"
)
guess_spread


# %%
def small_unet():
    torch.manual_seed(0)
    shape = dict(channels=(16, 16), heads=(1, 1), attention=(False, False), norm_groups=4)
    return UNet.from_preset("unet-tiny", **shape, text_size=4, sample_size=16)


class Grey:
    """Batches of flat pictures, their brightness from the normal distribution; an empty text."""

    world_size = 1

    def batch(self, step):
        shade = torch.randn(16, 1, 1, 1, generator=torch.Generator().manual_seed(step))
        seeds = 16 * step + torch.arange(16)
        text = torch.zeros(16, 1, 4)
        pixels = shade.expand(-1, 3, 16, 16)
        return {"pixel_values": pixels, "encoder_hidden_states": text, "noise_seed": seeds}


# %%
@torch.no_grad()
def drawn(unet, schedule, count=96):
    noise = torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    text = torch.zeros(count, 1, 4)
    scheduler = DDIM(schedule, "v", spacing="trailing")
    return denoise(lambda x, t: unet(x, t, text).sample, scheduler, 10, noise)


# %% tags=["timing"]
schedules = {
    "SD's": NoiseSchedule("scaled_linear"),
    "zero SNR": NoiseSchedule("scaled_linear", zero_terminal_snr=True),
}
shades = {}
for name, schedule in schedules.items():
    unet = small_unet()
    fine_tune(unet, Grey(), Denoising(schedule, "v"), 200, lr=4e-3)
    shades[name] = drawn(unet, schedule).mean((1, 2, 3))

# %%
fig, ax = figure(x="mean brightness [1]", y="pictures [1]", width=5, height=2.2)
ax.hist([shades[name].numpy() for name in shades], bins=12, label=list(shades))
said = "Drawn on SD's schedule, pictures crowd around grey."
caption(fig, kind="measured", text=said, noisy=True)

# %% tags=["timing"]
left = float(schedules["SD's"].alphas_cumprod[-1])
formula = (1 + 3 * 16 * 16 * left) ** -0.5
spread = {name: float(values.std()) for name, values in shades.items()}
within("narrower by a factor of", spread["zero SNR"] / spread["SD's"], above=1.1)
compare(
    Row(
        "SD's",
        yours=guess_spread,
        formula=formula,
        measured=spread["SD's"],
        digits=1,
        noisy=True,
    ),
    Row("zero SNR", formula=1, measured=spread["zero SNR"], digits=1, noisy=True),
)

# %% [markdown]
# The formula is a perfect network's ([[1.6]]); ours learned for 200 steps. With nothing left at the end ε says nothing,
# so zero SNR goes with v, which Stable Diffusion 2.1 predicts.

# %% [markdown]
# ## 6 · A new word
# The longer run never saw a lying bar. Now it sees them in three colours, called "a red x". All weights learn, or updates
# of rank 4 ([[1.7]]), or the vector of "x" alone: **textual inversion**.

# %%
show_source(recipes.learn_word)

# %%
word = study["word"]
keys = ("new word", "new word, unseen colour", "old words")
columns = {key: [100 * found[key] for found in word.values()] for key in keys}
Table(
    {"what learns": list(word)} | columns,
    kinds=dict.fromkeys(columns, "measured"),
    units=dict.fromkeys(columns, "%"),
    digits=2,
)

# %%
show(
    stable_diffusion.picture("word"),
    [name.replace(", old pictures too", " + old") for name in word],
    "Four bars (red, green, blue, yellow), a red circle, a small blue square, a green triangle.",
)

# %% [markdown]
# All weights learn the bar and forget the rest; old pictures in between (DreamBooth's prior preservation) keep it. One
# vector only chooses among what is drawn already. None carries the bar to yellow.

# %% [markdown]
# LoRA lost here, at the one rate and rank that we tried (0.01, 4): attention is a small part of this UNet, and stands only
# where it is 4x4. It is no verdict on LoRA in large models.

# %% [markdown]
# The frozen autoencoder sets a limit of its own. Magenta, red and blue at once, is in none of its pictures:

# %%
blue = ends["blue of magenta, decoded"]
compare("blue of magenta pixels, decoded", formula=1, measured=blue, digits=2)

# %% [markdown]
# It comes back without its blue, as red. No fine-tuning of the UNet can draw what the decoder cannot.

# %% [markdown]
# ## 7 · The chip
# A full-size training step on simulated chips: Stable Diffusion 1.5's UNet, 8 pictures of 512x512, bf16. Our real code
# runs, on shapes alone.

# %%
guess_use = predict("What share of an H100's peak does such a step reach at best?", unit="%")
guess_use

# %% tags=["timing"]
chips = ("h100", "tpu-v5p", "trn2")
steps = {chip: stable_diffusion.chip_step(chip) for chip in chips}

# %%
Table(
    {
        "chip": list(chips),
        "a step": [1e3 * step.seconds for step in steps.values()],
        "of its peak": [100 * step.utilisation for step in steps.values()],
        "memory, fullest": [step.peak_bytes / 2**30 for step in steps.values()],
        "of": [step.capacity / 2**30 for step in steps.values()],
    },
    kinds=dict.fromkeys(("a step", "of its peak", "memory, fullest", "of"), "modelled"),
    units={"a step": "ms", "of its peak": "%", "memory, fullest": "GiB", "of": "GiB"},
    digits=2,
)

# %%
use = 100 * steps["h100"].utilisation
compare("H100, at its full rates", yours=guess_use, formula=use, unit="%", digits=2)

# %% [markdown]
# Upper bounds: every product at the published peak, none of the chips run here. What keeps the H100 from 100 % are norms,
# SiLUs and additions, each a pass through memory; compiled chips join some of them.

# %% [markdown]
# ## 8 · Static shapes
# A service draws 1 to 4 pictures a request, with guidance (two rows a picture) or without, at 512x512 or 768x512.

# %%
guess_programs = predict(
    "How many shapes of the UNet's input does a compiler meet?", unit="shapes"
)
guess_programs


# %%
def requests(pad=None):
    for pictures in (1, 2, 3, 4):
        for rows in (pictures, 2 * pictures):
            for width in (64, 96):
                yield {"sample": torch.empty(pad or rows, 4, 64, width, device="meta")}


counted, padded = signatures(requests()), signatures(requests(pad=8))
compare(
    Row("shapes", yours=guess_programs, formula=6 * 2, measured=counted.compilations, unit="1"),
    Row("padded to 8 rows", formula=2, measured=padded.compilations, unit="1"),
)

# %% [markdown]
# Twelve programs, each compiled for minutes at full size; two with padding, which wastes rows. Guidance as two calls
# (`one_batch=False`) halves the sizes. The last, partial batch of an epoch is one more: drop it.

# %%
with torch.device("meta"):
    model = UNet.from_preset("unet-tiny")
objective = Denoising(NoiseSchedule("scaled_linear"))


def rows(count):
    text = torch.zeros(count, 8, 128)
    pixels = torch.zeros(count, 3, 32, 32)
    return {
        "pixel_values": pixels,
        "encoder_hidden_states": text,
        "noise_seed": torch.arange(count),
    }


def loss(of, batch):
    term = objective(of, batch)["denoising"]
    return term.sum / len(batch["pixel_values"])


# %%
report = preflight(
    UNet.from_preset("unet-tiny"), [rows(4), rows(4), rows(3)], loss, chip="trn2"
)
found = [f for f in report.findings if f.severity != "note"]
for line in sorted({(f.severity, f.check, f.where.partition(":")[0]) for f in found}):
    print("{:8} {:12} {}".format(*line))

# %% [markdown]
# Three faults: float64, in the noise schedule's tables; the partial batch; each picture's noise, drawn on the host from
# its seed, so that all layouts have one loss. On such a chip they belong in the loader.

# %% [markdown]
# ## 9 · Layouts
# Two real ranks train a small UNet for two steps under each layout, and every weight is compared with one device's.

# %%
show_source(stable_diffusion.ready_to_compare)

# %% tags=["timing"]
build = stable_diffusion.ready_to_compare(lambda: UNet.from_preset("unet-tiny"))
layouts = {
    "data": Layout(data=2),
    "ZeRO 1": Layout(data=2, zero=1),
    "fully sharded": Layout(data=2, fsdp=True),
    "pipeline": Layout(pipeline=2, micro_batches=2),
}
with Ranks(2) as ranks:
    reports = {name: parity(build, layout, ranks=ranks) for name, layout in layouts.items()}

# %%
for name, found in reports.items():
    print(f"{name:14} equal to one device: {found.ok}")

# %% [markdown]
# All are right. Which are **wise**? A pipeline sends what later blocks read, and here those are the skips, too.

# %%
guess_cut = predict("Cut in the middle: how many times the stream's bytes are sent?", unit="x")
guess_cut

# %%
places = stable_diffusion.cuts("sd-1.5")
fig, ax = figure(x="cut before block [1]", y="sent [MB a picture]", height=2.4)
block = [cut.block for cut in places]
ax.bar(block, [cut.hidden / 1e6 for cut in places], label="the stream")
ax.bar(
    block,
    [cut.skips / 1e6 for cut in places],
    bottom=[cut.hidden / 1e6 for cut in places],
    label="skips",
)
ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
caption(fig, kind="modelled", text="Bytes in bf16, from the blocks' own reads and writes.")

# %%
middle = places[len(places) // 2]
times_more = (middle.hidden + middle.skips) / middle.hidden
compare("cut in the middle", yours=guess_cut, formula=times_more, unit="x", digits=2)

# %% [markdown]
# The middle has the fewest bytes of stream and the most of skips, and the way back carries as many gradients. With 860
# million parameters the model fits one chip: data parallel with ZeRO 1 needs none of it.

# %% [markdown]
# ## 10 · Days and dollars
# Stable Diffusion 1.3 took 237 thousand steps at 256x256 and 904 thousand at 512x512, 2,048 pictures each (its model card,
# quoted). We plan its UNet on 256 chips.

# %%
guess_days = predict("Days of the UNet on 256 A100s?", unit="days")
guess_days


# %%
def days(chip, host):
    layout = Layout(data=256, zero=1)
    total = 0.0
    for count, size in ((237_000, 32), (904_000, 64)):
        shape = model_shape("sd-1.5", sample_size=size)
        step = plan(shape, chip=chip, host=host, chips=256, layout=layout, **BATCH).step_seconds
        total += count * step
    return run_cost(total, 1, 1, 256, host=host)


BATCH = dict(global_batch=2048, seq_len=77)
hosts = {"a100-80gb": "p4de.24xlarge", "h100": "p5.48xlarge", "trn1": "trn1.32xlarge"}
costs = {chip: days(chip, host) for chip, host in hosts.items()}

# %%
Table(
    {
        "chip": list(costs),
        "days": [cost.days for cost in costs.values()],
        "chip hours": [cost.chip_hours for cost in costs.values()],
        "dollars": [cost.usd for cost in costs.values()],
    },
    kinds=dict.fromkeys(("days", "chip hours", "dollars"), "modelled"),
    digits=2,
)

# %%
a100 = costs["a100-80gb"]
card = "model card of CompVis/stable-diffusion-v1-4"
blog = "MosaicML 2023, Training Stable Diffusion from Scratch Costs <$160k: an estimate"
hours = dict(formula=a100.chip_hours, digits=2)
compare(
    Row("days", yours=guess_days, formula=a100.days, unit="days", digits=2),
    Row("A100 hours, Stable Diffusion 1", **hours, quoted=150_000, source=card),
    Row("A100 hours, Stable Diffusion 2 base", quoted=79_000, source=blog, digits=2),
)

# %% [markdown]
# Far apart, and the plan is the one to doubt: the UNet alone, fused attention, no loader. The run of 2022 also encoded
# pictures and captions at each step. How its hours divide we do not know.

# %% [markdown]
# ## 11 · What breaks: the scale of the latents
# Latents are multiplied by one factor, so that their deviation is 1 as the noise's is. People forget it, apply it twice, or
# take another autoencoder's.

# %% tags=["timing"]
SD_FACTOR = 0.18215
vae.measure_scale(pictures.images(range(256)))
with torch.no_grad():
    latents = vae.encode(pictures.images(range(64)))
compare(
    Row("deviation of latents", formula=1, measured=latents.std().item(), digits=1),
    Row(
        "with another's factor, too",
        formula=SD_FACTOR,
        measured=(SD_FACTOR * latents).std().item(),
        digits=1,
    ),
)

# %% [markdown]
# Nothing crashes; pictures are pale or torn. `fmlab train sd-tiny` refuses latents whose deviation is not near 1. A
# second trap hides in section 9: **a fresh UNet is equal to anything**, since most of its gradients are zero.

# %%
fresh = UNet.from_preset("unet-tiny")
batch = rows(2)
batch["pixel_values"], batch["encoder_hidden_states"] = (
    torch.randn(2, 3, 32, 32),
    torch.randn(2, 8, 128),
)
loss(fresh, batch).backward()
moved = sum(bool(p.grad.any()) for p in fresh.parameters())
compare(
    Row("tensors", measured=len(list(fresh.parameters())), unit="1"),
    Row("with a gradient at the first step", formula=2, measured=moved, unit="1"),
)

# %% [markdown]
# ## What production systems do
# The commands of section 3 resume, write TensorBoard, run on data ranks with ZeRO, and leave a folder that diffusers
# loads. As Stable Diffusion's, the model that is kept is an average of the weights:

# %%
show_source(averages.AveragedAdamW, region="average")

# %% [markdown]
# ## Exercises
# ### Exercise 3.6.1 (core): what a cut sends


# %% exercise="3.6.1"
def sent(blocks: list[tuple[list[str], dict[str, int]]], cut: int) -> int:
    """Return the bytes that a pipeline sends forward where it cuts before blocks[cut].

    A block is (names it reads, {name it writes: bytes}). Sent is each tensor, once, that a block before the
    cut wrote and a block from the cut on reads, unless another one from the cut on has written that name
    anew before. A block reads before it writes. A name that is written twice has its last size.
    """
    # BEGIN SOLUTION
    before = {name: size for _, writes in blocks[:cut] for name, size in writes.items()}
    needed, anew = set(), set()
    for reads, writes in blocks[cut:]:
        needed |= set(reads) - anew
        anew |= set(writes)
    return sum(before[name] for name in needed if name in before)
    # END SOLUTION


# %% check="3.6.1"
check("3.6.1", sent)

# %% [markdown]
# ### Exercise 3.6.2 (core): padded guidance
# A chip has programs for a few batch sizes. Choose them, and what is wasted can be counted.


# %% exercise="3.6.2"
def padding(requests: list[tuple[int, float]], sizes: list[int]) -> tuple[int, float]:
    """Return (programs that run at least once, share of all rows run that are padding).

    A request is (pictures, guidance scale): one row a picture at scale 1, else two. It runs in the smallest
    size that holds all its rows; where none does, in the largest size again and again, and the rest in the
    smallest that holds it.
    """
    # BEGIN SOLUTION
    sizes, used, real, run = sorted(sizes), set(), 0, 0
    for pictures, scale in requests:
        rows = pictures if scale == 1 else 2 * pictures
        real += rows
        while rows > 0:
            size = next((size for size in sizes if size >= rows), sizes[-1])
            used.add(size)
            run += size
            rows -= size
    return len(used), (run - real) / run
    # END SOLUTION


# %% check="3.6.2"
check("3.6.2", padding)

# %% [markdown]
# ### Exercise 3.6.3 (optional): the average of the weights


# %% exercise="3.6.3"
def average(weights: list[float], decay: float) -> float:
    """Return the moving average after all steps; weights[n - 1] is the weight after step n.

    It starts as the weight after step 1. At step n the old average counts min(decay, (1 + n) / (10 + n)).
    """
    # BEGIN SOLUTION
    kept = weights[0]
    for n, weight in enumerate(weights[1:], start=2):
        share = min(decay, (1 + n) / (10 + n))
        kept = share * kept + (1 - share) * weight
    return kept
    # END SOLUTION


# %% check="3.6.3"
check("3.6.3", average)

# %% [markdown] tags=["reading"]
# ## Further reading
# - Rombach et al. 2022, *High-Resolution Image Synthesis with Latent Diffusion Models*, sections 3 and 4, appendix G.
# - Ho and Salimans 2022, *Classifier-Free Diffusion Guidance*, section 3.
# - Lin et al. 2023, *Common Diffusion Noise Schedules and Sample Steps Are Flawed*, sections 3.1 and 3.2.
# - Gal et al. 2022, *An Image is Worth One Word*, section 3.2: textual inversion.
# - Ruiz et al. 2022, *DreamBooth*, sections 3.1 and 3.2: a rare word, prior preservation.
# - Hang et al. 2023, *Efficient Diffusion Training via Min-SNR Weighting Strategy*, section 3.
