# Small GPTs live, a sweep of them from committed results (fmlab/train/scaling_runs.jsonl), and large ones on paper.

# %% [markdown]
# **You will learn** to fit a scaling law to small runs, to predict a run that you have not made, and to plan GPT-3.

# %% tags=["setup"]
import math
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from fmlab.backends import get_backend
from fmlab.backends.preflight import preflight
from fmlab.backends.tpu_aot import results
from fmlab.chips import host
from fmlab.data import encode
from fmlab.lab import Row, Table, caption, check, compare, figure, predict, show_source, within

# %% tags=["setup"]
from fmlab.lab.timeline import timeline
from fmlab.models import GPT, GPTConfig
from fmlab.parallel import Layout, parity
from fmlab.planner import chinchilla, plan, run_cost, search, training_days
from fmlab.sim import dry_run

# %% tags=["setup"]
from fmlab.train import (
    KneserNey,
    ShiftTask,
    accuracy_by_shots,
    bootstrap,
    fit_law,
    interval,
    scaling,
    scaling_sweep,
)
from fmlab.train.decode import evaluating, open_stream
from fmlab.train.scaling_sweep import SIZES, run_point, text_read, texts

# %load_ext fmlab.lab

# %% [markdown]
# ## 1 · The model, the text, the tokens
# The model is chapter [[1.3]]'s, in six sizes. The text is Python's manual and library source. A small vocabulary
# leaves most parameters in the layers.

# %%
training, validation, tokenizer = texts()
held = encode(validation, tokenizer)
per_token = scaling_sweep.num_bytes(validation) / len(held)
within("bytes in a token of the text held out", per_token, above=1.9, below=2.3)
print(tokenizer.pieces("def encode(self, text):"))

# %%
models = {name: size.build() for name, size in SIZES.items()}
Table(
    {
        "width x layers": list(models),
        "in layers": [
            m.num_parameters(embeddings=False, positions=False) for m in models.values()
        ],
        "all": [m.num_parameters() for m in models.values()],
    },
    kinds={"in layers": "measured", "all": "measured"},
    units={"in layers": "parameters", "all": "parameters"},
)

# %% [markdown]
# GPT-2 small has 124 million, GPT-3 175 billion. Below, N counts the parameters **in layers**, as Kaplan et al. did.

# %% [markdown]
# ## 2 · Train one, now
# 131,072 tokens, 256 steps. The same run was made before and committed. Yours has another processor, perhaps another
# Python, hence another text.

# %%
guess_loss = predict(
    "A guess over 512 tokens costs ln 512 = 6.24 nats. What is the loss after 256 steps?",
    unit="nats/token",
)
guess_loss

# %%
points = scaling_sweep.measured()
kept = next(p for p in points if (p.size, p.tokens, p.seed) == ("32x3", 131_072, 0))
live, run = run_point("32x3", tokens=131_072)
compare(Row("held out", yours=guess_loss, measured=live.loss, unit="nats/token", noisy=True))

# %%
within("live over kept", live.loss / kept.loss, above=0.95, below=1.05)
others = [p.loss for p in points if (p.size, p.tokens) == ("32x3", 131_072)]
within("four seeds, largest less smallest", max(others) - min(others), below=0.2, unit="nats")

# %% [markdown]
# The spread of seeds is the noise of every point below. The training curve, and those of the committed runs:

# %%
fig, ax = figure(x="tokens read [thousands]", y="training loss [nats/token]")
for name in SIZES:
    last = [p for p in points if p.size == name and p.seed == 0][-1]
    reads = (np.arange(16) + 0.5) / 16 * last.tokens / 1e3
    ax.plot(reads, last.curve, label=f"{name}, kept")
parts = scaling_sweep.in_parts(run.losses, 16)
ax.plot((np.arange(16) + 0.5) / 16 * 131.072, parts, "k.", label="32x3, now")
ax.legend(ncols=2)
caption(fig, kind="measured", text="Larger models learn more from the same text.", noisy=True)

# %% [markdown]
# ## 3 · A sweep, measured once
# Five sizes on three amounts of text, each with **its own** cosine schedule, and a sixth size held out.

# %%
seconds = sum(p.cpu_seconds for p in points)
print("python -m fmlab.train.scaling_sweep --out runs.jsonl")
print(f"{len(points)} runs, {seconds:.0f} s of one core; torch {points[0].made_on['torch']}")
print("weights of the largest, SHA-256:", max(points, key=lambda p: p.parameters).weights[:16])

# %%
sweep = [p for p in points if p.seed == 0 and p.size != scaling_sweep.HELD_OUT]
columns = {
    f"{tokens:,}": [p.loss for p in sweep if p.tokens == tokens]
    for tokens in scaling_sweep.TOKENS
}
Table(
    {"size": [name for name in SIZES if name != scaling_sweep.HELD_OUT], **columns},
    kinds=dict.fromkeys(columns, "measured"),
    units=dict.fromkeys(columns, "nats/token"),
    title="loss on the text held out, by tokens read",
)

# %% [markdown]
# Every row falls to the right, every column downwards. A **law** would say how.

# %% [markdown]
# ## 4 · The law
# Hoffmann et al. (2022) fit $L = E + A/N^\alpha + B/D^\beta$: what no model removes, what a small model loses, what
# little text loses. This is what the fit minimises:

# %%
show_source(scaling._objective)

# %%
runs = [[getattr(p, key) for p in sweep] for key in ("parameters", "tokens", "loss")]
law = fit_law(*runs)
laws = bootstrap(*runs, resamples=40)
off = np.abs(law.loss(runs[0], runs[1]) / np.array(runs[2]) - 1).max()
within("furthest run from the law, as a share", off, below=0.04)

# %% [markdown]
# Now the size that the fit never saw, four times the largest, on half a million tokens:

# %%
unseen = next(p for p in points if p.size == scaling_sweep.HELD_OUT)
guess_unseen = predict("What is the loss of 128x4?", unit="nats/token")
guess_unseen

# %%
said = law.loss(unseen.parameters, unseen.tokens)
low, high = interval(laws, lambda one: one.loss(unseen.parameters, unseen.tokens))
compare(
    Row(
        "128x4",
        yours=guess_unseen,
        formula=said,
        measured=unseen.loss,
        unit="nats/token",
        digits=2,
    )
)

# %%
print(f"the middle 80 % of 40 fits to runs drawn again: {low:.1f} to {high:.1f} nats/token")
within("measured over predicted", unseen.loss / said, above=0.93, below=1.07)

# %%
fig, ax = figure(
    x="N [parameters in layers]", y="loss [nats/token]", title="The law and its runs"
)
grid = np.geomspace(5e3, 1e6, 40)
for tokens, mark in zip(scaling_sweep.TOKENS, "osD", strict=True):
    line = ax.plot(grid, law.loss(grid, tokens), label=f"{tokens:,} tokens")[0]
    made = [p for p in sweep if p.tokens == tokens]
    ax.plot([p.parameters for p in made], [p.loss for p in made], mark, color=line.get_color())
ax.plot([unseen.parameters], [unseen.loss], "k*", ms=14, label="held out")
ax.set_xscale("log")
ax.legend(loc="lower left")
caption(
    fig, kind="measured", text="Lines: the law, fitted to all marks but the star.", noisy=True
)

# %% [markdown]
# And the constants? Each of the 40 fits has its own:

# %%
shown = {"E": "floor", "alpha": "alpha", "beta": "beta"}
ends = [interval(laws, lambda one, key=key: getattr(one, key)) for key in shown.values()]
Table(
    {
        "constant": list(shown),
        "low": [low for low, _ in ends],
        "high": [high for _, high in ends],
        "Hoffmann et al.": [1.69, 0.34, 0.28],
    },
    kinds={"low": "modelled", "high": "modelled", "Hoffmann et al.": "quoted"},
    source="arXiv:2203.15556, appendix D.3",
    digits=2,
    noisy=("low", "high"),
)

# %% [markdown]
# **Scaling holds as a forecast, not as constants.** Very different constants give nearly the same line where there are
# runs. Besiroglu et al. (2024) found the printed Chinchilla intervals far too narrow, too.

# %% [markdown]
# ## 5 · Is it any good?
# Nats per token depend on the tokenizer. **Bits per byte** do not. The baseline is an n-gram model with Kneser-Ney
# smoothing, on the very rows that the GPTs read.

# %%
show_source(KneserNey.nats)

# %%
guess_grams = predict(
    "Half a million tokens: bits per byte of 5-grams, if the largest GPT has about 2.5?",
    unit="bits/byte",
)
guess_grams

# %%
size = scaling_sweep.num_bytes(validation)
grams = {
    tokens: KneserNey.fit(text_read(tokens), order=5, vocab_size=512)
    for tokens in scaling_sweep.TOKENS
}
bits = [model.nats(held.ids).sum() / math.log(2) / size for model in grams.values()]
compare(
    Row("5-grams", yours=guess_grams, measured=bits[-1], unit="bits/byte", noisy=True),
    Row("GPT, 128x4", measured=unseen.bits_per_byte, unit="bits/byte"),
)

# %%
fig, ax = figure(x="tokens read [thousands]", y="held out [bits/byte]", title="Equal text")
thousands = [tokens / 1e3 for tokens in grams]
ax.plot(thousands, bits, "s--", label="5-grams, Kneser-Ney")
for name in ("16x2", "32x3", "64x4"):
    ax.plot(thousands, [p.bits_per_byte for p in sweep if p.size == name], "o-", label=name)
ax.plot([unseen.tokens / 1e3], [unseen.bits_per_byte], "k*", ms=12, label="128x4")
ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
caption(fig, kind="measured", text="Lower is better.", noisy=True)

# %% [markdown]
# **The n-grams win.** Source repeats itself, and one pass counts it. They keep more numbers than there are tokens; a GPT
# of this size must learn each weight by small steps, from half a million tokens.

# %%
within("n-grams that are kept", grams[524_288].num_grams, above=3e5, below=9e5)
within("bits per byte that the GPT loses by", unseen.bits_per_byte - bits[-1], above=0.05)

# %% [markdown]
# ## 6 · What the context gives
# The weights stay; only the text before grows. The loss at each position of a row:

# %%
fig, ax = figure(x="position in the row [tokens]", y="loss [nats/token]", title="Reading on")
edges = 2 ** np.arange(8)
for name in ("16x2", "64x4", "128x4"):
    last = [p for p in points if p.size == name and p.seed == 0][-1].by_position
    means = [np.mean(last[a - 1 : 2 * a - 1]) for a in edges[:-1]]
    ax.plot(edges[:-1] * 1.5, means, "o-", label=name)
ax.set_xscale("log")
ax.legend()
caption(
    fig, kind="measured", text="Means over positions 1, 2-3, 4-7, ... of the rows held out."
)

# %%
early, late = np.mean(unseen.by_position[:8]), np.mean(unseen.by_position[64:])
within("positions 65-128 less 1-8, 128x4", late - early, below=-0.05, unit="nats")

# %% [markdown]
# That is *in-context learning* in the weak sense. The strong one: a task that **only** the context tells. In each row
# $y = (x + r) \bmod 5$, with another $r$.

# %%
task = ShiftTask()
rows = task.batch(2, seed=3)["input_ids"].reshape(2, -1, 2)
for row in rows:
    print(" ".join(f"{x}→{y - 5}" for x, y in row.tolist()))

# %%
guess_shots = predict("Accuracy after ONE example, if the rule is learnt?", unit="%")
guess_shots

# %%
learner, losses = task.learn(steps=600)
test = task.batch(1000, seed=1)
found, copied = accuracy_by_shots(learner, test), task.copied(test)
compare(
    Row("no example", formula=20, measured=100 * found[0].item(), unit="%", noisy=True),
    Row("one example", guess_shots, 100, round(100 * found[1].item()), unit="%"),
)

# %%
fig, axes = figure(
    x=["examples read [shots]", "step [number]"],
    y=["right [%]", "loss [nats]"],
    title=["In context", "While training"],
)
axes[0].plot(100 * found, "o-", label="GPT")
axes[0].plot(100 * copied, "s--", label="copies")
axes[0].axhline(20, color="k", ls=":", label="guesses")
axes[0].legend()
axes[1].plot(losses)
text = "One example tells the rule; a copier needs the same question."
caption(fig, kind="measured", text=text, noisy=True)

# %% [markdown]
# The loss waits at ln 5, then falls: heads that *find* an example are useless before others *use* it (Olsson et al.
# 2022 saw the same in large models).

# %% [markdown]
# ## 7 · What it writes
# The largest kept model, after `The "with" statement`:

# %%
print(unseen.sample[:240])

# %% [markdown]
# Form before meaning: indents, names, brackets. The live one can go on, too; text depends on the machine.

# %% tags=["timing"]
print(run.generate("def read(", max_new_tokens=40, temperature=0.7, top_p=0.9))

# %% [markdown]
# From the shell, resumable, with TensorBoard, exported for `transformers`:
#
# ```bash
# fmlab train gpt2-tiny --corpus python-docs+python-source --steps 2000 --out run --tensorboard
# fmlab train gpt2-tiny --corpus python-docs+python-source --steps 4000 --out run --tensorboard --resume
# python -c "import transformers as t; print(t.pipeline('text-generation', 'run/model')('def '))"
# ```

# %% [markdown]
# ## 8 · One step, every chip
# GPT-2 small, 8 rows of 1,024 tokens, simulated on one chip of each kind:

# %%
steps = {
    name: dry_run("gpt2", chip=name, global_batch=8, seq_len=1024, micro_batches=1)
    for name in ("h100", "tpu-v5p", "trn2")
}
Table(
    {"chip": list(steps)}
    | {"step": [1e3 * one.seconds for one in steps.values()]}
    | {"utilisation": [100 * one.utilisation() for one in steps.values()]}
    | {"memory": [one.peak_memory / 2**30 for one in steps.values()]},
    kinds={"step": "modelled", "utilisation": "modelled", "memory": "modelled"},
    units={"step": "ms", "utilisation": "% of peak", "memory": "GiB"},
)

# %%
timeline(steps["h100"])

# %% [markdown]
# Forward is long since our loss makes its gradients there, and keeps no logits. Peak rates: a bound. What Google's
# compiler said of our step, ahead of time (committed; chapter [[3.2]] runs it on torch_xla):

# %%
ahead = next(r for r in results() if r["model"] == "gpt2" and r["outcome"] == "compiled")
print(ahead["command"])
print(f"{ahead['target']}: {int(ahead['hbm_bytes']) / 2**30:.1f} GiB, in {ahead['seconds']} s")

# %% [markdown]
# ### Growing text, fixed shapes
# Each new token makes the text one longer. On a chip with a static-shape compiler, each length is a program.

# %%
guess_programs = predict(
    "Programs for 12 new tokens, with a cache that grows?", unit="programs"
)
guess_programs


# %%
def programs(tokens, static):
    backend = get_backend("sim:trn2")
    torch.manual_seed(0)
    model = backend.to_device(GPT.from_preset("gpt2-tiny")).eval()
    backend.chip.reset()
    with evaluating(model):
        stream = open_stream(model, [[72, 105]], tokens, static)
        logits = stream.start()
        for _ in range(tokens):
            logits = stream.step(torch.tensor([int(logits.argmax(-1))]))
        int(logits.argmax(-1))
    return backend.chip.totals.compiles


# %%
grows, static = programs(12, static=False), programs(12, static=True)
compare(
    Row("growing", guess_programs, formula=13, measured=grows, unit="programs"),
    Row("static cache", formula=2, measured=static, unit="programs"),
)

# %% [markdown]
# One for the prompt, one for **every** token after it. And the training step, watched by the pre-flight for Trainium:

# %%
tokens = torch.randint(4096, (6, 2, 65))
batches = [{"input_ids": t[:, :-1], "labels": t[:, 1:]} for t in tokens]
report = preflight(
    GPT.from_preset("gpt2-tiny"), batches, lambda m, b: m(**b)["loss_sum"] / 128, chip="trn2"
)
print("errors and warnings:", sum(f.severity != "note" for f in report.findings))

# %% [markdown]
# ## 9 · Layouts on real ranks
# A decoder is a stack of equal layers with many heads: cut the heads (tensor), then the stack (pipeline).

# %%
config = GPTConfig(vocab_size=101, max_positions=32, num_layers=4, hidden_size=32, num_heads=4)
build_small = partial(GPT, config)
suits = (Layout(tensor=4), Layout(tensor=2, pipeline=2, micro_batches=2))

# %%
# %%ranks 4 -t 240
for layout in suits:
    report = parity(build_small, layout, precision="fp64", steps=1)
    if rank == 0:
        print(
            f"tensor {layout.tensor} x pipeline {layout.pipeline}: one device's gradients: {report.ok}"
        )

# %% [markdown]
# Four heads do not divide by three, and six blocks make no seven stages:

# %%
for layout in (Layout(tensor=3), Layout(pipeline=7, micro_batches=7)):
    try:
        layout.validate(layout.world_size, 21, GPT.from_preset("gpt2-tiny"))
    except ValueError as error:
        print(str(error)[-160:])

# %% [markdown]
# ## 10 · GPT-3 on 1,024 chips
# Narayanan et al. (2021, section 5.1) estimate 34 days: 300 billion tokens, 1,024 A100, 1,536 rows a step, layers
# recomputed. Our plan of these degrees, with fused attention ([[#3.1]] plans it as it was in 2021: 36 days):

# %%
theirs = Layout(tensor=8, pipeline=8, data=16, micro_batches=96, recompute="full")
planned = plan(
    "gpt3-175b",
    host="p4de.24xlarge",
    chips=1024,
    layout=theirs,
    global_batch=1536,
    seq_len=2048,
)
simulated = dry_run(
    "gpt3-175b", host="p4de.24xlarge", tensor=8, pipeline=8, data=16, micro_batches=96,
    global_batch=1536, seq_len=2048, recompute="full", link_latency=3e-6, network_latency=15e-6,
)  # fmt: skip

# %%
guess_days = predict("How many days does our plan take?", unit="days")
guess_days

# %%
run_of = partial(run_cost, tokens=300e9, chips=1024, host="p4de.24xlarge")
cost = run_of(planned.step_seconds, planned.tokens_per_step)
lower = run_of(simulated.seconds, 1536 * 2048)
by_hand = training_days(flops=8 * 175e9 * 300e9, chips=1024, flops_per_chip=140e12)
said = dict(
    quoted=34, unit="days", source="Narayanan et al. 2021, arXiv:2104.04473, section 5.1"
)
compare(
    Row("planned", guess_days, cost.days, **said),
    Row("simulated at peak rates", formula=lower.days, **said),
    Row("from 140 TFLOP/s a chip", formula=by_hand, **said),
)

# %% [markdown]
# 8 FLOPs for each parameter and token: 6 and the recomputed forward pass. Now the best layout that the planner finds on
# 1,024 chips of each kind, and what it costs:

# %%
hosts = ["p4de.24xlarge", "p5.48xlarge", "tpu-v4-host", "tpu-v5p-host"]
hosts += ["trn1.32xlarge", "trn2.48xlarge"]
wanted = dict(chips=1024, global_batch=1536, seq_len=2048)
best = {name: search("gpt3-175b", host=name, **wanted).best for name in hosts}
unpriced = {name for name in hosts if not host(name).prices}


# %%
def cost_of(name, one):
    price = {"usd_per_chip_hour": 1.0} if name in unpriced else {"host": name}
    return run_cost(one.step_seconds, one.tokens_per_step, 300e9, 1024, **price)


costs = {name: cost_of(name, one) for name, one in best.items()}
dollars = [None if name in unpriced else one.usd / 1e6 for name, one in costs.items()]
layouts = [one.setup.layout for one in best.values()]

# %%
Table(
    {"host": list(best)}
    | {"t x p x d": [f"{a.tensor} x {a.pipeline} x {a.data}" for a in layouts]}
    | {"days": [one.days for one in costs.values()]}
    | {"utilisation": [100 * one.mfu for one in best.values()]}
    | {"cost": dollars},
    kinds={"days": "modelled", "utilisation": "modelled", "cost": "modelled"},
    units={"utilisation": "% of peak", "cost": "million USD"},
    digits=2,
)

# %% [markdown]
# All modelled, with any schedule ([[#3.1]] allows two), at list prices dated in `fmlab chips`; two have no published
# price. Nobody trained for these days: failures and restarts come on top (chapter [[3.1]]).

# %%
# 3.43 USD: an A100's eighth of an on-demand p4de.24xlarge, quoted in fmlab.chips
small = plan("gpt2", chip="a100-80gb", chips=1, global_batch=32, seq_len=1024)
one = run_cost(small.step_seconds, small.tokens_per_step, 10e9, 1, usd_per_chip_hour=3.43)
budget = chinchilla(6 * 174.6e9 * 300e9)
print(f"GPT-2 small, 10 billion tokens, one A100: {one.days:.1f} days (modelled)")
print(f"GPT-3's FLOPs today, by Hoffmann's fit: {budget}")

# %% [markdown]
# ## 11 · What breaks
# **One number for all widths.** GPT-2's first weights have a deviation of 0.02, fit for its width of 768: that is
# $0.55/\sqrt{768}$. The sweep has $0.5/\sqrt{width}$. What does 0.02 do at a width of 24?

# %%
shape = replace(SIZES["24x2"].build().config, init_std=0.02)
torch.manual_seed(0)
settings = scaling_sweep.settings(SIZES["24x2"], 131_072)
slow = scaling_sweep.in_parts(
    scaling_sweep.train(settings, model=GPT(shape), tokenizer=tokenizer).losses, 16
)
good = next(p for p in points if (p.size, p.tokens) == ("24x2", 131_072)).curve
within("0.02 less the sweep's, end of the run", slow[-1] - good[-1], above=0.1, unit="nats")

# %% [markdown]
# Nothing fails. The size is just worse, and a law fitted to such runs is a law of the recipe. Whatever a recipe fixes
# must suit **every** width, learning rate included.

# %% [markdown]
# **Reading a short run off a long one.** Halfway through 262,144 tokens, a run has read 131,072. Is its loss that of a
# run of 131,072?

# %%
short, long = (
    next(p.curve for p in points if (p.size, p.tokens, p.seed) == ("64x4", tokens, 0))
    for tokens in (131_072, 262_144)
)
within("apart, in training loss", abs(long[7] - short[-1]), above=0.03, unit="nats")

# %% [markdown]
# No: each had its own learning rates. Hoffmann et al. (section 2) found such losses too **high**. Ours is too **low**:
# so short a run loses more by slowing down early. Either way, train each point to its own end.

# %% [markdown]
# ## Exercises
# ### Exercise 3.4.1 (core): bits per byte
# Rows of different lengths, a mean loss each. What does a byte cost?


# %% exercise="3.4.1"
def bits_per_byte(losses: list[float], counts: list[int], text: str) -> float:
    """Return the bits per byte of a text.

    losses[i]: mean loss of row i in nats per token; counts[i]: its tokens. All rows together are the text,
    whose bytes are those of its UTF-8.
    """
    # BEGIN SOLUTION
    nats = sum(loss * count for loss, count in zip(losses, counts, strict=True))
    return nats / math.log(2) / len(text.encode())
    # END SOLUTION


# %% check="3.4.1"
check("3.4.1", bits_per_byte)

# %% [markdown]
# ### Exercise 3.4.2 (core): spend a budget
# With $C = 6ND$ FLOPs, which size is best? The law's minimum is where the two terms fall at equal rates:
# $\alpha A/N^\alpha = \beta B/D^\beta$.


# %% exercise="3.4.2"
def best_size(A: float, alpha: float, B: float, beta: float, flops: float) -> float:
    """Return the parameters N whose loss E + A/N**alpha + B/D**beta is least, with 6 N D = flops."""
    # BEGIN SOLUTION
    spent = flops / 6
    g = (alpha * A / (beta * B)) ** (1 / (alpha + beta))
    return g * spent ** (beta / (alpha + beta))
    # END SOLUTION


# %% check="3.4.2"
check("3.4.2", best_size)

# %% uses="3.4.2"
for name, flops in (("BERT-large", 5e20), ("GPT-3", 3.14e23)):
    print(
        f"{name}'s FLOPs: {best_size(406.4, 0.34, 410.7, 0.28, flops) / 1e9:.1f} billion parameters"
    )

# %% [markdown]
# ### Exercise 3.4.3 (optional): Kneser and Ney
# Bigrams with one discount. A word's share of the rest is how many *different* words it follows.


# %% exercise="3.4.3"
def kneser_ney(text: list[str], context: str, word: str, discount: float) -> float:
    """Return p(word | context) of interpolated Kneser-Ney bigrams counted in the text.

    max(c(context word) - discount, 0) / c(context *), plus discount x (different words after context)
    / c(context *) x (different words before word) / (different bigrams). The context occurs.
    """
    # BEGIN SOLUTION
    pairs = list(pairwise(text))
    kinds = set(pairs)
    after = [pair for pair in pairs if pair[0] == context]
    share = sum(b == word for _, b in kinds) / len(kinds)
    freed = discount * len(set(after)) / len(after)
    return max(after.count((context, word)) - discount, 0) / len(after) + freed * share
    # END SOLUTION


# %% check="3.4.3"
check("3.4.3", kneser_ney)

# %% [markdown] tags=["reading"]
# ## Further reading
# - Hoffmann et al. 2022, *Training Compute-Optimal Large Language Models*, arXiv:2203.15556: section 3.3, appendix D.3.
# - Besiroglu et al. 2024, *Chinchilla Scaling: A replication attempt*, arXiv:2404.10102.
# - Kaplan et al. 2020, arXiv:2001.08361: section 2 (what N counts). Brown et al. 2020, arXiv:2005.14165: section 2.
# - Narayanan et al. 2021, arXiv:2104.04473: section 5.1. Olsson et al. 2022, arXiv:2209.11895: induction heads.
# - Chen and Goodman 1998, TR-10-98: section 3, Kneser-Ney smoothing.
