# %% [markdown]
# **You will learn** who spends the time and the memory of a training step, layer by layer, and which chapter goes into each
# layer.

# %% tags=["setup"]
from collections import Counter
from itertools import pairwise

import torch
from fmlab.compiler import Fusion, PassManager, SplitBias, capture, default_passes, optimize
from fmlab.compiler import graph as graphs
from fmlab.lab import Row, Table, caption, check, compare, figure, predict, show_source
from fmlab.lab import map as stack
from fmlab.lab.figures import PALETTE
from fmlab.lab.map import STACK, kind_of, layer_of, on_chip, shares, train_step
from fmlab.lab.map_view import layers_view, map_view, timeline_view
from fmlab.lab.roofline import operations
from fmlab.meter import saved_activations
from fmlab.models import GPT
from fmlab.train.precision import bits_of

# %load_ext fmlab.lab

# %% [markdown]
# ## 1 · Four lines, six layers
# Every training loop repeats forward, backward, update, and clearing the gradients. We follow one such **step** from
# Python down to bits and wires.

# %%
show_source(stack, region="step")

# %% [markdown]
# Six layers of software and hardware carry it out. We say that a layer **owns** the time and the memory that it could make
# smaller. You need not know the words yet: each has a section below.

# %%
Table(
    {
        "layer": [layer.name for layer in STACK],
        "what it does": [layer.does for layer in STACK],
        "owns this time": [layer.time for layer in STACK],
        "owns this memory": [layer.memory for layer in STACK],
    }
)

# %% [markdown]
# Our step: gpt2-tiny on 8 rows of 128 pieces, as in 0.1. First on this computer.

# %% tags=["setup"]
ROWS, LENGTH = 8, 128
torch.manual_seed(0)
model = GPT.from_preset("gpt2-tiny")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
text = torch.randint(4096, (ROWS, LENGTH + 1))
ids, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
N = model.num_parameters()

# %% [markdown]
# ## 2 · Front end: lines become operators
# Python calls modules, modules call PyTorch, and PyTorch runs one **operator** after the other: a matrix product, a sum, a
# softmax. `operations` writes down those that do work.

# %%
guess_calls = predict(
    "4 layers, forward, backward, update: how many operators run in one step?", unit="operators"
)
guess_calls

# %%
train_step(model, optimizer, ids, labels, bf16=False)  # the first also makes AdamW's averages
work = operations(lambda: train_step(model, optimizer, ids, labels, bf16=False))
print("it begins:", ", ".join(one.name for one in work[:7]))
print("it ends:  ", ", ".join(one.name for one in work[-4:]))
compare("operators in a step", yours=guess_calls, measured=len(work), unit="operators")

# %% [markdown]
# Python issues each of them, one by one. Remember that for section 8. And backward? Nobody wrote it: while forward runs,
# PyTorch notes how to go back.

# %% [markdown]
# ## 3 · Graph: operators with arrows
# A compiler wants all operators before any runs. `capture` runs the model on tensors without numbers and notes down a
# **graph**: who reads whose result. This is a piece of a layer:

# %%
program = capture(model, kwargs={"input_ids": ids, "labels": labels})
lines = str(program).splitlines()
first = next(at for at, line in enumerate(lines) if "gelu(" in line)
for line in lines[first - 3 : first + 4]:
    print(line[:100])

# %% [markdown]
# A line is a **node**: its name, format and shape, the operator, and whose results it reads. The forward graph by kind; a
# *view* is another look at the same memory and costs nothing:

# %%
count = Counter()
for node in graphs.calls(program.graphs["forward"]):
    count["views" if graphs.is_view(node) else kind_of(graphs.name(node))] += 1
Table({"kind": list(count), "nodes": list(count.values())}, kinds={"nodes": "measured"})

# %% [markdown]
# With a graph in hand, a compiler **fuses**: small operators that follow one another become one, and what passes
# between them never goes through memory.

# %%
guess_fused = predict(
    "Leave views aside. Which share of the other nodes is left after fusion?", unit="%"
)
guess_fused


# %%
def working(graph):
    return [node for node in graphs.calls(graph) if not graphs.is_view(node)]


before = sum(len(working(graph)) for graph in program.graphs.values())
optimize(program, PassManager([*default_passes(), SplitBias(), Fusion()]))
after = sum(len(working(graph)) for graph in program.graphs.values())
print("at least a tenth of the nodes is gone:", after < 0.9 * before)
compare("nodes left", yours=guess_fused, measured=100 * after / before, unit="%", noisy=True)

# %% [markdown]
# Chapter [[#1.13]] writes such rules, counts the bytes that they save, and turns the groups into C++ that runs.

# %% [markdown]
# ## 4 · Kernels: what an operator costs
# A **kernel** is the program that carries out an operator: it reads memory, computes, writes. Two numbers describe it:
# floating point operations (FLOPs), and bytes moved if no cache helps.

# %%
guess_bytes = predict(
    "Matrix products do nearly all FLOPs. Which share of the bytes do they move?", unit="%"
)
guess_bytes

# %%
calls, flops, moved = Counter(kind_of(one.name) for one in work), Counter(), Counter()
for one in work:
    flops[kind_of(one.name)] += one.flops
    moved[kind_of(one.name)] += one.bytes
Table(
    {
        "kind": list(calls),
        "calls": list(calls.values()),
        "FLOPs": [flops[kind] / 1e6 for kind in calls],
        "moved": [moved[kind] / 1e6 for kind in calls],
    },
    kinds={"calls": "measured", "FLOPs": "measured", "moved": "modelled"},
    units={"FLOPs": "MFLOP", "moved": "MB"},
)

# %%
c = model.config
matrices = 12 * c.num_layers * c.hidden_size**2 + c.vocab_size * c.hidden_size
formula = 6 * matrices * ROWS * LENGTH / 1e6
share = 100 * moved["products"] / sum(moved.values())
compare(
    Row("FLOPs of products", formula=formula, measured=flops["products"] / 1e6, unit="MFLOP"),
    Row("bytes of products", guess_bytes, formula=share, unit="%"),
)

# %% [markdown]
# Six FLOPs for each weight of a matrix and each token: two forward, four backward (chapter [[#1.3]]). Small operators compute
# next to nothing and move most of the bytes: the loss alone goes over 4 million probabilities.

# %% [markdown]
# ## 5 · Memory: what is alive, and when
# We watch two steps from the first weight on, and note after each operator how many bytes of tensors are alive.

# %%
guess_peak = predict(
    "The weights take 5.4 MB. How much is alive at the fullest moment of a step?", unit="MB"
)
guess_peak

# %%
marks = [0]
with stack.memory_line() as line:
    fresh = GPT.from_preset("gpt2-tiny")
    adam = torch.optim.AdamW(fresh.parameters(), lr=1e-3, fused=True)
    marks.append(len(line))
    for _ in range(2):
        loss = fresh(ids, labels=labels).loss_sum / labels.numel()
        marks.append(len(line))
        loss.backward()
        marks.append(len(line))
        adam.step()
        adam.zero_grad()
        marks.append(len(line))

# %%
names = ["make the model"] + ["forward", "backward", "update"] * 2
fig, ax = figure(x="operator [number]", y="alive [MB]", title="Two steps", height=2.6)
for at, (start, end) in enumerate(pairwise(marks)):
    colour, label = PALETTE[(at - 1) % 3 + 1 if at else 0], names[at] if at < 4 else None
    span = range(start, end)
    ax.fill_between(span, [line[at] / 1e6 for at in span], color=colour, label=label, lw=0)
ax.set_ylim(bottom=0)
ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
text = "Forward fills memory, backward empties it, the first update leaves two averages behind."
ends = [line[end - 1] / 1e6 for end in marks[1:]]
numbers = {"alive at the end of each part [MB]": ends, "most [MB]": max(line) / 1e6}
caption(fig, kind="measured", text=text, numbers=numbers)

# %% [markdown]
# What forward keeps for backward are **activations**; they grow with the batch. Weights and AdamW's averages, its
# *moments*, do not. Each part can be predicted:

# %%
from fmlab.parallel.activations import Run, layer_shape, total

shape, tokens = layer_shape(fresh.blocks[1]), ROWS * LENGTH
ledger = {
    "weights, 4 bytes each": 4 * N,
    "AdamW's averages, 8 bytes": 8 * N,
    "activations of 4 layers": total(shape, Run(ROWS, LENGTH), c.num_layers),
    "the loss: a probability for each piece": 4 * tokens * c.vocab_size,
    "first gradients, of the head": 4 * (c.vocab_size + tokens) * c.hidden_size,
}
compare(
    *(Row(name, formula=size / 1e6, unit="MB") for name, size in ledger.items()),
    Row("peak", guess_peak, sum(ledger.values()) / 1e6, max(line) / 1e6, unit="MB", digits=2),
)

# %% [markdown]
# Chapter [[#2.1]] derives each line. Where are the gradients? The peak comes at the end of forward, before most of them
# exist. Whoever measures the first step alone misses the moments, too.

# %% [markdown]
# ## 6 · Bits: how wide is a number?
# All this was **fp32**, four bytes a number. Chips multiply matrices of **bf16** several times faster: two bytes, the same
# range, fewer digits.

# %%
for name in ("fp32", "bf16"):
    one = bits_of(0.1, name)
    print(f"0.1 in {name}: {one.sign} {one.exponent} {one.mantissa:23} = {one.value:.7g}")

# %% [markdown]
# A sign, 8 bits for the power of two, and 23 or 7 for the fraction. Chapter [[#1.15]] takes such numbers apart.

# %% [markdown]
# **Autocast** computes matrix products in bf16 and keeps what is fragile in fp32: weights, sums, the update. Which format
# is where?

# %%
guess_narrow = predict(
    "With autocast: which share of the activations' bytes is bf16?", unit="%"
)
guess_narrow

# %%
with saved_activations(model) as saved, torch.autocast("cpu", torch.bfloat16):
    loss = model(ids, labels=labels).loss_sum / labels.numel()
loss.backward()

# %%
held = Counter()
moments = [m for state in optimizer.state.values() for m in state.values() if m.dim()]
gradients = [p.grad for p in model.parameters()]
for what, tensors in (
    ("weights", model.parameters()),
    ("gradients", gradients),
    ("moments", moments),
):
    for one in tensors:
        held[what, str(one.dtype).removeprefix("torch.")] += one.nbytes / 1e6
for dtype, size in saved.by_dtype.items():
    held["activations", dtype] = size / 1e6
optimizer.zero_grad()

# %%
Table(
    {"what": [what for what, _ in held]}
    | {"format": [dtype for _, dtype in held], "size": list(held.values())},
    kinds={"size": "measured"},
    units={"size": "MB"},
)

# %%
both = [size for (what, _), size in held.items() if what == "activations"]
share = 100 * held["activations", "bfloat16"] / sum(both)
compare("activations in bf16", yours=guess_narrow, measured=share, unit="%")

# %% [markdown]
# States stay wide, so that small updates are not lost. (On CPUs our attention works in fp32, and so keeps more of it than
# on a chip.)

# %% [markdown]
# ## 7 · Wires: what leaves the chip
# Two ranks, each with half of the rows, add up their gradients of P bytes. Chapter [[#0.2]] gave what each sends:
# $2\frac{n-1}{n}P$, here with n = 2.

# %%
guess_wire = predict("1,350,400 gradients of 4 bytes: what does each rank send?", unit="MB")
guess_wire

# %%
# %%ranks 2 -o sent
from fmlab import meter
from fmlab.objectives import CausalLM
from fmlab.parallel import Layout, parallelize
from fmlab.train import adamw

engine = parallelize(GPT.from_preset("gpt2-tiny"), Layout(data=2), CausalLM(), adamw(1e-3))
mine = engine.layout.split({"input_ids": ids, "labels": labels}, rank)
engine.step(mine)
dist.barrier()
with meter.traffic() as asked, meter.wire(required=False) as cable:
    engine.step(mine)
    dist.barrier()
engine.close()
(asked.bytes("all_reduce") / 1e6, cable.sent and round(cable.sent, -4) / 1e6)

# %%
payload, wire = sent[0]
compare(
    Row("all-reduced", formula=4 * N / 1e6, measured=payload, unit="MB"),
    Row("sent by rank 0", guess_wire, 2 * (1 / 2) * 4 * N / 1e6, wire, unit="MB"),
)

# %% [markdown]
# Ranks add up a few bytes more: how many targets there are, and the losses. On the wire each message has a header.
# Chapter [[#2.2]] hides this traffic behind backward.

# %% [markdown]
# ## 8 · The same step on three chips
# A simulated chip runs the same lines in bf16 and charges each operator to a clock: FLOPs over peak rate, or bytes over
# memory bandwidth, whichever is longer. Its times are **modelled**.

# %%
CHIPS = {"H100": "h100", "TPU v5p": "tpu-v5p", "Trainium2": "trn2"}
tiny = {name: on_chip(key, "gpt2-tiny", ROWS, LENGTH) for name, key in CHIPS.items()}

# %% [markdown]
# PyTorch feeds an H100 operator by operator. That Python needs 5 µs to issue one is our **assumption**. TPU and Trainium
# are given a compiled graph, all at once.

# %%
guess_wait = predict(
    "gpt2-tiny on an H100: in which part of the step does the chip wait for Python?", unit="%"
)
guess_wait

# %%
wait = shares(tiny["H100"].time)["front end"]
compare("waiting for Python", yours=guess_wait, formula=wait, unit="%")

# %% [markdown]
# A faster chip would not help. What if the H100, too, were given the step as a graph?

# %%
guess_graph = predict("How many times faster is the step then?", unit="x")
guess_graph

# %%
graph = on_chip("h100", "gpt2-tiny", ROWS, LENGTH, execution="compiled")
ratio = tiny["H100"].step / graph.step
compare("faster", yours=guess_graph, formula=ratio, unit="x", digits=2)

# %%
rows = {"H100": tiny["H100"], "H100, as a graph": graph} | tiny
timeline_view(rows, "White: the chip has nothing to do. Each chip's own step fills the width.")

# %% [markdown]
# On the first row kernels take half a microsecond, on average, and each is followed by more than four of waiting. The broad
# piece in the middle is the loss. Chapters 1.11 and 1.13 make graphs.

# %% [markdown]
# ## 9 · A larger step
# Or give each operator more to do. GPT-2 medium has 355 million weights, and gets 8 rows of 1,024 pieces. These runs have
# shapes and no numbers, so they fit everywhere.

# %%
guess_large = predict("And now: in which part of the step does the H100 wait?", unit="%")
guess_large

# %%
large = {name: on_chip(key, "gpt2-medium", 8, 1024) for name, key in CHIPS.items()}
wait = shares(large["H100"].time)["front end"]
compare("waiting for Python", yours=guess_large, formula=wait, unit="%", digits=1)

# %%
steps = {f"{name}, tiny": one for name, one in tiny.items()}
steps |= {f"{name}, medium": one for name, one in large.items()}
text = (
    "One of eight chips; gradients travel in 25 MiB buckets over all links, latency left out."
)
layers_view(steps, text)

# %%
bound = [shares(one.bound()) for one in large.values()]
Table(
    {
        "GPT-2 medium on": list(large),
        "step": [1e3 * one.step for one in large.values()],
        "bound by computing": [one["compute"] for one in bound],
        "bound by memory": [one["memory"] for one in bound],
    },
    kinds=dict.fromkeys(("step", "bound by computing", "bound by memory"), "modelled"),
    units={"step": "ms", "bound by computing": "%", "bound by memory": "%"},
)

# %% [markdown]
# These are peak rates, which no chip reaches ([[#1.9]]). *Computing* binds products of large matrices, *memory* all else. The
# layer that owned the small step owns nothing of the large one: look whose time yours is.

# %% [markdown]
# ## 10 · The map
# One page: what each layer owns of the two steps on an H100, and the chapters that go into it.

# %%
map_view(
    {"gpt2-tiny": tiny["H100"], "GPT-2 medium": large["H100"]},
    "From Python at the top to the wires below. Memory is that of the fullest moment.",
)

# %% [markdown]
# | Layer | How deep do you want to go? |
# |---|---|
# | front end | [[1.11]], [[1.12]] |
# | graph | [[1.13]], [[2.1]] |
# | kernels | [[1.9]], [[1.14]], [[1.2]] |
# | bits | [[1.15]] |
# | states | [[2.1]], [[2.3]], [[2.4]] |
# | wires | [[1.10]], [[2.2]], [[2.5]], [[2.6]] |
# | all of them at once | [[3.1]], [[3.2]] |

# %% [markdown]
# ## What production systems do
# They profile: `torch.profiler` on CPUs and GPUs, XProf on TPUs, Neuron Explorer on Trainium. All record when each operator
# ran. Our step on *this* CPU, in fp32:

# %%
import os

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own messages stay silent
cpu = [torch.profiler.ProfilerActivity.CPU]
for _ in range(3):  # the last one counts
    with (
        torch.profiler.profile(activities=cpu) as profile,
        torch.profiler.record_function("step"),
    ):
        train_step(model, optimizer, ids, labels, bf16=False)

# %% tags=["timing"]
events = profile.key_averages()
spent = dict.fromkeys((layer.name for layer in STACK), 0.0)
for event in events:
    if event.key.startswith("aten::"):
        spent[layer_of(event.key)] += event.self_cpu_time_total / 1e3
whole = sum(event.cpu_time_total for event in events if event.key == "step") / 1e3
spent["front end"] = whole - sum(spent.values())
Table(
    {"layer": list(spent), "time": list(spent.values())},
    kinds={"time": "measured"},
    units={"time": "ms"},
    noisy=["time"],
)

# %% [markdown]
# The same layers, other shares: kernels take so long on a CPU that Python hardly matters. Chapter [[#1.9]] reads such a record
# event by event.

# %% [markdown]
# Against waiting for Python, production records a step once and replays it: CUDA graphs on GPUs, compiled programs on TPU
# and Trainium.

# %% [markdown]
# ## What breaks: a stop-watch that does not wait
# On a GPU, `loss.backward()` returns when Python has *issued* the work, not when the chip has done it. Somebody stops the
# time around the step of GPT-2 medium, on an H100:

# %%
one, peak = large["H100"], 989e12
flops = one.trace.flops
Table(
    {
        "clock stopped": ["after the last line", "after waiting for the chip"],
        "step": [1e3 * one.issued, 1e3 * one.seconds],
        "of the chip's peak": [100 * flops / s / peak for s in (one.issued, one.seconds)],
    },
    kinds=dict.fromkeys(("step", "of the chip's peak"), "modelled"),
    units={"step": "ms", "of the chip's peak": "%"},
)

# %% [markdown]
# The number that gives it away: more than 100 % of the peak. Let `torch.cuda.synchronize()`, here
# `backend.synchronize()`, wait before each look at the clock; reading the loss waits as well.

# %% [markdown]
# ## Exercises
# ### Exercise 0.3.1 (core): whose time is it?
# A profiler gives you a list. Make the map's left half of it.


# %% exercise="0.3.1"
def time_by_layer(events: list[tuple[str, str, float]], seconds: float) -> dict[str, float]:
    """Return layer -> seconds for all six layers; together they are the step.

    events: (operator, phase, seconds) of one chip, one after the other. seconds: of the whole step.
    The first rule that fits: phase "optimizer": "states". mm, addmm, bmm, and names that contain "attention":
    "kernels". _to_copy: "bits". all_reduce: "wires". All others: "graph". No event: "front end".
    """
    # BEGIN SOLUTION
    found = dict.fromkeys(("front end", "graph", "kernels", "bits", "states", "wires"), 0.0)
    special = {"_to_copy": "bits", "all_reduce": "wires"}
    for operator, phase, spent in events:
        if phase == "optimizer":
            layer = "states"
        elif operator in ("mm", "addmm", "bmm") or "attention" in operator:
            layer = "kernels"
        else:
            layer = special.get(operator, "graph")
        found[layer] += spent
    found["front end"] = seconds - sum(found.values())
    return found
    # END SOLUTION


# %% check="0.3.1"
check("0.3.1", time_by_layer)

# %% [markdown]
# Yours against the map, on the large step of the H100. (This record is of one chip alone: no wires.)

# %% uses="0.3.1"
events = [(e.name.removeprefix("aten::"), e.phase, e.seconds) for e in one.trace]
for layer, spent in time_by_layer(events, one.seconds).items():
    if layer != "wires":
        print(f"{layer:10} {1e3 * spent:6.2f} ms, on the map {1e3 * one.time[layer]:6.2f} ms")

# %% [markdown]
# ### Exercise 0.3.2 (core): what is not hidden?
# Gradients travel while backward computes. Only the rest costs time: the **exposed** communication.


# %% exercise="0.3.2"
def exposed(computing: list[tuple[float, float]], messages: list[tuple[float, float]]) -> float:
    """Return the seconds in which at least one message is under way and nothing is computed.

    computing, messages: (start, end) of each, in any order; those of one list may overlap.
    """
    # BEGIN SOLUTION
    edges = sorted({edge for span in computing + messages for edge in span})

    def covered(spans, at):
        return any(start <= at < end for start, end in spans)

    pieces = pairwise(edges)
    return float(
        sum(b - a for a, b in pieces if covered(messages, a) and not covered(computing, a))
    )
    # END SOLUTION


# %% check="0.3.2"
check("0.3.2", exposed)

# %% [markdown]
# ### Exercise 0.3.3 (optional): fuse where it pays
# Operators run one after the other, and each reads all that the one before wrote. You may fuse one pair of neighbours.


# %% exercise="0.3.3"
def best_pair(
    operators: list[tuple[float, float, float]], peak: float, bandwidth: float
) -> int:
    """Return the number of the first operator of the pair that saves most time when it is fused.

    operators: (FLOPs, bytes read, bytes written). What the second reads of the first is then neither written
    nor read. An operator, fused or not, takes the longer of FLOPs / peak and bytes / bandwidth.
    """

    # BEGIN SOLUTION
    def seconds(flops, moved):
        return max(flops / peak, moved / bandwidth)

    def saved(at):
        (f, read, between), (g, taken, written) = operators[at : at + 2]
        fused = seconds(f + g, read + (taken - between) + written)
        return seconds(f, read + between) + seconds(g, taken + written) - fused

    return max(range(len(operators) - 1), key=saved)
    # END SOLUTION


# %% check="0.3.3"
check("0.3.3", best_pair)

# %% [markdown] tags=["reading"]
# ## Further reading
# - Paszke et al. 2019, *PyTorch: An Imperative Style, High-Performance Deep Learning Library*, sections 5.2 and 6.1: how
#   Python runs ahead of the GPU.
# - Williams, Waterman and Patterson 2009, *Roofline*, CACM 52(4): the longer of two times.
# - Ivanov et al. 2021, *Data Movement Is All You Need*, arXiv:2007.00072, section 3: small operators of a transformer,
#   their FLOPs and their time.
# - Rajbhandari et al. 2020, *ZeRO*, section 3: where memory goes.
