# %% [markdown]
# **You will learn** to say before a run how many chips, days and dollars it takes, how wrong that is, and to find the
# mistake in somebody else's number.

# %% tags=["setup"]
from fmlab.chips import chip, host
from fmlab.lab import Row, Table, check, compare, plan_panel, predict
from fmlab.parallel import Layout
from fmlab.planner import goodput_at, optimal_interval, plan, predicted, run_cost, runs, search

DAY = 86_400  # seconds
published = {run.id: run for run in runs()}
# %load_ext fmlab.lab

# %% [markdown]
# ## 1 · BERT-large: days on one host
# *Several days on a machine of A100s*, said the KDD 2023 tutorial on training foundation models. A plan is arithmetic
# on shapes: nothing is built, nothing runs. NVIDIA pre-trained first on short rows:

# %%
OF_2021 = dict(attention="unfused", dropout=True)
layout = Layout(data=8, micro_batches=32)
size = dict(global_batch=65_536, seq_len=128)
plan("bert-large-uncased", chip="a100-80gb", layout=layout, **size, **OF_2021)

# %% [markdown]
# 7,038 such steps, then 1,563 of 32,768 rows of 512 tokens. (`unfused`: attention of that time keeps its tables.)

# %%
guess_bert = predict("How many days do both phases take on the eight A100?", unit="days")
guess_bert

# %%
PHASES = [(7038, 65_536, 128), (1563, 32_768, 512)]  # steps, rows, tokens: its scripts


def bert_days(chip, ranks, rows, **how):
    """Days of both phases on so many ranks; rows: at once on a rank, in each phase."""
    days = 0.0
    for (steps, batch, length), at_once in zip(PHASES, rows, strict=True):
        layout = Layout(data=ranks, micro_batches=batch // (ranks * at_once))
        size = dict(global_batch=batch, seq_len=length)
        one = plan("bert-large-uncased", chip=chip, layout=layout, **size, **how)
        assert one.fits, f"{at_once} rows of {length} tokens do not fit {chip}"
        days += steps * one.step_seconds / DAY
    return days


# %%
of_nvidia = [published[f"nvbert-a100-1nodes-{n}-mp"].sequences_second for n in (128, 512)]
of_aws = [2875, published["trn1-bertlarge-tutorial-ph2"].sequences_second]
quoted = {
    name: sum(s * b / rate for (s, b, _), rate in zip(PHASES, rates, strict=True)) / DAY
    for name, rates in (("8 A100", of_nvidia), ("16 Trainium", of_aws))
}
source = "NVIDIA DeepLearningExamples, BERT README; AWS Neuron, bert.rst: rows a second"
a100 = bert_days("a100-80gb", 8, (256, 32), **OF_2021)
trn1 = bert_days("trn1-core", 32, (16, 2), **OF_2021)

# %%
compare(
    Row("8 A100", guess_bert, a100, quoted=quoted["8 A100"], unit="days", source=source),
    Row("16 Trainium", None, trn1, quoted=quoted["16 Trainium"], unit="days", source=source),
)

# %% [markdown]
# Days indeed. Both are off, and we can say why: NVIDIA pads rows to the next multiple of 64, so that most have fewer
# than 512 tokens; Trainium's constants rest on two runs.

# %% [markdown]
# The same run on one host of today, with fused attention. Prices are dated, and bought by the hour.

# %%
HOSTS = {
    "8 A100": ("a100-80gb", 8, "p4de.24xlarge", (256, 32)),
    "8 H100": ("h100", 8, "p5.48xlarge", (256, 32)),
    "4 TPU v5p": ("tpu-v5p", 4, "tpu-v5p-host", (256, 32)),
    "16 Trainium": ("trn1-core", 32, "trn1.32xlarge", (16, 4)),
}
days = {name: bert_days(one, ranks, rows) for name, (one, ranks, _, rows) in HOSTS.items()}

# %%
hourly = [host(one[2]).chips * host(one[2]).usd_per_chip_hour() for one in HOSTS.values()]
Table(
    {
        "host": list(HOSTS),
        "both phases": list(days.values()),
        "price": hourly,
        "run": [24 * d * usd for d, usd in zip(days.values(), hourly, strict=True)],
    },
    kinds={"both phases": "modelled", "price": "quoted", "run": "modelled"},
    units={"both phases": "days", "price": "USD an hour", "run": "USD"},
    source="AWS on-demand 2026-07-20 (by Karpenter), Google's list price 2025-02: fmlab.chips",
)

# %% [markdown]
# ## 2 · The ledger: which line does not fit?
# GPT-3 has 175 billion parameters, of 16 bytes each while it trains. Take 128 A100 of 40 GB: 8 tensor ranks x 8 stages,
# twice.

# %%
guess_states = predict("How many GB of weights, gradients and optimizer has a chip?", unit="GB")
guess_states

# %%
GPT3 = dict(global_batch=1536, seq_len=2048)
split = dict(tensor=8, sequence_parallel=True, pipeline=8)
tight = plan(
    "gpt3-175b", chip="a100-40gb", layout=Layout(data=2, micro_batches=768, **split), **GPT3
)
lines = tight.memory.values()
Table(
    {"line": [line.name for line in lines], "bytes": [line.value / 1e9 for line in lines]},
    kinds={"bytes": "modelled"},
    units={"bytes": "GB"},
    title=f"{tight.peak_memory / 1e9:.1f} GB on a chip of {tight.capacity / 1e9:.1f}",
)

# %%
states = sum(tight.memory[n].value for n in ("weights", "gradients", "masters", "moments"))
compare("states of a chip", yours=guess_states, formula=states / 1e9, unit="GB")

# %%
print(tight.explain("moments"))
for change, other in tight.what_would_fit()[:4]:
    slower = other.step_seconds / tight.step_seconds - 1
    print(f"{change}: {other.peak_memory / 1e9:.1f} GB, a step {slower:+.1%}")

# %% [markdown]
# The stage that holds most is the first: it keeps activations of all micro-batches in flight, and a table. Dividing
# masters and moments over two data ranks is enough, and free: ZeRO-1 sends no more bytes.

# %% [markdown]
# ## 3 · GPT-3: months
# The tutorial gives $3 \times 10^{23}$ FLOPs. Where do they come from, and how long do they take?

# %%
guess_days = predict("GPT-3 on 1,024 A100 with full recomputation: how many days?", "days")
guess_days

# %%
from fmlab.planner import training_days, training_flops

flops = training_flops(174.6e9, 300e9)  # 6 for each parameter and token
for reached in (312e12, 140e12):  # the peak; what Megatron reached in 2021
    print(f"{flops:.3g} FLOPs, 1,024 chips at {reached / 1e12:.0f} TFLOP/s: ", end="")
    print(f"{training_days(flops, 1024, reached):.1f} days")
again = training_days(flops * 8 / 6, 1024, 140e12)
print(f"with recomputation, 8 instead of 6: {again:.1f} days")

# %% [markdown]
# That is Narayanan's estimate. A plan knows layers, wires and waiting. They printed days for three clusters; theirs is 8
# tensor ranks x 12 stages:

# %%
TOKENS = 300e9
of_2021 = dict(recompute="full", attention="unfused", dropout=True, chip="a100-80gb", **GPT3)
source = "Narayanan 2021, arXiv:2104.04473, table 2 and section 5.1"


def days_on(chips, pipeline):
    """Days of GPT-3 on A100s by a plan with 8 tensor ranks."""
    data = chips // (8 * pipeline)
    layout = Layout(data=data, micro_batches=1536 // data, tensor=8, pipeline=pipeline)
    one = plan("gpt3-175b", layout=layout, **of_2021)
    return run_cost(one.step_seconds, one.tokens_per_step, TOKENS, chips).days


# %%
cases = [(384, 12, 84), (768, 12, 43), (1536, 12, 23), (1024, 16, 34)]
rows = []
for chips, stages, printed in cases:
    guess = guess_days if chips == 1024 else None
    days = days_on(chips, stages)
    rows.append(Row(f"{chips:,} A100", guess, days, quoted=printed, unit="days", source=source))
compare(*rows)

# %% [markdown]
# ## 4 · What if?
# Move one slider at a time. Find a layout that is refused, one that does not fit, a step bound by the bubble, and 1,024
# A100 that do it for less than 1.8 million dollars.

# %%
plan_panel()

# %% [markdown]
# ## 5 · Search
# Nobody moves sliders through thousands of layouts. `search` looks at each legal one, and leaves out by a bound what
# cannot win.

# %%
guess_layouts = predict("How many legal layouts has GPT-3 on 1,024 A100?", unit="layouts")
guess_layouts

# %%
from textwrap import fill

USUAL = {"schedule": ("1f1b", "interleaved")}  # what most frameworks have
found = search("gpt3-175b", chip="a100-80gb", chips=1024, only=USUAL, **GPT3)
compare(
    Row("legal layouts", guess_layouts, found.layouts),
    Row("cannot be among the best: a bound of their time", formula=found.too_slow),
    Row("cannot fit: states and activations", formula=found.too_large),
    Row("worked out line by line", formula=found.priced),
)

# %%
print(fill(str(found.best.setup.layout), 90))
named = Layout(data=8, micro_batches=192, zero=1, **(split | {"pipeline": 16}))
usual = plan("gpt3-175b", chip="a100-80gb", layout=named, **GPT3)
parts = {n: (found.best.time.get(n), usual.time.get(n)) for n in found.best.time | usual.time}
pairs = {n: [one.value if one else 0.0 for one in both] for n, both in parts.items()}
Table(
    {
        "part": [*pairs, "step"],
        "the best": [*(a for a, _ in pairs.values()), found.best.step_seconds],
        "8 x 8 x 16": [*(b for _, b in pairs.values()), usual.step_seconds],
    },
    kinds={"the best": "modelled", "8 x 8 x 16": "modelled"},
    units={"the best": "s", "8 x 8 x 16": "s"},
)

# %% [markdown]
# Four tensor ranks have wider matrices and send less, twelve chunks a stage shorten the bubble. It pays in memory, which
# the usual layout leaves free. What a byte buys:

# %%
from fmlab.lab import caption, figure

front = found.pareto()
memory, steps = [p.peak_memory / 1e9 for p in front], [p.step_seconds for p in front]
fig, ax = figure(x="memory of the fullest chip [GB]", y="step [s]", title="What a byte buys")
ax.plot(memory, steps, "o-", label="best for its memory")
ax.plot(usual.peak_memory / 1e9, usual.step_seconds, "s", label="8 x 8 x 16")
ax.set(ylim=(17, 28))
numbers = {"fastest [s]": steps[0], "8 x 8 x 16 [s]": usual.step_seconds}
text = "No layout is below the line. A chip with half of the memory would lose little."
caption(fig, kind="modelled", text=text, numbers=numbers)

# %% [markdown]
# ## 6 · The same on other chips
# 1,024 chips of each, each with its own best layout, and 300 billion tokens:

# %%
best, costs = {"A100": found.best}, []
others = {"H100": "p5.48xlarge", "TPU v5p": "tpu-v5p-host", "Trainium2": "trn2.48xlarge"}
for name, where in others.items():
    best[name] = search("gpt3-175b", host=where, chips=1024, only=USUAL, keep=1, **GPT3).best
for one in best.values():
    priced = one.machine.host if host(one.machine.host).prices else None
    costs.append(run_cost(one.step_seconds, one.tokens_per_step, TOKENS, 1024, host=priced))

# %%
layouts = [one.setup.layout for one in best.values()]
columns = {
    "tensor x pipeline": [f"{one.tensor} x {one.pipeline}" for one in layouts],
    "MFU": [100 * one.mfu for one in best.values()],
    "run": [cost.days for cost in costs],
    "price": [cost.usd / 1e6 if cost.usd else None for cost in costs],
}
Table(
    {"1,024 of": list(best), **columns},
    kinds=dict.fromkeys(("MFU", "run", "price"), "modelled"),
    units={"MFU": "%", "run": "days", "price": "million USD"},
)

# %% [markdown]
# No failures, and no price of Trainium2 that we know. Can such numbers be believed? GPT-3's shape was timed on several
# chips; here are a step's seconds as planned and as printed:

# %%
names = (
    "korth-175B-present",
    "nemo2412-GPT3-175B-512",
    "recipe-trillium-GPT3-175B-MaxText-bf16",
)
korthikanti, nemo, trillium = (published[name] for name in names)
size = dict(global_batch=768, seq_len=2048, recompute="full")
tpu = plan("gpt3-175b", chip="tpu-v6e", layout=Layout(data=256, fsdp=True), **size)
source = "Korthikanti 2022, table 5; NeMo 24.12, performance summary; tpu-recipes, Trillium"
seconds = {
    "64 A100": (predicted.predict(korthikanti), korthikanti.step_seconds()),
    "512 H100, fp8": (predicted.predict(nemo), nemo.step_seconds()),
    "256 TPU v6e": (tpu.step_seconds, trillium.step_printed),
}

# %%
Table(
    {
        "a step of GPT-3 on": list(seconds),
        "planned": [ours for ours, _ in seconds.values()],
        "printed": [theirs for _, theirs in seconds.values()],
        "off by": [100 * (ours / theirs - 1) for ours, theirs in seconds.values()],
    },
    kinds={"planned": "modelled", "printed": "quoted", "off by": "modelled"},
    units={"planned": "s", "printed": "s", "off by": "%"},
    source=source,
)

# %%
print(f"the TPU plan: {tpu.peak_memory / 1e9:.0f} GB, of {tpu.capacity / 1e9:.0f} on the chip")

# %% [markdown]
# Two are near, the third is 17 % too fast. And its memory is too pessimistic: that run did fit. XLA keeps fewer gathered
# layers and gradients at once than `fmlab.parallel`, whose habits a plan counts.

# %% [markdown]
# ## 7 · PaLM
# No preset has it, but a shape needs sizes only (Chowdhery et al. 2022, table 1): one key/value head, and a gated
# network beside attention.

# %%
from fmlab.planner import llama_shape

palm = llama_shape(
    name="palm-540b",
    layers=118,
    hidden=18_432,
    heads=48,
    kv_heads=1,
    head_width=256,
    ffn=73_728,
    vocab=256_000,
    tied=True,
    norms=1,
)
guess_mfu = predict("Which MFU does a plan give it on 6,144 TPU v4?", unit="%")
guess_mfu

# %%
pods = Layout(data=512, fsdp=True, replicas=2, tensor=12, sequence_parallel=True)
size = dict(global_batch=2048, seq_len=2048, recompute="full")
one = plan(palm, chip="tpu-v4", layout=pods, **size)
took = run_cost(one.step_seconds, one.tokens_per_step, 780e9, 6144)
used = published["palm-540B-detail"].chip_hours / 6144 / 24
source = "Chowdhery 2022, arXiv:2204.02311, tables 1 and 3, section 4"
compare(
    Row("10^9 parameters", None, palm.parameters / 1e9, quoted=540.35, digits=5, source=source),
    Row("MFU", guess_mfu, 100 * one.mfu, quoted=46.2, unit="%", source=source),
    Row("HFU", None, 100 * one.hfu, quoted=57.8, unit="%", source=source),
    Row("days", None, took.days, quoted=used, unit="days", source=source),
)

# %% [markdown]
# The tokens at the printed MFU take 38 days; 57 were used. A plan knows no restarts, no small first batches, no work
# done twice. (HFU, *hardware* FLOPs utilisation, counts what is computed again too: there it was not all.)

# %% [markdown]
# The same tokens on 6,144 chips of later makes, each with its best layout:

# %%
rows, size = {}, dict(chips=6144, global_batch=2048, seq_len=2048)
for name, where in others.items():
    one = search(palm, host=where, only=USUAL, keep=1, **size).best
    priced = where if host(where).prices else None
    took = run_cost(one.step_seconds, one.tokens_per_step, 780e9, 6144, host=priced)
    rows[name] = (100 * one.mfu, took.days, took.usd and took.usd / 1e6)
heads = ("MFU", "run", "price")
Table(
    {"6,144 of": list(rows), **dict(zip(heads, zip(*rows.values(), strict=True), strict=True))},
    kinds=dict.fromkeys(heads, "modelled"),
    units={"MFU": "%", "run": "days", "price": "million USD"},
)

# %% [markdown]
# ## 8 · Failures
# Llama 3's 16,384 H100 were interrupted 419 times in 54 days. That is one chip in six years, and such a run every three
# hours. What was done since the last checkpoint is done again.

# %%
guess_interval = predict(
    "A checkpoint takes a minute. After how many minutes of training on 16,384 H100 is the next one due?",
    unit="minutes",
)
guess_interval

# %%
from fmlab.lab import show_source
from fmlab.planner.goodput import LLAMA3

show_source(goodput_at)

# %%
mean = {n: LLAMA3.mean_seconds(n) for n in (1024, 4096, 16_384)}
due = {n: optimal_interval(60, one) for n, one in mean.items()}
fig, ax = figure(x="training between checkpoints [minutes]", y="training [% of time]")
for n, one in mean.items():
    minutes = [2**power / 4 for power in range(2, 12)]
    shares = [100 * goodput_at(60 * m, 60, one, restart=600).share for m in minutes]
    ax.plot(minutes, shares, label=f"{n:,} chips: best at {due[n] / 60:.0f} minutes")
ax.set(xscale="log", ylim=(40, 100))
caption(fig, kind="modelled", text="Too often: time to write. Too seldom: work done twice.")

# %%
compare("best interval", yours=guess_interval, formula=due[16_384] / 60, unit="minutes")

# %% [markdown]
# So GPT-3 on 1,024 H100 takes not `step x steps` but that over the goodput. All of it in one line:

# %%
share = goodput_at(due[1024], 60, mean[1024], restart=600).share
one = best["H100"]
of_h100 = (one.step_seconds, one.tokens_per_step, TOKENS, 1024)
print(run_cost(*of_h100, host="p5.48xlarge", goodput=share))

# %% [markdown]
# And is it money well spent? Hoffmann et al. (2022) fitted how loss falls with parameters and tokens. The same FLOPs by
# their fit, and by the rule that others made of it:

# %%
from fmlab.planner import chinchilla

print(chinchilla(flops))
print(chinchilla(flops, rule="20 tokens a parameter"))

# %% [markdown]
# ## 9 · A second opinion
# The simulator of 2.8 traces real blocks and replays every message on every wire, with the chips' published figures and
# nothing fitted. Do both agree when the plan gets the same figures?

# %%
from fmlab.planner import Calibration

ones = dict.fromkeys(("attention", "memory", "misaligned", "inside", "between"), 1.0)
nothing = ("rows_half", "width_half", "hop_inside", "hop_between", "launch", "hidden_gradients")
zeros = dict.fromkeys((*nothing, "reserve", "context_bytes"), 0.0)
ideal = Calibration(matmul={"a100-80gb": 1.0}, **ones, **zeros)

# %%
from fmlab.sim import dry_run

short = dict(data=8, micro_batches=24, tensor=8, pipeline=16)
few = dict(global_batch=192, seq_len=2048)
replayed = dry_run("gpt3-175b", host="p4de.24xlarge", **short, **few)
reckoned = plan("gpt3-175b", chip="a100-80gb", layout=Layout(**short), calibration=ideal, **few)
Table(
    {
        "192 rows of GPT-3 on 1,024 A100": ["plan", "dry run"],
        "step": [reckoned.step_seconds, replayed.seconds],
        "memory": [reckoned.peak_memory / 1e9, replayed.peak_memory / 1e9],
    },
    kinds={"step": "modelled", "memory": "modelled"},
    units={"step": "s", "memory": "GB"},
)

# %% [markdown]
# ## 10 · How wrong is it?
# Twice modelled is not measured. What decides are the runs that others timed. A plan of each, with constants fitted
# *without* its publication:

# %%
guess_error = predict("By what percentage is the typical plan off?", unit="%")
guess_error

# %%
from fmlab.planner import validate
from fmlab.planner.fitted_file import held_out_calibrations

known = [run for run in runs(fully_specified=True) if not run.cannot]
apart = held_out_calibrations()
constant = validate.constant_utilisation(known)
ways = {
    "fitted to all": validate.compare(predicted.predict, known),
    "held out": validate.compare(lambda run: predicted.predict(run, apart[run.group]), known),
    "one utilisation a chip": validate.compare(constant, known),
}

# %%
from statistics import median

groups = {name: validate.by_group(compared) for name, compared in ways.items()}
middle, points = {}, {}
for name, found_in in groups.items():
    off = sorted(100 * one.median for one in found_in)
    middle[name] = median(off)
    points[name] = ([0, *off], [100 * n / len(off) for n in range(len(off) + 1)])

# %%
fig, ax = figure(x="error of a step, at most [%]", y="publications [%]", title="How wrong?")
for name, (errors, share) in points.items():
    ax.step(errors, share, where="post", label=name)
ax.set(xlim=(0, 40))
text = "A publication's error is the median of its rows: how many publications are within it."
caption(fig, kind="modelled", text=text, numbers=middle)

# %%
ninth = 100 * validate.overall(groups["held out"]).p90
print(f"{len(known)} runs of {len(groups['held out'])} publications")
compare(
    Row("a publication's median error", guess_error, middle["held out"], unit="%"),
    Row("nine of ten rows, in the mean publication", formula=ninth, unit="%"),
)

# %%
worst = sorted(ways["fitted to all"], key=lambda one: -abs(one.error))[:5]
Table(
    {
        "run": [one.run.id for one in worst],
        "planned": [one.predicted for one in worst],
        "printed": [one.published for one in worst],
        "off by": [100 * one.error for one in worst],
    },
    kinds={"planned": "modelled", "printed": "quoted", "off by": "modelled"},
    units={"planned": "s", "printed": "s", "off by": "%"},
    source="data/published/runs.csv; docs/planner-validation.md says what is known of each",
)

# %% [markdown]
# So say "21 days, give or take a sixth", never 21.4. Where it is worst: kernels of another time, chips that only one
# publication has, networks that nobody printed.

# %% [markdown]
# ## 11 · What breaks: five claims
# All five are public, and none raises an error. Redo each from its own inputs. Which step slipped?
#
# **Claim 1**: "45.5 % MFU", 70 billion parameters on 16 A100, 500 steps of 16 x 2,048 tokens in 13.5 hours.

# %%
guess_right = predict("6 FLOPs a parameter and token: which MFU is right?", unit="%")
guess_right

# %%
from fmlab.planner.slips import days_of_seven_billion, one_chip_for_all

show_source(one_chip_for_all)

# %%
claim = one_chip_for_all()
compare(
    Row("claimed", quoted=100 * claim.theirs, unit="%", source=claim.source),
    Row("right", guess_right, formula=100 * claim.ours, unit="%"),
)

# %% [markdown]
# Tokens of sixteen GPUs, the peak of one. *What gives it away: a ratio of 16, the number of chips.*
#
# **Claim 2**: seven billion parameters and two trillion tokens take 104 A100-days at the peak.

# %%
claim = days_of_seven_billion()
print(f"claimed {claim.theirs:.0f} ({claim.source})")
print(f"right: {claim.ours:,.0f} GPU-days, {1 / claim.ratio:.0f} times as many")
meta = published["hours-Llama-2_7B"]
print(
    f"Llama 2 7B took {meta.chip_hours / 24:,.0f} for as many tokens (its paper, as quoted by others)"
)

# %% [markdown]
# A division gone wrong. *What gives it away: a published run that took 74 times as long.*
#
# **Claim 3**: "a trillion parameters at 52 % of peak" (2021); PaLM a year later: 46 %. Did it get worse?

# %%
from fmlab.planner import flops_per_step, model_shape

trillion = published["sc21-1008B"]
shape = trillion.shape()
once = flops_per_step(shape, 3072, 2048, recompute="full")
reported = trillion.tflops / 312
Table(
    {
        "counted": ["what was computed, twice too (HFU)", "what the model asks for (MFU)"],
        "of the peak": [100 * reported, 100 * reported * once.model / once.hardware],
    },
    kinds={"of the peak": "modelled"},
    units={"of the peak": "%"},
)

# %% [markdown]
# They count the second forward pass, and say so; convert before you compare. *What gives it away: a ratio near 4/3.*
#
# **Claim 4**: GPT-3 on TPU v5p, 397 TFLOP/s a chip (tpu-recipes). Of 459 that is 86.5 % MFU.

# %%
v5p, recipe = chip("tpu-v5p"), published["recipe-v5p-GPT3-175B-MaxText"]
once = flops_per_step(model_shape("gpt3-175b"), 1, 2048, recompute="full")
for dtype in ("bf16", "int8"):
    mfu = recipe.tflops * 1e12 / v5p.peak_flops(dtype)
    print(f"of the {dtype} peak: MFU {mfu:.1%}, HFU {mfu * once.hardware / once.model:.1%}")

# %% [markdown]
# The script says `quantization=int8`, and recomputes everything. *What gives it away: an HFU above 100 %.*
#
# **Claim 5**: ZeRO-3 with offload needs 0.49 GB a GPU for 6.8 billion parameters. Somebody measured 14.3.

# %%
from fmlab.planner.calculators import zero_estimate

parameters, largest = 6_805_000_000, 131_000_000  # as DeepSpeed's issue 4527 prints them
how = dict(chips_per_host=4, largest_layer=largest, offload="parameters")
said = zero_estimate(parameters, 3, **how).chip / 2**30
runtime = tight.memory["runtime"].value / 2**30
columns = {
    "by formula": [said, 2 * parameters / 2**30 + runtime],
    "in the issue": [0.49, 14_678 / 1024],
}
Table(
    {"on a GPU": ["one layer in 32 bits", "all weights in 16 bits, runtime"], **columns},
    kinds={"by formula": "modelled", "in the issue": "quoted"},
    units=dict.fromkeys(columns, "GiB"),
    source="github.com/deepspeedai/DeepSpeed/issues/4527: estimated, and measured",
)

# %% [markdown]
# The estimate holds one layer: weights were to be divided and offloaded. What was on each GPU is *all of them*, and the
# runtime, before a single activation. *What gives it away: memory that does not fall with more GPUs.*

# %% [markdown]
# ## 12 · What production does
# - NeMo's Auto Configurator *runs* the best few layouts.
# - Large runs write checkpoints while they train.
# - Reserved capacity costs 40 to 70 % of these prices.
# - `fmlab plan --emit` writes a plan as a run.

# %% [markdown]
# ## Exercises
# ### Exercise 3.1.1 (core): plan T5-3B
# Two trn1.32xlarge: 32 chips of two cores, 64 ranks with 16 GiB each. Use `plan`, a loop, the panel: all but `search`, which
# judges you.


# %% exercise="3.1.1"
def layout_of_t5() -> Layout:
    """Return a layout of T5-3B's training step on two trn1.32xlarge: at most 5 % slower than the best one.

    Planned as plan("t5-3b", chip="trn1-core", layout=..., global_batch=1024, seq_len=512): 512 tokens in and
    out. It must take all 64 cores and fit. What can be chosen: data, tensor (T5-3B has 32 heads), pipeline,
    micro_batches, zero or fsdp, sequence_parallel, recompute.
    """
    # BEGIN SOLUTION
    best, least = None, float("inf")
    for tensor in (1, 2, 4, 8):
        for micro_batches in (1, 2, 4, 8, 16):
            layout = Layout(
                data=64 // tensor,
                micro_batches=micro_batches,
                fsdp=True,
                tensor=tensor,
                sequence_parallel=tensor > 1,
            )
            one = plan("t5-3b", chip="trn1-core", layout=layout, global_batch=1024, seq_len=512)
            if one.fits and one.step_seconds < least:
                best, least = layout, one.step_seconds
    return best
    # END SOLUTION


# %% check="3.1.1"
check("3.1.1", layout_of_t5)

# %% [markdown]
# ### Exercise 3.1.2 (core): audit a claim
# Somebody prints an MFU. Which of the usual slips made it, if any?


# %% exercise="3.1.2"
def slip_in(claim: dict) -> str:
    """Return what gives claim["mfu"] within 2 %: "right", "hfu", "sparse", "cores", "chips" or "unknown".

    claim: "parameters" N and "tokens_second" of all chips together; model FLOPs are 6 N a token.
    "chips"; "peak": dense FLOP/s of a chip; "cores" of a chip.
    "recomputed": "full" or "none". "mfu": as claimed, a share.

    "hfu":    recomputed FLOPs count too: full recomputation makes it 8 N a token
    "sparse": the peak is that with sparsity, twice the dense one
    "cores":  the peak is that of a core
    "chips":  the peak is that of one chip, not of all
    Each is a slip by itself. Where several give it, return the first in the order above.
    """
    # BEGIN SOLUTION
    right = 6 * claim["parameters"] * claim["tokens_second"] / (claim["chips"] * claim["peak"])
    found = {
        "right": right,
        "hfu": right * (8 / 6 if claim["recomputed"] == "full" else 1),
        "sparse": right / 2,
        "cores": right * claim["cores"],
        "chips": right * claim["chips"],
    }
    for name, mfu in found.items():
        if abs(claim["mfu"] / mfu - 1) <= 0.02:
            return name
    return "unknown"
    # END SOLUTION


# %% check="3.1.2"
check("3.1.2", slip_in)

# %% uses="3.1.2"
sixteen = dict(parameters=70e9, tokens_second=2048 * 16 * 500 / (13.5 * 3600), chips=16)
print("claim 1:", slip_in(sixteen | dict(peak=312e12, cores=1, recomputed="none", mfu=0.4551)))

# %% [markdown]
# ### Exercise 3.1.3 (optional): how many chips?
# More chips finish sooner, fail more often, and cost more. You have a deadline.


# %% exercise="3.1.3"
def fewest_chips(
    step_seconds: dict[int, float],
    steps: int,
    days: float,
    chip_hours: float,
    checkpoint: float,
) -> int:
    """Return the least number of chips with which `steps` steps are done within `days`; 0 if none is enough.

    step_seconds: number of chips -> seconds of a step. chip_hours: hours of one chip between two of its
    failures. checkpoint: seconds that writing one takes; a run checkpoints at its best interval
    (`optimal_interval`), and a restart takes 600 s (`goodput_at` gives the share of time that is training).
    """
    # BEGIN SOLUTION
    for chips in sorted(step_seconds):
        mean_time = 3600 * chip_hours / chips
        interval = optimal_interval(checkpoint, mean_time)
        share = goodput_at(interval, checkpoint, mean_time, restart=600).share
        if steps * step_seconds[chips] / share <= days * DAY:
            return chips
    return 0
    # END SOLUTION


# %% check="3.1.3"
check("3.1.3", fewest_chips)

# %% [markdown] tags=["reading"]
# ## Further reading
# - Narayanan et al. 2021, arXiv:2104.04473, sections 3 and 5: estimates of time, and what was measured.
# - Korthikanti et al. 2022, arXiv:2205.05198, section 4 and appendix A: activations; MFU and HFU.
# - Chowdhery et al. 2022, arXiv:2204.02311, section 4.1 and appendix B: MFU is defined.
# - Grattafiori et al. 2024, arXiv:2407.21783, section 3.3.4: what fails.
# - Daly 2006, *A higher order estimate of the optimum checkpoint interval*: the formula of section 8.
# - docs/planner.md: every line; docs/planner-validation.md: every publication.
