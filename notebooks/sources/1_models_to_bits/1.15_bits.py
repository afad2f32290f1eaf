# %% [markdown]
# **You will learn** what the bits of a number do, which formats lose a training run, and which tricks save it.

# %% tags=["setup"]
import copy
import math
from dataclasses import replace

import torch
from fmlab import train
from fmlab.data import ByteBPE, load
from fmlab.lab import Row, Table, caption, check, compare, predict, show_source
from fmlab.lab.bits import bits_figure, bits_panel, spacing_figure
from fmlab.models import GPT, GPTConfig
from fmlab.train import TrainConfig, precision
from fmlab.train.precision import FORMATS, NUMBERS, mx_round, round_to, running_sum

# %% [markdown]
# ## 1 · What the bits say
# A number is **sign x 1.mantissa x 2^exponent**. Exponent bits buy range; mantissa bits buy precision. Here is 0.1, which
# no format has:

# %%
names = ["fp32", "tf32", "bf16", "fp16", "fp8-e4m3", "fp8-e5m2", "fp4-e2m1"]
fig, _ = bits_figure(0.1, names)
stored = {name: precision.bits_of(0.1, name).value for name in names}
caption(
    fig, kind="modelled", text="The nearest number of each format.", numbers=stored, digits=6
)

# %% [markdown]
# bf16 is fp32 cut in half: its range, a third of its precision. fp16 went the other way. (E4M3: 4 bits of exponent, 3
# of mantissa.) Everything follows from three numbers of a format:

# %%
some = [FORMATS[name] for name in [*names, "int8"]]
Table(
    {
        "format": [one.name for one in some],
        "bits": [one.bits for one in some],
        "largest": [int(one.max) if one.max < 1e6 else one.max for one in some],
        "smallest": [one.smallest for one in some],
        "step at 1": [one.epsilon for one in some],
    },
    kinds=dict.fromkeys(["bits", "largest", "smallest", "step at 1"], "modelled"),
)

# %%
guess_next = predict("The next bf16 number after 256 is?")
guess_next

# %%
after = torch.tensor(256.0, dtype=torch.bfloat16)
following = (after.view(torch.int16) + 1).view(torch.bfloat16).item()  # the next code
compare("after 256", yours=guess_next, formula=256 * (1 + 2**-7), measured=following)

# %% [markdown]
# There is no 257 in bf16. Between 256 and 512 there are 128 numbers, as between 1 and 2: the gap grows with the number.

# %%
fig, _ = spacing_figure(["fp32", "bf16", "fp16", "fp8-e4m3", "fp8-e5m2"])
text = "Flat: gap over number stays within a factor of two. Rising to the left: subnormals lose it."
caption(fig, kind="modelled", text=text)

# %% [markdown]
# A gradient of 1e-8 does not exist in fp16, nor a 500 in E4M3. (*Subnormals*, below the smallest full exponent, begin
# with 0 instead of 1, and have fewer digits.) Try:

# %%
bits_panel()

# %% [markdown]
# ## 2 · Rounding, and a sum that stands still
# A number inside a gap goes to one of its ends: the **nearest**, or one drawn **by chance**, so that the mean is right. This is
# our code for both:

# %%
show_source(precision.rounding, region="steps")

# %%
x = torch.full((10_000,), 1.003)
for mode in ("nearest", "zero", "stochastic"):
    torch.manual_seed(0)
    ends = round_to(x, "bf16", mode)
    print(f"{mode:10}  {sorted(set(ends.tolist()))}  mean {ends.mean():.4f}")

# %%
casts = [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
random = torch.randint(-(2**31), 2**31, (200_000,)).to(torch.int32).view(torch.float32)
random = random[~random.isnan()]
for dtype in casts:
    cast, keeps = random.to(dtype).float(), dtype == torch.float8_e4m3fn
    ours = round_to(random, dtype, saturate=keeps)
    print(f"{dtype}: {int((ours != cast).sum())} random bit patterns differ from torch's cast")

# %% [markdown]
# (What lies beyond 448 becomes 448 in torch 2.13's cast to E4M3, and not-a-number in torch 2.9's: the standard allows both.)

# %% [markdown]
# Now an example that AWS prints for Trainium: in fp16, start at 1024 and add 0.5, 2,048 times. Exactly, that is 2048.

# %%
guess_sum = predict("fp16, each sum rounded to the nearest number. What comes out?")
guess_sum

# %%
halves = torch.full((2048, 300), 0.5)  # 300 sums beside each other
ends = {}
for name in ("fp16", "bf16"):
    for how in ("nearest", "stochastic", "kahan"):
        dice = torch.Generator().manual_seed(0)
        many = halves if how == "stochastic" else halves[:, :1]
        ends[name, how] = running_sum(many, name, 1024.0, how, dice).double()

# %%
source = "AWS Neuron documentation, Neuron Rounding Modes, Quick Tests (fp16)"
one, exact = int(ends["fp16", "nearest"].item()), int(ends["fp16", "kahan"].item())
by_chance = ends["fp16", "stochastic"]
compare(
    Row("nearest", guess_sum, quoted=1024, measured=one, source=source),
    Row("by chance, mean of 300", formula=2048, measured=round(by_chance.mean().item())),
    Row("by chance, spread", formula=2048**0.5 / 2, measured=by_chance.std().item(), digits=1),
    Row("Kahan", formula=2048, measured=exact),
)

# %% [markdown]
# Above 1024 fp16's numbers are 1 apart: 1024.5 is a tie, and goes to the even 1024. By chance it goes up half of the time. (AWS
# shows one such run: 2056.) In bf16 the gap is 8:

# %%
Table(
    {
        "bf16": ["nearest", "by chance", "Kahan"],
        "mean": [round(v.mean().item()) for (name, _), v in ends.items() if name == "bf16"],
        "spread": [
            0.0 if v.numel() == 1 else v.std().item()
            for (name, _), v in ends.items()
            if name == "bf16"
        ],
    },
    kinds={"mean": "measured", "spread": "measured"},
    digits=3,
)

# %% [markdown]
# **Kahan's sum** keeps what an addition lost in a second number, and adds it next time. Four lines:

# %%
show_source(precision.sums, region="kahan")

# %% [markdown]
# ## 3 · A weight that stands still
# Training is such a sum: a weight, plus thousands of small updates. Take a weight of 1 and AdamW with a learning rate of 0.001,
# 100 steps, always the same gradient.

# %%
guess_weight = predict(
    "The weight is bf16, its AdamW torch's own. Where is it after 100 steps?"
)
guess_weight

# %%
WAYS = ["fp32", "bf16-pure", "bf16-stochastic", "bf16-kahan", "bf16-master"]
ends, size = {}, {}
for name in WAYS:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.ones(1000, 1).to(NUMBERS[name].weights))
    optimizer = NUMBERS[name].optimizer(1e-3, (0.9, 0.95), 0.0)([("w", weight)])
    for _ in range(100):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    ends[name] = weight.detach().float()
    held = [t for t in optimizer.state[weight].values() if t.numel() > 1]
    size[name] = sum(t.nbytes for t in (weight.data, weight.grad, *held)) / 1000

# %%
compare("bf16-pure", yours=guess_weight, formula=0.9, measured=ends["bf16-pure"].mean().item())

# %%
Table(
    {
        "100 steps from 1": WAYS,
        "mean of 1,000 weights": [ends[name].mean().item() for name in WAYS],
        "bytes a parameter": [int(size[name]) for name in WAYS],
    },
    kinds={"mean of 1,000 weights": "measured", "bytes a parameter": "measured"},
    units={"bytes a parameter": "B"},
    digits=2,
)

# %% [markdown]
# Just below 1, bf16 has a gap of 0.0039: an update of 0.001 is less than half of it, and nothing happens, **without an
# error**. Bytes: weight, gradient, moments, and Kahan's lost part or an fp32 *master* copy.

# %%
show_source(precision.RoundedAdamW, region="update")

# %% [markdown]
# ## 4 · Too small for fp16: loss scaling
# fp16 has the mantissa, but not the range. We train a small GPT on Python's manual, and look at what flows back into each of its
# linear layers.

# %% tags=["setup"]
corpus = load("python-docs")
tokenizer = ByteBPE.train_cached(corpus.documents, 512)


def new_model() -> GPT:
    """Two layers of width 64, random weights."""
    torch.manual_seed(0)
    return GPT(GPTConfig(512, 64, 2, 64, 4, init_std=0.06))


base = TrainConfig(steps=40, batch_size=4, seq_len=64, lr=1e-3, log_every=0, eval_every=0)
base = replace(base, backend="cpu")


# %%
class Watch(precision.Scaling):
    """Changes nothing; keeps what it sees."""

    def __init__(self, seen: list):
        super().__init__()
        self.seen = seen

    def forward(self, x, dim):
        self.seen.append(x.flatten())
        return x


# %%
text = "".join(corpus.documents[:20])
rows = torch.tensor(tokenizer.encode(text)[: 16 * 65]).view(16, 65)
seen, others = [], []
model = new_model()
products = precision.Products(lambda: Watch(others), lambda: Watch(others), lambda: Watch(seen))
print(precision.round_products(model, products)[:4])

# %% [markdown]
# GPT-3's smallest model had batches of half a million tokens (Brown et al. 2020, Table 2.1): the loss is a mean over all of them,
# whichever part of the batch runs here.

# %%
loss = model(rows[:, :-1], labels=rows[:, 1:].contiguous()).loss_sum / 500_000
loss.backward()
gradients = torch.cat(seen)
guess_zero = predict("How much of what flows back does fp16 round to zero?", unit="%")
guess_zero


# %%
def lost(fmt: str, scale: float) -> float:
    """The share of the gradients that becomes 0, in percent."""
    return 100 * (round_to(gradients * scale, fmt, saturate=True) == 0).float().mean().item()


formats = ["fp16", "bf16", "fp8-e5m2", "fp8-e4m3"]
scales = {f"x 2^{p}": [lost(name, 2.0**p) for name in formats] for p in (0, 8, 16)}
Table(
    {"becomes 0": formats, **scales},
    kinds=dict.fromkeys(scales, "measured"),
    units=dict.fromkeys(scales, "%"),
    digits=2,
)

# %%
smallest = FORMATS["fp16"].smallest / 2
below = (
    100 * (gradients.abs() <= smallest).float().mean().item()
)  # half of the smallest: nearest is 0
compare("fp16", yours=guess_zero, formula=below, measured=lost("fp16", 1.0), unit="%", digits=2)

# %% [markdown]
# The remedy: multiply the *loss* by 65,536, so that every gradient is; divide them again before the update. Too large a scale
# overflows; so it moves:

# %%
show_source(precision.LossScaler, region="scaler")

# %%
scaler = precision.LossScaler(2.0**16, interval=3)
theirs = torch.amp.GradScaler("cpu", 2.0**16, growth_interval=3)
print("step  gradient  scale after  torch's")
for step, gradient in enumerate([1.0, 1.0, math.inf, 1.0, 1.0, 1.0, math.nan, 1.0]):
    weight = torch.nn.Parameter(torch.ones(1))
    sgd = torch.optim.SGD([weight], 0.1)
    theirs.scale(weight * gradient).backward()
    theirs.step(sgd)
    theirs.update()
    scaler.update(finite=math.isfinite(gradient))
    print(f"{step:4}  {gradient:8}  {scaler.scale:11,.0f}  {theirs.get_scale():7,.0f}")

# %% [markdown]
# ## 5 · Eight bits and less: who shares a scale?
# E4M3 has no room for a tensor's range, so the tensor is scaled to fit. One outlier, and all others fall off the low end.
# The fix is in who shares a scale:

# %%
torch.manual_seed(0)
x = torch.randn(256, 256) * 0.01
x[3, 7] = 3000.0
others = x.abs() < 1
scalings = {
    "the tensor": precision.CurrentScaling("fp8-e4m3"),
    "128 x 128 (DeepSeek-V3, weights)": precision.BlockScaling("fp8-e4m3", (128, 128)),
    "1 x 128 (DeepSeek-V3, activations)": precision.BlockScaling("fp8-e4m3"),
    "1 x 32, a power of two (MXFP8)": precision.MXScaling("mxfp8-e4m3"),
}

# %%
errors = {
    k: ((s(x, 1) - x)[others].norm() / x[others].norm()).item() for k, s in scalings.items()
}
Table(
    {"one scale for": list(errors), "error of all others": [100 * e for e in errors.values()]},
    kinds={"error of all others": "measured"},
    units={"error of all others": "%"},
    digits=2,
)

# %% [markdown]
# **MX** formats go to the end of this road: 32 numbers share one exponent, and a number may have 4 bits. The whole
# conversion:

# %%
show_source(precision.mx, region="mx")

# %%
normal = torch.randn(64, 1024)
off = {}
for name in precision.MX_FORMATS:
    off[name] = 100 * ((mx_round(normal, name) - normal).norm() / normal.norm()).item()
Table(
    {
        "format": list(off),
        "bits a number": [precision.MX_FORMATS[name].bits for name in off],
        "error": list(off.values()),
    },
    kinds={"bits a number": "modelled", "error": "measured"},
    units={"error": "%"},
    digits=3,
)

# %% [markdown]
# A scale from *this* tensor needs two passes over it. **Delayed scaling** uses the largest numbers of earlier steps, and
# saturates when a tensor outgrows them:

# %%
show_source(precision.DelayedScaling, region="delayed")

# %% [markdown]
# ## 6 · Who survives?
# The same GPT, data and seed in several kinds of numbers, 40 steps of the real loop: `TrainConfig(numbers="bf16-kahan")`. Its norms have 320
# gains; all start at 1. With a learning rate of 0.001:

# %%
guess_moved = predict("bf16-pure: how many of the 320 gains have moved after 40 steps?")
guess_moved

# %% tags=["setup"]
LIVE = ["fp32", "bf16-pure", "bf16-stochastic", "bf16-kahan", "bf16-master", "fp8-delayed"]


def trained(name: str):
    """A run of the training loop of fmlab.train, in these numbers."""
    config = replace(base, numbers=name)
    return train.train(config, model=new_model(), tokenizer=tokenizer, corpus=corpus)


def gains_moved(model: GPT) -> int:
    """How many gains of the norms are no longer 1."""
    norms = [m for m in model.modules() if isinstance(m, torch.nn.LayerNorm)]
    return sum(int((norm.weight != 1).sum()) for norm in norms)


# %%
runs = {name: trained(name) for name in LIVE}
moved = {name: gains_moved(run.model) for name, run in runs.items()}
compare(
    Row("bf16-pure", yours=guess_moved, measured=moved["bf16-pure"], unit="gains"),
    Row("fp32", measured=moved["fp32"], unit="gains", noisy=True),
)

# %%
columns = {"numbers": LIVE}
columns["bytes a parameter"] = [NUMBERS[name].bytes_per_parameter() for name in LIVE]
columns["most gains moved"] = [moved[name] > 160 for name in LIVE]
columns["last losses"] = [sum(runs[name].losses[-10:]) / 10 for name in LIVE]
Table(
    columns,
    kinds=dict(zip(list(columns)[1:], ["modelled", "measured", "measured"])),
    units={"bytes a parameter": "B", "last losses": "nats/token"},
    noisy=["last losses"],
)

# %% [markdown]
# After 40 steps the losses hardly differ: matrices have smaller numbers, and finer gaps. Lost updates add up. A longer run, made with
# the config below (a minute each; measured before, and kept here):

# %%
longer = replace(base, steps=150, batch_size=16, lr=3e-3)  # numbers=…
kept = {"fp32": 4.135, "bf16-pure": 4.221, "bf16-stochastic": 4.133, "bf16-kahan": 4.136}
kept |= {"bf16-master": 4.136, "fp16-pure": 105.2, "fp16-unscaled": 4.135, "fp16-scaled": 4.135}
kept |= {"fp8-unscaled": 4.180, "fp8-delayed": 4.131, "mxfp8": 4.139, "mxfp4": 4.172}

# %%
above = [100 * (loss / kept["fp32"] - 1) for loss in kept.values()]
Table(
    {
        "150 steps": list(kept),
        "last losses": list(kept.values()),
        "above fp32": [f"{one:+.2f} %" for one in above],
        "within 0.5 %": [one < 0.5 for one in above],
    },
    kinds={"last losses": "measured", "above fp32": "measured"},
    units={"last losses": "nats/token"},
    digits=4,
)

# %% [markdown]
# **fp16-pure** is lost: squares of small gradients are 0, and AdamW divides by their root. **bf16-pure** falls behind. **fp8
# without a scale** and **mxfp4** compute too coarsely. The others follow fp32 to a fifth of a percent.

# %% [markdown]
# One seed, and the clearest of five settings tried. In the four others **bf16-pure** was 0.06 to 1.2 % above fp32, and fp8
# without a scale sometimes not at all: short runs decide little, so measure your own.

# %% [markdown]
# fp16 without scaling survives here: a batch of 1,024 tokens has gradients hundreds of times larger than section 4's. And 8-bit ways save
# what products read, not these bytes.

# %% [markdown]
# ## 7 · Few bits for inference
# A trained model only needs its weights read. int8: one scale a row. int4: two numbers share a byte, and 32 share a scale.

# %%
show_source(precision.quantised, region="quantise")

# %%
guess_bits = predict(
    "int4, one fp32 scale for 32 weights: how many bits a weight?", unit="bits"
)
guess_bits


# %%
def perplexity(model: GPT) -> float:
    """On text kept for validation: exp of the mean loss of 32 x 64 tokens."""
    held_out = "".join(corpus.split(0.05)[1].documents)[:20_000]
    ids = torch.tensor(tokenizer.encode(held_out)[: 32 * 65]).view(-1, 65)
    with torch.no_grad():
        loss = model(ids[:, :-1], labels=ids[:, 1:].contiguous()).loss_sum
    return math.exp(loss.item() / ids[:, 1:].numel())


# %%
whole, rows = runs["fp32"].model, {}
for name, settings in {
    "int8, a row": (8, None),
    "int4, a row": (4, None),
    "int4, 32": (4, 32),
}.items():
    small = copy.deepcopy(whole)
    report = precision.quantise_weights(small, *settings)
    layer = small.get_submodule("blocks.1.mlp.up")
    bits = 8 * (layer.codes.nbytes + layer.scales.nbytes) / layer.weight.numel()
    rows[name] = (bits, report.after / report.before, 100 * report.error, perplexity(small))
compare(
    "int4, 32", yours=guess_bits, formula=4 + 32 / 32, measured=rows["int4, 32"][0], unit="bits"
)

# %%
before = perplexity(whole)
named = ["bits a weight", "bytes of the model", "error of weights", "perplexity"]
columns = {name: [row[at] for row in rows.values()] for at, name in enumerate(named)}
columns["perplexity"] = [100 * (one / before - 1) for one in columns["perplexity"]]
Table(
    {"one scale for": list(rows), **columns},
    kinds=dict.fromkeys(named, "measured"),
    units=dict(zip(named, ["bits", "of fp32", "%", "% above fp32"])),
    noisy=["perplexity"],
    digits=2,
)

# %% [markdown]
# ## 8 · What production does
# - **TPU**: products of bf16, sums in fp32; subnormals become 0 (Google Cloud, *Improve your model's performance with bfloat16*).
# - **Trainium**: bf16 with stochastic rounding in hardware, `NEURON_RT_STOCHASTIC_ROUNDING_EN=1` (AWS Neuron documentation).

# %% [markdown]
# - **torchao**: optimizers that round bf16 weights by chance (torchao/optim).
# - **Transformer Engine**: E4M3 forward, E5M2 backward; scales delayed over 1,024 steps, current, in blocks, or MXFP8 (its user guide, *Common API*).

# %% [markdown]
# - **DeepSeek-V3**: E4M3 everywhere, tiles of 1 x 128 and 128 x 128; fp32 master weights, bf16 moments (arXiv:2412.19437, section 3.3).
# - **MXFP8 over 15T tokens**: block scales rounded *up*; the specification's rule could diverge (arXiv:2506.08027).

# %% [markdown]
# ## 9 · What breaks
# Five lines that run without an error. Each has a number that gives it away.

# %%
bf16 = torch.bfloat16
logits = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)) * 20
labels = torch.zeros(64, dtype=torch.long)
steps = torch.nn.functional.cross_entropy(logits.to(bf16), labels, reduction="none")
mean = torch.zeros((), dtype=bf16)
for _ in range(1000):
    mean += torch.tensor(4.0, dtype=bf16)  # a loss of 4.0, added up over 1,000 micro-batches
mask = torch.full((1, 4), -1e9).half() + torch.zeros(1, 4).half()

# %%
broken = {
    "losses of bf16 logits that are multiples of 1/16": (steps % 0.0625 == 0).float().mean(),
    "1,000 losses of 4.0 added in bf16, mean": mean.item() / 1000,
    "AdamW's epsilon of 1e-8 in fp16": torch.tensor(1e-8).half().item(),
    "softmax of a row masked by -1e9 in fp16": torch.softmax(mask, -1)[0, 0].item(),
    "a gradient of 1, unscaled after its scale grew": 1.0 * 2**16 / 2**17,
}
Table(
    {"line": list(broken), "gives": [float(v) for v in broken.values()]},
    kinds={"gives": "measured"},
)

# %% [markdown]
# Right: any loss, so next to 0; 4; 1e-8; 0.25; 1. The cures: fp32 for logits, sums and moments; masks made for their type; unscale by the scale of
# *this* backward pass. Our loop has a test for each.

# %% [markdown]
# ## Exercises
# ### Exercise 1.15.1 (core): find the rounding bug
# You are handed roundings to bf16, as another team would ship them. Write the search that convicts each, or acquits it.


# %% exercise="1.15.1"
def find_bug(rounding) -> float:
    """Return a finite fp32 number that is not rounded to the nearest bf16 number, ties to even.

    rounding: takes an fp32 tensor [n] and returns an fp32 tensor [n] of bf16 numbers.
    x.bfloat16().float() is right for every x. What is larger than the largest bf16 number
    rounds to infinity. Return math.nan if the rounding is right wherever you look; one of those
    that you get is.
    """
    # BEGIN SOLUTION
    bits = torch.randint(-(2**31), 2**31, (200_000,)).to(torch.int32)
    ties = (
        bits & -65536
    ) | 0x8000  # in the middle of a gap, of either sign, subnormal ones too
    edges = torch.tensor([3.4e38, -3.4e38, 1e-40, -1e-40])
    x = torch.cat([torch.cat([bits, ties]).view(torch.float32), edges])
    x = x[x.isfinite()]
    wrong = x[rounding(x) != x.bfloat16().float()]
    return wrong[0].item() if len(wrong) else math.nan
    # END SOLUTION


# %% check="1.15.1"
check("1.15.1", find_bug)

# %% [markdown]
# ### Exercise 1.15.2 (core): round by chance, with integers
# As hardware does it: a bf16 number is the upper half of an fp32 number's bits.


# %% exercise="1.15.2"
def stochastic_bf16(x: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Round fp32 numbers x [n] to bf16 by chance; return them in bfloat16 or float32.

    draws: int32 [n], each from 0 to 65535 with the same chance. The result is one of the two
    bf16 numbers around x, and its mean over all draws is x exactly. x.view(torch.int32) shows
    the bits.
    """
    # BEGIN SOLUTION
    # the carry of low half + draw reaches the upper half with probability low half / 65536
    bits = (x.view(torch.int32) + draws) & -65536
    return bits.view(torch.float32).bfloat16()
    # END SOLUTION


# %% check="1.15.2"
check("1.15.2", stochastic_bf16)

# %% [markdown]
# ### Exercise 1.15.3 (optional): a block that shares its scale
# One block of a Microscaling format.


# %% exercise="1.15.3"
def mx_block(block: torch.Tensor, max_exponent: int, round_element) -> torch.Tensor:
    """Round 32 numbers to an MX format (OCP MX v1.0, section 6.3); return them as fp32.

    The scale is a power of two: floor(log2 of the largest size) minus max_exponent, the
    exponent of the element format's largest number. Elements are the numbers divided by the
    scale, rounded by round_element (which saturates); the result is elements times scale. A
    block of zeros stays zero.
    """
    # BEGIN SOLUTION
    largest = block.abs().max().item()
    if largest == 0:
        return block
    scale = 2.0 ** (math.floor(math.log2(largest)) - max_exponent)
    return round_element(block / scale) * scale
    # END SOLUTION


# %% check="1.15.3"
check("1.15.3", mx_block)

# %% [markdown] tags=["reading"]
# ## Further reading
# - Micikevicius et al. 2017, arXiv:1710.03740, section 3: master weights and loss scaling.
# - Kalamkar et al. 2019, arXiv:1905.12322: bfloat16 for training.
# - Zamirai et al. 2020, arXiv:2010.06192, sections 3 and 4: stochastic rounding and Kahan for bf16 weights.
# - Micikevicius et al. 2022, arXiv:2209.05433, sections 3 and 4: fp8.
# - OCP Microscaling Formats (MX) Specification v1.0, sections 5 and 6.
# - DeepSeek-AI 2024, arXiv:2412.19437, section 3.3: fp8 in tiles.
# - Frantar et al. 2022, arXiv:2210.17323: weights in 4 bits.
# - docs/precision.md: every format and way to train here.
