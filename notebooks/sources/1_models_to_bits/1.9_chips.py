# %% [markdown]
# **You will learn** what bounds an operation, from two numbers of a chip and two of the operation.

# %% tags=["setup"]
import json
import math
import tempfile
from collections import Counter
from pathlib import Path

import torch
from fmlab import meter
from fmlab.chips import Roofline, chip, host
from fmlab.lab import Row, Table, caption, check, compare, figure, predict, show_source
from fmlab.lab.roofline import attention, linear, on_roofline, operations, pointwise
from fmlab.lab.trace import own_seconds, read_trace
from fmlab.models import BERT, GPT, UNet
from torch.nn import functional as F

# %% [markdown]
# ## 1 · Two numbers of a chip
# A TPU or Trainium is a **matrix unit** (a grid of multiply-adds, 128 x 128 or larger), **vector units** for the rest, and
# on-chip memory that the **compiler** fills. GPUs have many small units, and caches that fill themselves.

# %% [markdown]
# Each does at most so many FLOPs a second, and moves at most so many bytes a second to and from its memory, the HBM
# (high-bandwidth memory). Here they are for an H100, each with its convention and source:

# %%
h100 = chip("h100")
for name in ("peak.bf16", "achievable.bf16", "memory", "memory_bandwidth"):
    one = h100.figure(name)
    print(f"{name:18} {one.value:g} {one.unit}, {one.convention}\n{'':18} {one.source}")

# %% [markdown]
# An operation overlaps the two at best, so it takes at least the longer of two times. Where both are equal lies the
# **ridge**.

# %%
show_source(Roofline.seconds)

# %%
guess_ridge = predict(
    "989 TFLOP/s, and 3.35 TB/s. How many FLOPs must be done with each byte to keep an H100 computing?",
    unit="FLOP/B",
)
guess_ridge

# %%
compare("ridge of an H100", yours=guess_ridge, formula=989e12 / 3.35e12, unit="FLOP/B")

# %%
NAMES = {"A100 80 GB": "a100-80gb", "H100": "h100", "TPU v5p": "tpu-v5p", "TPU v6e": "tpu-v6e"}
NAMES |= {"Trainium": "trn1", "Trainium2": "trn2", "MI300X": "mi300x"}
some = [chip(key) for key in NAMES.values()]
Table(
    {
        "chip": list(NAMES),
        "bf16, dense": [round(one.peak_flops("bf16") / 1e12) for one in some],
        "memory bandwidth": [one.memory_bandwidth / 1e12 for one in some],
        "ridge": [one.roofline("bf16").ridge for one in some],
    },
    kinds={"bf16, dense": "quoted", "memory bandwidth": "quoted", "ridge": "modelled"},
    units={"bf16, dense": "TFLOP/s", "memory bandwidth": "TB/s", "ridge": "FLOP/B"},
    source="the makers' documents and ml-engineering, one by one in docs/chips.md",
)

# %% [markdown]
# ## 2 · This machine beside them
# The same two numbers can be measured: a large matrix product, and an array of 128 MiB that is read.

# %% tags=["timing"]
here = meter.measure_chip(repeats=20)
compare(
    Row("fp32", measured=here.peak_flops("fp32") / 1e9, unit="GFLOP/s", noisy=True),
    Row("bf16", measured=here.peak_flops("bf16") / 1e9, unit="GFLOP/s", noisy=True),
    Row("memory, read", measured=here.memory_bandwidth / 1e9, unit="GB/s", noisy=True),
    Row("ridge in fp32", measured=here.roofline("fp32").ridge, unit="FLOP/B", noisy=True),
)

# %% [markdown]
# Is bf16 many times as fast as fp32 here? Then this CPU has a matrix unit of its own (AMX, on newer Intel Xeons), which
# takes bf16 alone; fp32 goes through vector units.

# %%
from fmlab.lab import roofline_figure, roofline_panel

roofs = {name: chip(NAMES[name]).roofline("bf16") for name in ("H100", "TPU v5p", "Trainium2")}
roofs["this machine, fp32"] = here.roofline("fp32")
fig, _ = roofline_figure(roofs, title="Four rooflines")
text = "Three chips from published figures, this machine as measured. Dots are ridges."
numbers = {name: round(roof.ridge) for name, roof in roofs.items() if "machine" not in name}
source = "ml-engineering (H100), Google (TPU v5p), AWS (Trainium2): docs/chips.md"
caption(fig, kind="quoted", text=text, source=source, numbers=numbers)

# %% [markdown]
# Read it from the left: an operation with few FLOPs a byte climbs the slope, where only memory counts. Right of the ridge
# only arithmetic counts.

# %% [markdown]
# ## 3 · Two numbers of an operation
# A linear layer of width d on n tokens does $2nd^2$ FLOPs. It reads $d^2$ weights and $nd$ inputs and writes $nd$ outputs.

# %%
guess_intensity = predict(
    "d = 4096, n = 64, two bytes a number. How many FLOPs a byte?", unit="FLOP/B"
)
guess_intensity

# %% [markdown]
# We do not trust the formula: we run the layer on PyTorch's `meta` device, which has shapes but no numbers, and count what
# its operator does.

# %%
D = 4096
with torch.device("meta"):
    layer = torch.nn.Linear(D, D, bias=False, dtype=torch.bfloat16)
    tokens = torch.empty(64, D, dtype=torch.bfloat16)
(one,) = operations(lambda: layer(tokens))
flops, nbytes = linear(64, D, D)
compare(
    Row("FLOPs", formula=flops, measured=one.flops, unit="FLOP"),
    Row("bytes", formula=nbytes, measured=one.bytes, unit="B"),
    Row("intensity", guess_intensity, flops / nbytes, one.flops / one.bytes, unit="FLOP/B"),
)

# %% [markdown]
# About one FLOP a byte for each token, until the tokens themselves weigh as much as the weights.

# %%
from fmlab.planner.hardware import hardware

batches = [1, 64, 256, 512, 4096]
roof, fitted = h100.roofline("bf16"), hardware("h100")
work = [linear(n, D, D) for n in batches]
columns = {
    "intensity": [f / b for f, b in work],
    "least time": [1e6 * roof.seconds(f, b) for f, b in work],
    "in a plan": [1e6 * fitted.product(n, D, D, "bf16") for n in batches],
}
Table(
    {"tokens on an H100": batches, **columns, "bound by": [roof.bound(f, b) for f, b in work]},
    kinds=dict.fromkeys(columns, "modelled") | {"tokens on an H100": "given"},
    units=dict.fromkeys(columns, "µs") | {"intensity": "FLOP/B"},
)

# %% [markdown]
# From 1 to 256 tokens the least time hardly changes: the weights are read once. *In a plan* ([[3.1]]) rates are those that
# published training runs reached, lower for few rows. Try other operations, widths and chips:

# %%
roofline_panel()

# %% [markdown]
# ## 4 · Predict, then measure here
# Four operations of a small transformer in fp32, on this machine, at three batches.

# %% tags=["setup"]
WIDTH, TOKENS = 768, (1, 32, 1024)


def kernels(n: int) -> dict:
    """name -> (FLOPs and bytes, a call to time) for n tokens of width 768, 12 heads of 64."""
    x, wide = torch.randn(n, WIDTH), torch.randn(n, 4 * WIDTH)
    weight, qkv = torch.randn(WIDTH, 4 * WIDTH), torch.randn(3, 1, 12, n, WIDTH // 12)
    core = F.scaled_dot_product_attention
    return {
        "linear": (linear(n, WIDTH, 4 * WIDTH, 4), lambda: x @ weight),
        "LayerNorm": (pointwise(n * WIDTH, 7, 4), lambda: F.layer_norm(x, (WIDTH,))),
        "GELU": (pointwise(n * 4 * WIDTH, 5, 4), lambda: F.gelu(wide)),
        "attention": (attention(n, n, WIDTH, n, True, 4), lambda: core(*qkv)),
    }


# %%
rows = {(name, n): work for n in TOKENS for name, (work, _) in kernels(n).items()}
Table(
    {
        "operation": [name for name, _ in rows],
        "tokens": [n for _, n in rows],
        "FLOPs": [int(f) for f, _ in rows.values()],
        "bytes": [int(b) for _, b in rows.values()],
        "intensity": [f / b for f, b in rows.values()],
    },
    kinds=dict.fromkeys(["FLOPs", "bytes", "intensity"], "modelled") | {"tokens": "given"},
    units={"FLOPs": "FLOP", "bytes": "B", "intensity": "FLOP/B"},
)

# %%
guess_norm = predict(
    "1,024 tokens: the linear layer does 877 times the FLOPs of LayerNorm. How many times its time?",
    unit="x",
)
guess_norm

# %%
own = here.roofline("fp32")
took = {}
for n in TOKENS:
    for name, (_, call) in kernels(n).items():
        took[name, n] = meter.best_seconds(call, repeats=7)

# %% tags=["timing"]
bounds = {name: own.seconds(*rows[name, 1024]) for name in ("linear", "LayerNorm")}
found = {name: took[name, 1024] for name in bounds}
ratio, bound = found["linear"] / found["LayerNorm"], bounds["linear"] / bounds["LayerNorm"]
compare(
    Row("linear / LayerNorm", guess_norm, bound, ratio, unit="x", noisy=True),
    *(
        Row(name, formula=1e3 * bounds[name], measured=1e3 * found[name], unit="ms", noisy=True)
        for name in bounds
    ),
)

# %% [markdown]
# A ratio of two bounds is no bound. Look at its parts: other programs slow either, a product of this shape may beat that of
# section 2, and LayerNorm beats its bound when a cache holds its 6 MiB.

# %%
points = {name: [] for name, _ in rows}
for (name, n), (f, b) in rows.items():
    points[name].append((f / b, f / took[name, n]))
fig, ax = roofline_figure(
    {"this machine, fp32": own}, points, "Twelve calls", intensities=(0.1, 1e3), height=3.6
)
ax.margins(y=0.1)
sides = {"linear": (0, 1), "LayerNorm": (1, 0), "GELU": (-1, -1), "attention": (0, -1)}
for name, (right, up) in sides.items():
    for n, (x, y) in zip(TOKENS, points[name]):
        at = (right * (34 if n > 32 else 14), 12 * up)  # of two close marks, both are read
        style = dict(textcoords="offset points", ha="center", va="center", fontsize=8)
        ax.annotate(f"{n:,}", (x, y / 1e12), at, **style)
text = "Each mark is one call; at it, its tokens. Calls of LayerNorm share one intensity, as do GELU's."
caption(fig, kind="measured", text=text, noisy=True)

# %% [markdown]
# Tiny calls lie far below: starting an operator costs microseconds, which the roofline leaves out. Marks *above* the slope had
# their numbers in a cache. And no batch takes LayerNorm off the slope.

# %% [markdown]
# ## 5 · Memories have levels
# The slope has as many steps as there are memories. Read arrays of growing size, again and again:

# %%
sizes = {"1 KiB": 2**10, "64 KiB": 2**16, "1 MiB": 2**20, "16 MiB": 2**24, "128 MiB": 2**27}
rates = [meter.read_bandwidth(size, repeats=20) / 1e9 for size in sizes.values()]
Table(
    {"array": list(sizes), "read": rates},
    kinds={"read": "measured"},
    units={"read": "GB/s"},
    noisy=["read"],
)

# %% [markdown]
# What fits into a cache is read faster than what does not; the smallest array mostly pays for starting the operator. The last
# is the array of section 2, read as there: what differs are other programs.

# %% [markdown]
# Accelerators have such levels too. GPUs choose by hardware what to keep in their L2. On TPUs (VMEM) and Trainium (SBUF) the
# **compiler** decides it. Does one 4096 x 4096 layer fit? In bf16 it takes 32 MiB.

# %%
levels = {"H100, L2": "h100", "TPU v5e, VMEM": "tpu-v5e"}
levels |= {"Trainium2, SBUF of a core": "trn2-core", "Trainium2, 8 SBUFs of 8 cores": "trn2"}
layer_bytes = 2 * D * D
fits = [chip(name).on_chip_bytes >= layer_bytes for name in levels.values()]
Table(
    {
        "memory on the chip": list(levels),
        "size": [chip(name).on_chip_bytes / 2**20 for name in levels.values()],
        "4096 x 4096 in bf16 fits": ["yes" if one else "no" for one in fits[:-1]]
        + ["cut in 8, one part a core"],
    },
    kinds={"size": "quoted"},
    units={"size": "MiB"},
    source="ml-engineering (H100), scaling-book (TPU v5e), AWS Neuron documentation (Trainium2)",
)

# %% [markdown]
# ## 6 · Where whole models sit
# A training step of three models with published shapes, on `meta` again, every operator counted. An operator's bytes are its
# inputs and outputs: nothing is fused, except attention.

# %%
with torch.device("meta"):
    ids, half = torch.empty(8, 1024, dtype=torch.long), torch.bfloat16
    gpt, bert = GPT.from_preset("gpt2").to(half), BERT.from_preset("bert-base-uncased").to(half)
    unet, image = UNet.from_preset("sd-1.5").to(half), torch.empty(4, 4, 64, 64, dtype=half)
    text, when = torch.empty(4, 77, 768, dtype=half), torch.empty(4, dtype=torch.long)
short = ids[:, :512]
STEPS = {
    "GPT-2": lambda: gpt(ids, labels=ids).loss_sum.backward(),
    "BERT-base": lambda: bert(short, labels=short).loss_sum.backward(),
    "UNet of SD 1.5": lambda: unet(image, when, text).sample.sum().backward(),
}
counted = {name: operations(step) for name, step in STEPS.items()}

# %%
guess_share = predict(
    "GPT-2 trains on an H100. In how much of its least time is arithmetic the limit?", unit="%"
)
guess_share

# %%
on_h100 = {name: on_roofline(work, roof) for name, work in counted.items()}
columns = {
    "work": [one.flops / 1e12 for one in on_h100.values()],
    "moved": [one.bytes / 1e9 for one in on_h100.values()],
    "intensity": [one.intensity for one in on_h100.values()],
    "least time": [1e3 * one.seconds for one in on_h100.values()],
    "compute-bound": [100 * one.computing / one.seconds for one in on_h100.values()],
    "of the peak": [100 * one.rate / roof.peak for one in on_h100.values()],
}

units = dict(zip(columns, ["TFLOP", "GB", "FLOP/B", "ms", "% of time", "%"]))
kinds = dict.fromkeys(columns, "modelled")
Table({"on an H100": list(on_h100), **columns}, kinds=kinds, units=units, digits=2)

# %%
share = on_h100["GPT-2"].computing / on_h100["GPT-2"].seconds
compare("compute-bound", yours=guess_share, formula=100 * share, unit="%", digits=2)

# %% [markdown]
# Half of the time, memory is the limit. (The UNet's other 11 % of the peak: products below the ridge compute as well.) So a *mean*
# intensity flatters a model: all FLOPs sit in products, most bytes elsewhere.

# %%
bytes_of = Counter()
for one in counted["GPT-2"]:
    bytes_of["products and attention" if one.flops else one.name] += one.bytes
top, total = bytes_of.most_common(6), sum(bytes_of.values())
top += [("all else", total - sum(size for _, size in top)), ("together", total)]
Table(
    {"operators of GPT-2": [name for name, _ in top], "moved": [size / 1e9 for _, size in top]},
    kinds={"moved": "modelled"},
    units={"moved": "GB"},
    digits=2,
)

# %% [markdown]
# (`amax` belongs to the loss.) **Fusing** is the cure: one kernel instead of many, and the numbers between them never leave
# the chip. What if attention were *not* fused, as in 2020?

# %%
in_parts = {name: operations(step, fused_attention=False) for name, step in STEPS.items()}
points = {}
for name, fused in on_h100.items():
    both = (on_roofline(in_parts[name], roof), fused)
    points[name] = [(one.intensity, one.rate) for one in both]
fig, ax = roofline_figure(
    {"H100": roof}, points, title="Three training steps", intensities=(20, 1000)
)
for pair in points.values():
    ax.plot([x for x, _ in pair], [y / 1e12 for _, y in pair], ":", color="gray", linewidth=1)
text = "Left: attention in parts. Right: fused. Below the line: the mean of unlike operators."
numbers = {name: [round(x) for x, _ in pair] for name, pair in points.items()}
caption(fig, kind="modelled", text=text, numbers=numbers)

# %%
rows = {
    name: [on_roofline(work, r) for work in counted.values()]
    for name, r in list(roofs.items())[:3]
}
columns = {"chip": list(rows)}
for at, model in enumerate(counted):
    columns[model] = [100 * found[at].rate / roofs[name].peak for name, found in rows.items()]
Table(
    columns,
    kinds=dict.fromkeys(counted, "modelled"),
    units=dict.fromkeys(counted, "% of peak"),
    digits=2,
    title="What each chip can reach, operator by operator",
)

# %% [markdown]
# The lower the ridge, the more of the peak: the H100's arithmetic is ahead of its memory. Chip and model must fit each other.

# %% [markdown]
# ## 7 · Profile a step and read its trace
# So far: bounds. A **profiler** says where time really went. A small GPT, one training step on this machine:

# %% tags=["setup"]
torch.manual_seed(0)
LAYERS = 4
shape = dict(
    vocab_size=4096, max_positions=128, num_layers=LAYERS, hidden_size=512, num_heads=8
)
small = GPT.from_preset("gpt2-tiny", **shape)
optimizer = torch.optim.AdamW(small.parameters(), lr=1e-3, fused=True)
rows_of_text = torch.randint(4096, (4, 128))


# %% tags=["setup"]
def train_step() -> None:
    """Forward, backward and update, each with a name in the trace."""
    with torch.profiler.record_function("forward"):
        loss = small(rows_of_text, labels=rows_of_text).loss_sum / rows_of_text.numel()
    with torch.profiler.record_function("backward"):
        loss.backward()
    with torch.profiler.record_function("update"):
        optimizer.step()
        optimizer.zero_grad()


# %%
guess_products = predict(
    "Each of 4 layers has 4 linear layers; with the head that is 17. How many matrix products in a step?",
    unit="products",
)
guess_products

# %%
import os

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own messages stay silent
train_step()  # the first step also allocates and warms up
profiles = []
for _ in range(5):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        train_step()
    profiles.append(profile)
profile = min(profiles, key=lambda one: one.key_averages().self_cpu_time_total)
averages = {event.key: event for event in profile.key_averages()}
found = sum(averages[name].count for name in ("aten::mm", "aten::addmm") if name in averages)
expected = 3 * (4 * LAYERS + 1)
compare("products", yours=guess_products, formula=expected, measured=found, unit="products")

# %% [markdown]
# Each product of the model is followed by two for gradients: of its input, and of its weights. Of five steps we keep the
# fastest; all below is of that one.

# %%
step_work = operations(train_step)
flops_of, bytes_of = Counter(), Counter()
for one in step_work:
    flops_of[one.name] += one.flops
    bytes_of[one.name] += one.bytes

# %% tags=["timing"]
leaves = [event for name, event in averages.items() if name.startswith("aten::")]
leaves.sort(key=lambda event: -event.self_cpu_time_total)
for event in leaves[:8]:
    name = event.key.removeprefix("aten::")
    name = "attention" if name.endswith("attention_for_cpu") else name
    name = "attention_backward" if name.endswith("for_cpu_backward") else name
    bound = own.bound(flops_of[name], bytes_of[name]) if bytes_of[name] else "-"
    milliseconds = event.self_cpu_time_total / 1e3
    print(f"{name:26} {event.count:4} calls {milliseconds:7.1f} ms   bound by {bound}")

# %% [markdown]
# *Self* time is an operator's own, without those it called. A **trace** keeps the order as well: each event has a name, a
# start and a duration in microseconds.

# %%
with tempfile.TemporaryDirectory() as folder:
    profile.export_chrome_trace(f"{folder}/step.json")
    raw = json.loads(Path(folder, "step.json").read_text())["traceEvents"]
    spans = read_trace(f"{folder}/step.json")
event = next(event for event in raw if event.get("name") == "aten::addmm")
print("an event has:", ", ".join(key for key in ("name", "ts", "dur", "tid") if key in event))
print(
    "in order:", ", ".join(s.name for s in spans if s.name in ("forward", "backward", "update"))
)
products = [s for s in spans if s.name in ("aten::mm", "aten::addmm")]
print("the first product is called inside:", " > ".join(products[0].within))
print("products:", dict(Counter(span.within[0] for span in products)))

# %% [markdown]
# Not 17 and 34: our loss makes the head's two gradients right away, inside `forward`, so that the logits need not be kept. Start and
# duration say which event contains another, hence own times by phase and kind:


# %%
def kind(name: str) -> str:
    """Which kind of work an operator is."""
    if name in ("aten::mm", "aten::addmm", "aten::bmm"):
        return "matrix products"
    return "attention" if "attention" in name else "all else"


busy = own_seconds(
    (span for span in spans if span.within and span.name.startswith("aten::")),
    lambda span: f"{span.within[0]}/{kind(span.name)}",
)

# %%
from fmlab.lab.figures import PALETTE

fig, ax = figure(x="own time [ms]", y="phase", title="One training step", height=2.1)
phases, left = ("update", "backward", "forward"), torch.zeros(3)
for at, name in enumerate(("matrix products", "attention", "all else")):
    lengths = torch.tensor([1e3 * busy.get(f"{phase}/{name}", 0.0) for phase in phases])
    ax.barh(phases, lengths.tolist(), left=left.tolist(), color=PALETTE[at], label=name)
    left += lengths
ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
text = "Backward has 1.33 times the FLOPs of forward in products: forward makes the head's gradients."
caption(fig, kind="measured", text=text, noisy=True)

# %% tags=["timing"]
least, whole = on_roofline(step_work, own), sum(s.seconds for s in spans if not s.within)
compare(
    Row("a step", formula=1e3 * least.seconds, measured=1e3 * whole, unit="ms", noisy=True),
    Row(
        "of the peak",
        formula=100 * least.rate / own.peak,
        measured=100 * least.flops / whole / own.peak,
        unit="%",
        noisy=True,
    ),
)

# %% [markdown]
# The *formula* is the bound, operator by operator; what is above it are starts of operators, strided reads and other
# programs. To look at a trace with your own eyes, open the file in Perfetto (ui.perfetto.dev) or in `chrome://tracing`.

# %% [markdown]
# ## 8 · What production does
# Peaks are for plans, measurements for promises. The best matrix products that one source, ml-engineering, found lie between half
# of the peak and nearly all of it:

# %%
NAMES |= {"B200": "b200", "Gaudi 2": "gaudi2", "Gaudi 3": "gaudi3"}
best = {name: chip(key) for name, key in NAMES.items() if chip(key).achievable_flops("bf16")}
found = {name: one.achievable_flops("bf16") for name, one in best.items()}
Table(
    {
        "chip": list(best),
        "peak": [round(one.peak_flops("bf16") / 1e12) for one in best.values()],
        "best measured": [flops / 1e12 for flops in found.values()],
        "of peak": [100 * found[name] / one.peak_flops("bf16") for name, one in best.items()],
    },
    kinds={"peak": "quoted", "best measured": "quoted", "of peak": "modelled"},
    units={"peak": "TFLOP/s", "best measured": "TFLOP/s", "of peak": "%"},
    source="stas00/ml-engineering, compute/accelerator, MAMF table",
    digits=4,
)

# %% [markdown]
# - **MFU** (model FLOPs utilisation): the model's FLOP/s over the *peak*; 42 to 56 % on A100s (arXiv:2205.05198, Table
#   5).
# - Profilers: Nsight (GPU), XProf (TPU), Neuron Explorer.
# - Compilers fuse what stands on the slope: [[1.13]].

# %% [markdown]
# ## 9 · What breaks
# Four ways to misread a data sheet. None raises an error. Each has a number that gives it away.

# %%
a100, trn2, core = chip("a100-80gb"), chip("trn2"), chip("trn2-core").peak_flops("bf16")
best, whole = a100.achievable_flops("bf16"), trn2.peak_flops("bf16")
busbw, links = 235e9, a100.link_bandwidth  # what a chip sends in the best all-reduce of 8
shown = a100.figure("memory_shown").base
read = {
    "sparse as dense": (best, a100.figure("sparse.bf16").base, a100.peak_flops("bf16")),
    "a core as the chip": (0.4 * whole, core, whole),
    "both ways as one way": (busbw, 2 * links, links),
    "GiB as GB": (shown, 80e9, a100.memory_bytes),
}

# %%
Table(
    {
        "misread": list(read),
        "share of": [
            "best product",
            "a run, 40 % MFU assumed",
            "all-reduce on 8",
            "memory shown",
        ],
        "it seems": [100 * reached / wrong for reached, wrong, _ in read.values()],
        "it is": [100 * reached / right for reached, _, right in read.values()],
    },
    kinds={"it seems": "modelled", "it is": "modelled"},
    units={"it seems": "%", "it is": "%"},
)

# %% [markdown]
# All are computed: from figures of ml-engineering and an out-of-memory report (A100), AWS's of Trainium2, and a run that we
# assume.

# %% [markdown]
# More than 100 % is impossible: a core, or GB. Half of what others reach with the same chip: sparse, or both ways. Our tables
# keep such figures apart, and what nobody publishes is refused:

# %% tags=["raises-exception"]
chip("tpu-v5p").peak_flops(torch.float32)

# %% [markdown]
# And names: Google's v5p-8 counts *cores*. How many chips is it?

# %%
print(
    f"a v5p-8 is one host of {host('tpu-v5p-host').chips} chips with {chip('tpu-v5p').cores} cores each"
)

# %% [markdown]
# ## Exercises
# ### Exercise 1.9.1 (core): the smallest batch that computes
# From how many tokens on is a linear layer bound by computing?


# %% exercise="1.9.1"
def smallest_batch(
    inputs: int, outputs: int, itemsize: int, peak: float, bandwidth: float
) -> int:
    """Return the least number of tokens at which a linear layer is bound by computing.

    The layer has [inputs, outputs] weights and no bias. Weights, the tokens' inputs and their outputs cross the
    memory once; every number takes `itemsize` bytes. peak: FLOPs a second; bandwidth: bytes a second. Bound by
    computing: computing takes at least as long as moving. Return 0 if no batch is large enough.
    """
    # BEGIN SOLUTION
    # 2 n i o / peak >= s (n i + i o + n o) / bandwidth, solved for n
    gain = 2 * inputs * outputs / peak - itemsize * (inputs + outputs) / bandwidth
    if gain <= 0:
        return 0
    return math.ceil(itemsize * inputs * outputs / bandwidth / gain * (1 - 1e-12))
    # END SOLUTION


# %% check="1.9.1"
check("1.9.1", smallest_batch)

# %% uses="1.9.1"
for name in ("h100", "tpu-v5p", "trn2"):
    one = chip(name)
    least = smallest_batch(D, D, 2, one.peak_flops("bf16"), one.memory_bandwidth)
    print(f"{name}: {least} tokens, ridge {one.roofline('bf16').ridge:.0f} FLOP/B")

# %% [markdown]
# ### Exercise 1.9.2 (core): read a data sheet
# Turn what a vendor prints into figures that can be compared.


# %% exercise="1.9.2"
def read_sheet(sheet: dict) -> dict[str, float]:
    """Return {"flops", "memory", "link"}: of the whole chip, in FLOP/s, bytes and bytes/s.

    sheet["tflops"]:  TFLOP/s as printed
        "sparse":     True if that rate is with 2:4 sparsity, which doubles it; we want the dense rate
        "per":        "chip" or "core"; "cores": cores of the chip. It is said of "tflops" alone
    sheet["memory"]:  as printed; "memory_unit": "GB" (10^9 bytes) or "GiB" (2^30 bytes)
    sheet["link"]:    of all links of the chip; "link_unit": "GB/s" or "Gbit/s" (decimal);
        "both_ways":  True if both directions are added up; we want one
    """
    # BEGIN SOLUTION
    flops = sheet["tflops"] * 1e12
    if sheet["sparse"]:
        flops /= 2
    if sheet["per"] == "core":
        flops *= sheet["cores"]
    link = sheet["link"] * 1e9
    if sheet["link_unit"] == "Gbit/s":
        link /= 8
    if sheet["both_ways"]:
        link /= 2
    memory = sheet["memory"] * (2**30 if sheet["memory_unit"] == "GiB" else 1e9)
    return {"flops": flops, "memory": memory, "link": link}
    # END SOLUTION


# %% check="1.9.2"
check("1.9.2", read_sheet)

# %% [markdown]
# ### Exercise 1.9.3 (optional): own times of a trace
# The profiler's most useful column, from start and duration alone.


# %% exercise="1.9.3"
def own_times(events: list[tuple[str, float, float]]) -> dict[str, float]:
    """Return name -> own time: the sum of its events' durations without the events directly inside them.

    events: (name, start, duration) of one thread, in any order. An event lies inside another if it begins and
    ends within it; two events never overlap otherwise. One that begins where another ends is not inside it.
    Names repeat, an operator can call itself, and of two events with one start the longer contains the other.
    """
    # BEGIN SOLUTION
    own, inside = {}, []  # inside: name and end of the events that have not ended
    for name, start, duration in sorted(events, key=lambda event: (event[1], -event[2])):
        while inside and start >= inside[-1][1]:
            inside.pop()
        if inside:
            own[inside[-1][0]] -= duration
        own[name] = own.get(name, 0.0) + duration
        inside.append((name, start + duration))
    return own
    # END SOLUTION


# %% check="1.9.3"
check("1.9.3", own_times)

# %% [markdown] tags=["reading"]
# ## Further reading
# - Williams, Waterman and Patterson 2009, *Roofline*, CACM 52(4): the model itself.
# - Austin et al. 2025, *How to Scale Your Model*, parts 1 and 2: rooflines and TPUs.
# - Bekman, *Machine Learning Engineering*, chapter on accelerators: peaks, what is reached, and sparsity in small print.
# - Dao et al. 2022, arXiv:2205.14135, sections 2 and 3: attention on a roofline, and fused.
# - AWS Neuron documentation, *Trainium2 architecture* in the NKI guide: SBUF, PSUM and engines.
# - docs/chips.md: every figure used here, with its source, and where sources disagree.
