# %% [markdown]
# **You will learn** which ranks talk to which in a layout of three axes, how much, and which of them must
# share a host.

# %% tags=["setup"]
from collections import Counter
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from fmlab.chips import cluster, fat_tree, host, switch
from fmlab.collectives import cost as collective_cost
from fmlab.lab import Row, Table, caption, check, compare, figure, predict, show_source
from fmlab.lab.placement import placement_view
from fmlab.meter import LinkTraffic, link_traffic, traffic

# %% tags=["setup"]
from fmlab.models import GPT, GPTConfig
from fmlab.objectives import CausalLM
from fmlab.parallel import Layout, parallelize, parity, zero
from fmlab.parallel.composed import Composed
from fmlab.parallel.grid import Grid
from fmlab.parallel.ledger import Ledger
from fmlab.parallel.mesh import Mesh
from fmlab.parallel.tensor import cost as tensor_cost
from fmlab.sim import dry_run
from fmlab.sim.schedule import bubble_formula
from fmlab.train import adamw

# %load_ext fmlab.lab

# %% [markdown]
# ## 1 · Ranks on a grid
# A layout multiplies: `tensor=4, data=2, pipeline=2` takes 16 ranks. Each is a point of a grid. A strategy talks
# along **lines**: ranks that differ in one coordinate only.

# %%
guess_partner = predict(
    "In that layout, with which rank does rank 1 add up its gradients?", unit="rank"
)
guess_partner

# %%
grid = Layout(tensor=4, data=2, pipeline=2).grid()
Table(
    {
        "axis": ["tensor", "data", "pipeline"],
        "line of rank 1": [str(grid.line(1, a)) for a in ("tensor", "data", "pipeline")],
        "such lines": [str(len(grid.lines(a))) for a in ("tensor", "data", "pipeline")],
    }
)

# %%
compare("partner of rank 1", yours=guess_partner, formula=1 + 4, unit="rank")

# %% [markdown]
# The first axis of `axis_order` runs fastest, like the last digit of a counter. Its lines are neighbours in number,
# and launchers give neighbours in number the same host.

# %%
show_source(Grid.coordinates)

# %%
ORDERS = {
    "tensor first": ("tensor", "context", "data", "pipeline"),
    "data first": ("data", "context", "tensor", "pipeline"),
}
lines = {}
for name, order in ORDERS.items():
    eight = Layout(tensor=2, data=2, pipeline=2, axis_order=order).grid()
    lines[name] = [str(eight.lines(axis)) for axis in ("tensor", "data", "pipeline")]
Table({"axis": ["tensor", "data", "pipeline"], **lines})

# %% [markdown]
# ## 2 · What does each axis send?
# Four ranks: `data=2` x `tensor=2`, with ZeRO-1 ([[#2.3]]). Our own collectives carry everything, so that each message has a
# sender and a receiver that we can count.

# %%
ROWS, LENGTH = 16, 128
tokens = torch.randint(4096, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(0))
batch = {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
build_model = partial(GPT.from_preset, "gpt2-tiny")


def step_of(**layout):
    """One step on this rank: its messages by group, and by link."""
    layout = Layout(collectives="fmlab", **layout)
    engine = parallelize(build_model(), layout, CausalLM(), adamw(1e-3))
    mine = layout.split(batch, layout.data_rank(dist.get_rank()))
    engine.step(mine)  # the first step also compares the ranks' batches
    with traffic() as sent, link_traffic() as links:
        engine.step(mine)
    engine.close()
    return sent, dict(links.bytes), layout.grid()


# %%
def by_axis(sent, grid, rank):
    """Bytes that this rank sent along each axis; "all" for what concerns every rank."""
    axis_of = {tuple(grid.line(rank, axis)): axis for axis in ("tensor", "data", "pipeline")}
    found = Counter()
    for call in sent.calls:
        if call.op == "send":
            found[axis_of.get(call.ranks, "all")] += call.bytes
    return dict(found)


# %%
guess_data = predict(
    "gpt2-tiny has 1.35 million fp32 parameters. How many MB does a rank send along data?",
    unit="MB",
)
guess_data

# %%
guess_tensor = predict(
    "And along tensor, with 4 layers of width 128, and 8 rows of 128 tokens a replica?",
    unit="MB",
)
guess_tensor

# %%
# %%ranks 4 -o sent
sent_here, links_here, grid_here = step_of(data=2, tensor=2, zero=1)
by_axis(sent_here, grid_here, rank)

# %%
model = build_model()
plan = model.parallel_plan()
shard = sum(plan.rule(n).shard(p, 0, 2).numel() for n, p in model.named_parameters())
along_data = zero.sent_bytes(shard, ranks=2, stage=1)["total"]
payload = tensor_cost.language_model_payload(4, ROWS // 2, LENGTH, 128, tensor=2)
along_tensor = tensor_cost.wire_bytes(payload, 2)
compare(
    Row("data", guess_data, along_data / 1e6, sent[0]["data"] / 1e6, unit="MB"),
    Row("tensor", guess_tensor, along_tensor / 1e6, sent[0]["tensor"] / 1e6, unit="MB"),
    Row("everybody: the norm", measured=sent[0]["all"], unit="B"),
)

# %% [markdown]
# **data** sends gradients, *once a step*, whatever the batch: half of the parameters, for tensor has the other half.
# **tensor** sends activations: each token, each layer, both ways. Double the rows, and it doubles.

# %% [markdown]
# A planner ([[3.1]]) says so from shapes alone. It leaves out what a divided softmax exchanges. Of a payload, a ring of
# two sends a half, and an all-reduce twice that:

# %%
from fmlab.planner import plan as plan_step

how = dict(global_batch=ROWS, seq_len=LENGTH, precision="fp32", states="fp32-16")
two_axes = plan_step("gpt2-tiny", chip="h100", layout=Layout(data=2, tensor=2, zero=1), **how)
handed = two_axes.payloads(0)
by_plan = {
    "data": sum(handed["gradient messages"].values()) / 2,
    "tensor": handed["tensor messages"]["all_reduce"],
}
compare(*(Row(axis, None, int(n), sent[0][axis], unit="B") for axis, n in by_plan.items()))

# %% [markdown]
# Now `tensor=2` x `pipeline=2`, the same 16 rows in 4 micro-batches. A stage holds 2 of the 4 layers. Its ranks
# hand on the hidden states, and add up the tied table with the other stage.

# %%
guess_pipeline = predict("How many MB does a rank send along pipeline?", unit="MB")
guess_pipeline

# %%
# %%ranks 4 -o sent_pipeline
sent_here, links_here, grid_here = step_of(tensor=2, pipeline=2, micro_batches=4)
by_axis(sent_here, grid_here, rank)

# %%
stream = ROWS * LENGTH * 128 * 4  # bytes of the hidden states
table = 4096 * 128 * 4 // 2  # a rank's half of the tied table
first = sent_pipeline[0]
compare(
    Row("pipeline", guess_pipeline, (stream + table) / 1e6, first["pipeline"] / 1e6, unit="MB"),
    Row(
        "tensor", formula=(1 + 2 * 4) * stream / 1e6, measured=first["tensor"] / 1e6, unit="MB"
    ),
)

# %% [markdown]
# For $b$ rows of $s$ tokens, width $h$, $L$ layers and $P$ parameters, in numbers that a rank sends a step:
#
# | axis | what | how many | who waits |
# |---|---|---|---|
# | tensor | activations | $8\,bsh\,L\,\frac{t-1}{t}$ | each layer, both ways |
# | pipeline | activations | $bsh$ a cut, each way | the next stage |
# | data | gradients | $2\,\frac{P}{tp}\,\frac{d-1}{d}$ | the end of the step |

# %% [markdown]
# ## 3 · Which link?
# Let the four ranks be two hosts of two. Inside a host the link is fast, between hosts slow. `axis_order` decides
# what crosses.

# %%
guess_times = predict(
    "With data first: how many times as many bytes cross as with tensor first?", unit="times"
)
guess_times

# %%
# %%ranks 4 -o links_of
{name: step_of(data=2, tensor=2, zero=1, axis_order=order)[1] for name, order in ORDERS.items()}

# %%
steps, across = {}, {}
for name, order in ORDERS.items():
    links = LinkTraffic.merged([of_rank[name] for of_rank in links_of])
    steps[name] = (Layout(data=2, tensor=2, axis_order=order).grid(), links)
    across[name] = sum(size for (a, b), size in links.items() if a // 2 != b // 2)
placement_view(
    steps, per_host=2, text="The same step, the same bytes: only the ranks' places differ."
)

# %%
near, far = across["tensor first"], across["data first"]
compare(
    Row("tensor first", formula=4 * along_data / 1e6, measured=near / 1e6, unit="MB"),
    Row("data first", formula=4 * along_tensor / 1e6, measured=far / 1e6, unit="MB"),
    Row("ratio", guess_times, along_tensor / along_data, far / near, unit="times"),
)

# %% [markdown]
# ## 4 · On a real machine
# How slow is the slow link? Published bandwidths, one way; a host's network is shared by its chips:


# %%
def ports(one):
    """Bytes a second that a chip can send to the other chips of its host."""
    return sum(link.bandwidth for (a, _), link in one.topology().links.items() if a == 0)


found = [host(name) for name in ("p4de.24xlarge", "p5.48xlarge", "trn2.48xlarge")]
inside = [ports(one) / 1e9 for one in found]
between = [one.network_bandwidth / one.chips / 1e9 for one in found]
columns = {
    "host": [one.title for one in found],
    "inside": inside,
    "between hosts": between,
    "inside / between": [a / b for a, b in zip(inside, between, strict=True)],
}

# %%
Table(
    columns,
    kinds={"inside": "quoted", "between hosts": "quoted", "inside / between": "modelled"},
    units={"inside": "GB/s a chip", "between hosts": "GB/s a chip"},
    source="published figures in fmlab.chips, each with its source",
)

# %% [markdown]
# Take 8 hosts of 8 A100, `tensor=8` x `data=8`, and GPT-3's width: 12,288, one row of 2,048 tokens. Messages take
# 3 µs inside a host and 15 between hosts ([[#1.10]], section 5).

# %%
network = cluster("p4de.24xlarge", 8, latency=3e-6, network_latency=15e-6)
STREAM = 2048 * 12288 * 2  # bytes, bf16
sums = {}
for name, order in ORDERS.items():
    groups = Layout(tensor=8, data=8, axis_order=order).grid().lines("tensor")
    sums[name] = collective_cost.seconds(
        "all_reduce", STREAM, network, ranks=groups[0], beside=groups[1:]
    )

# %%
Table(
    {
        "order": list(sums),
        "one all-reduce": [1e3 * seconds for seconds in sums.values()],
        "the 4 of a layer": [4e3 * seconds for seconds in sums.values()],
    },
    kinds={"one all-reduce": "modelled", "the 4 of a layer": "modelled"},
    units={"one all-reduce": "ms", "the 4 of a layer": "ms"},
)

# %%
guess_step = predict(
    "32 rows a replica, 16 layers: how many times as long is the step with data first?",
    unit="times",
)
guess_step


# %%
def placed(order):
    """A modelled step of 16 layers of GPT-3's width on 8 hosts of 8 A100."""
    split = dict(tensor=8, data=8, micro_batches=32, axis_order=order)
    waits = dict(link_latency=3e-6, network_latency=15e-6)
    model = dict(config=dict(num_layers=16), global_batch=8 * 32, seq_len=2048)
    return dry_run("gpt3-175b", host="p4de.24xlarge", **split, **waits, **model)


runs = {name: placed(order) for name, order in ORDERS.items()}

# %%
parts = ("computing", "tensor", "data")
Table(
    {
        "order": list(runs),
        "step": [run.seconds for run in runs.values()],
        **{p: [getattr(run.usages[0], p) for run in runs.values()] for p in parts},
    },
    kinds=dict.fromkeys(("step", *parts), "modelled"),
    units=dict.fromkeys(("step", *parts), "s"),
)

# %%
slow, fast = runs["data first"].seconds, runs["tensor first"].seconds
compare("step with data first", yours=guess_step, formula=slow / fast, unit="times")

# %% [markdown]
# Each layer *waits* for its tensor group, 32 times forward and 32 times backward. Gradients cross once a step,
# whatever the batch, and partly behind the backward pass.

# %% [markdown]
# ## 5 · What does the next chip cost?
# Simulated H100s: the same 16 rows on 1 to 8 of them, along one axis at a time. Perfect scaling keeps the
# chip-seconds of a step. First in one host, then with each chip in a host of its own:

# %%
apart = fat_tree(8, switch(1, 450e9, 3e-6), network=50e9, latency=15e-6)
places = {
    "one host": dict(chip="h100", topology=switch(8, 450e9, 3e-6)),
    "a host each": dict(chip="h100", topology=apart),
}
SMALL = dict(num_layers=8, vocab_size=4096)  # a small head, so that stages are alike
SHAPE = dict(global_batch=16, seq_len=2048, config=SMALL)


def chip_seconds(where, axis, n):
    micro = 16 // n if axis == "data" else 16
    run = dry_run("gpt3-6.7b", **{axis: n}, micro_batches=micro, **where, **SHAPE)
    return n * run.seconds


# %%
alone = chip_seconds(places["one host"], "tensor", 1)
fig, plots = figure(
    x="chips [number]", y="chip-seconds [of one chip]", title=list(places), height=3.0
)
for ax, where in zip(plots, places.values(), strict=True):
    for axis, mark in (("tensor", "o"), ("data", "s"), ("pipeline", "^")):
        grown = [chip_seconds(where, axis, n) / alone for n in (2, 4, 8)]
        ax.plot([1, 2, 4, 8], [1, *grown], marker=mark, label=axis)
    ax.set(ylim=(0.9, 8), xticks=[1, 2, 4, 8])
caption(
    fig,
    kind="modelled",
    text="A pipeline hardly minds where its chips are: its price is the bubble. Tensor minds most.",
)

# %% [markdown]
# data pays once a step, so more rows make it cheaper; tensor pays for each token. That is why tensor gets the
# fastest links, data the next, and a pipeline what is left.

# %% [markdown]
# ## 6 · Choose the product
# tensor x pipeline must make the model *fit*; data takes the chips that are left. GPT-3 (175 billion parameters, 16
# bytes each) on 1,024 chips of 80 GB, 1,536 rows a step, one in each micro-batch:

# %%
rows = []
for tensor, pipeline in ((8, 1), (8, 4), (8, 8), (8, 16), (8, 64)):
    data = 1024 // (tensor * pipeline)
    micro = 1536 // data
    states = 16 * 175e9 / (tensor * pipeline) / 1e9
    bubble = 100 * bubble_formula(pipeline, micro)
    rows.append((f"{tensor} x {pipeline} x {data}", states, micro, bubble))
heads = ("t x p x d", "states", "micro-batches", "bubble")
Table(
    dict(zip(heads, zip(*rows, strict=True), strict=True)),
    kinds=dict.fromkeys(heads[1:], "modelled"),
    units={"states": "GB a chip", "bubble": "%"},
)

# %% [markdown]
# Two limits. **Memory**: activations come on top, so 8 x 8 is the least. **The batch**: replicas share its 1,536
# rows, so `data` ends there, and few micro-batches a replica mean more bubble.

# %% [markdown]
# Why 8 x 8 and not 16 x 4? Narayanan et al. (2021, section 5.4.1) tried a GPT of 162 billion parameters on 64 A100,
# in hosts of 8 with 200 GB/s between them. The same in our simulator:

# %%
guess_best = predict("Which tensor degree gives the shortest step?", unit="ranks")
guess_best


# %%
def tried(tensor, rows):
    size = dict(num_layers=32, hidden_size=20480, num_heads=128, vocab_size=51200)
    model = dict(config=size, global_batch=rows, seq_len=2048, recompute="full")
    wires = dict(network_bandwidth=200e9, link_latency=3e-6, network_latency=15e-6)
    split = dict(tensor=tensor, pipeline=64 // tensor, micro_batches=rows)
    return dry_run("gpt3-175b", host="p4de.24xlarge", **wires, **split, **model)


degrees_of_64 = (2, 4, 8, 16, 32)
runs = {tensor: tried(tensor, rows=32) for tensor in degrees_of_64}

# %%
shares = {
    "bubble": [100 * run.bubble for run in runs.values()],
    "tensor's messages": [
        100 * sum(u.share("tensor") for u in run.usages) / len(run.usages)
        for run in runs.values()
    ],
    "step, 32 rows": [run.seconds for run in runs.values()],
    "step, 128 rows": [tried(tensor, rows=128).seconds for tensor in runs],
}
Table(
    {"tensor x pipeline": [f"{t} x {64 // t}" for t in runs], **shares},
    kinds=dict.fromkeys(shares, "modelled"),
    units=dict(zip(shares, ("%", "%", "s", "s"), strict=True)),
)

# %%
best = min(runs, key=lambda tensor: runs[tensor].seconds)
compare("best tensor degree", yours=guess_best, formula=best, unit="ranks")

# %% [markdown]
# The bubble shrinks with the pipeline, until tensor's messages leave the host. They *measured* their peak at 8 x 8,
# too, and chose the degrees of larger and smaller models so:

# %%
published = [  # millions of parameters, chips, tensor, pipeline, data, % of the chips' peak
    (3_600, 64, 2, 1, 32, 44),
    (7_500, 128, 4, 1, 32, 46),
    (39_100, 512, 8, 2, 32, 44),
    (76_100, 1024, 8, 4, 32, 45),
    (310_100, 1920, 8, 16, 15, 50),
    (529_600, 2520, 8, 35, 9, 52),
    (1_008_000, 3072, 8, 64, 6, 52),
]

# %%
heads = ("parameters", "chips", "tensor", "pipeline", "data", "of peak")
Table(
    dict(zip(heads, zip(*published, strict=True), strict=True)),
    kinds=dict.fromkeys(heads, "quoted"),
    units={"parameters": "millions", "of peak": "%, recompute counted"},
    source="Narayanan et al. 2021, arXiv:2104.04473, table 1; seven of its ten rows",
)

# %% [markdown]
# tensor grows to 8, the chips of a host, and stops. Then pipeline grows. Every row multiplies to its chips.

# %% [markdown]
# ## 7 · One norm for all
# Clipping needs *one* norm, and by now a gradient may be cut along two axes, copied along others, tied over two stages.
# Each element must count once. Only the **ledger**, which notes how each parameter is cut and copied, knows:

# %%
show_source(Ledger.counts)

# %%
show_source(Ledger, region="norm")

# %% [markdown]
# ## 8 · What breaks
# Three bugs of three dimensions. None raises an error.


# %%
class CopiesCounted(Composed):
    """Adds up the squares on all ranks that share the model: copies count once for each."""

    def _divide(self, ledger):
        ledger, shared = super()._divide(ledger), self.mesh.axis("tensor", "pipeline")

        def norm(gradients):
            return shared.all_reduce_(sum(g.square().sum() for g in gradients.values())).sqrt()

        ledger.norm = norm
        return ledger


# %%
class OwnNorm(Composed):
    """Each rank clips by the norm of what it holds."""

    def _divide(self, ledger):
        ledger = super()._divide(ledger)
        ledger.norm = lambda gradients: torch.stack(
            [g.norm() for g in gradients.values()]
        ).norm()
        return ledger


# %%
class WrongGroups(Composed):
    """Numbers ranks data first when it makes the data groups, and tensor first otherwise."""

    def _states(self, build):
        other = Mesh(replace(self.layout, axis_order=ORDERS["data first"]).grid())
        build.at_close.append(other.close)
        return super()._states(replace(build, mesh=other))


# %%
config = GPTConfig(vocab_size=1000, max_positions=64, num_layers=4, hidden_size=64, num_heads=4)
build_small = partial(GPT, config)
guess_loss = predict("For how many of the three is the first loss wrong?", unit="bugs")
guess_loss

# %%
# %%ranks 4 -o broken -t 240
staged, copied = Layout(tensor=2, pipeline=2, micro_batches=2), Layout(tensor=2, data=2)
found = {}
for bug, layout in ((CopiesCounted, staged), (OwnNorm, staged), (WrongGroups, copied)):
    report = parity(build_small, layout, bug, precision="fp64", steps=1, max_grad_norm=0.5)
    factors = [row.gradient.factor for row in report.different]
    ends = (report.loss.factor, report.grad_norm.factor, min(factors), max(factors))
    found[bug.__name__] = (len(factors), *(round(factor, 2) for factor in ends))
found

# %%
results = broken[0]
heads = ("wrong gradients", "loss", "norm", "smallest gradient", "largest gradient")
numbers = dict(zip(heads, zip(*results.values(), strict=True), strict=True))
Table(
    {"bug": list(results), **numbers},
    kinds=dict.fromkeys(heads, "measured"),
    units=dict.fromkeys(heads[1:], "x one device's"),
)

# %%
wrong_losses = sum(loss != 1 for _, loss, *_ in results.values())
compare("wrong first loss", yours=guess_loss, measured=wrong_losses, formula=1, unit="bugs")

# %% [markdown]
# **Copies counted**: one factor for all gradients, and a right loss: clipped too hard. **Own norm**: the factor
# depends on the rank. **Wrong groups**: parts of different columns were added up, and the loss is that of some rows.

# %% [markdown]
# ## 9 · All of it at once
# Eight ranks: 2 x 2 x 2, with sequence parallelism, ZeRO-1, four micro-batches, a tied table, and clipping. Is it one
# device?

# %%
everything = Layout(
    data=2, tensor=2, pipeline=2, sequence_parallel=True, zero=1, micro_batches=4
)

# %%
# %%ranks 8 -t 240
report = parity(build_small, everything, precision="fp64", max_grad_norm=0.5)
if rank == 0:
    print(f"{len(report.rows)} gradients and weights equal one device's: {report.ok}")

# %% [markdown]
# A plan ([[3.1]]) knows beforehand what a rank of each stage holds. Bytes of weights, gradients and moments, beside what
# the engine has after a step:

# %%
small = {name: ids[:, :64] % 1000 for name, ids in batch.items()}

# %%
# %%ranks 8 -o held -t 240
engine = parallelize(build_small(), everything, CausalLM(), adamw(1e-3))
engine.step(everything.split(small, everything.data_rank(rank)))
here = zero.held_bytes(engine).device
engine.close()
here.parameters, here.gradients, here.optimizer

# %%
size = dict(global_batch=ROWS, seq_len=64, states="fp32-16")
planned = plan_step(config, chip="h100", layout=everything, **size)
rows = []
for stage, one in ((0, held[0]), (1, held[7])):
    expected = planned.memory_of(stage)
    for name, found in zip(("weights", "gradients", "moments"), one, strict=True):
        rows.append(
            Row(f"stage {stage}, {name}", formula=int(expected[name]), measured=found, unit="B")
        )
compare(*rows)

# %% [markdown]
# ## Exercises
# ### Exercise 2.8.1 (core): the groups of an axis
# What every library does before anything else.


# %% exercise="2.8.1"
def groups(sizes: dict[str, int], order: list[str], axis: str) -> list[list[int]]:
    """Return the groups of ranks that differ along `axis` only.

    sizes: how many ranks each axis has; their product is all ranks. order: the axes, the one
    along which ranks are numbered first (fastest) first. A group lists its ranks in ascending
    order; groups are in the order of their first rank.
    """
    # BEGIN SOLUTION
    ranks, stride = 1, 1
    for name in sizes:
        ranks *= sizes[name]
    for name in order[: order.index(axis)]:
        stride *= sizes[name]
    firsts = [rank for rank in range(ranks) if rank // stride % sizes[axis] == 0]
    return [[first + i * stride for i in range(sizes[axis])] for first in firsts]
    # END SOLUTION


# %% check="2.8.1"
check("2.8.1", groups)

# %% uses="2.8.1"
for axis in ("tensor", "data", "pipeline"):
    print(
        axis,
        groups({"tensor": 2, "data": 2, "pipeline": 2}, ["tensor", "data", "pipeline"], axis),
    )

# %% [markdown]
# ### Exercise 2.8.2 (core): one norm over the grid
# Divided, copied, tied, empty, or on one stage only: each element counts once. (Exercise 2 of [[#2.3]], on a grid.)


# %% exercise="2.8.2"
def global_norm(
    ranks: list[dict[str, torch.Tensor]],
    places: list[dict[str, int]],
    divided: dict[str, set[str]],
) -> float:
    """Return the Euclidean norm of the whole gradient.

    ranks[r][name]: the piece of a gradient that rank r holds; a piece may be empty, and a rank
    holds only what is on its stage (a tied table is on two). places[r]: its coordinates,
    {"tensor": 0, "data": 1, "pipeline": 0}. divided[name]: the axes along which the pieces are
    different parts. Ranks that hold a name and differ along other axes only hold copies.
    """
    # BEGIN SOLUTION
    seen, total = set(), 0.0
    for held, place in zip(ranks, places, strict=True):
        for name, piece in held.items():
            part = (name, *(place[axis] for axis in sorted(divided[name])))
            if part not in seen:
                seen.add(part)
                total += piece.double().square().sum().item()
    return total**0.5
    # END SOLUTION


# %% check="2.8.2"
check("2.8.2", global_norm)

# %% [markdown]
# ### Exercise 2.8.3 (optional): choose the degrees
# Tensor up to the host, then pipeline, then data.


# %% exercise="2.8.3"
def degrees(
    parameters: float, layers: int, chips: int, per_host: int, room: float
) -> tuple[int, int, int] | None:
    """Return (tensor, pipeline, data) with the least tensor x pipeline that fits, or None.

    A chip holds 16 bytes for each parameter, divided by tensor x pipeline; that may take `room`
    bytes. tensor is a power of two, up to per_host (itself one); pipeline stays 1 until tensor
    is per_host, and divides the layers. tensor x pipeline divides chips; data takes the rest.
    """
    # BEGIN SOLUTION
    tensors = [2**i for i in range(per_host.bit_length())]
    pipelines = [p for p in range(2, layers + 1) if layers % p == 0]
    for tensor, pipeline in [(t, 1) for t in tensors] + [(per_host, p) for p in pipelines]:
        data, rest = divmod(chips, tensor * pipeline)
        if rest == 0 and data > 0 and 16 * parameters / (tensor * pipeline) <= room:
            return tensor, pipeline, data
    return None
    # END SOLUTION


# %% check="2.8.3"
check("2.8.3", degrees)

# %% uses="2.8.3"
for billions in (1.5, 13, 175):
    print(f"{billions} billion: {degrees(billions * 1e9, 96, 1024, 8, 50e9)}")

# %% [markdown] tags=["reading"]
# ## Further reading
# - D. Narayanan et al., *Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM*,
#   2021, arXiv:2104.04473: section 3.2 (tensor and pipeline: bytes and bubble), 3.3 (data), 4.1 (messages
#   between stages, scattered and gathered), 5.4 (degrees compared).
# - V. Korthikanti et al., *Reducing Activation Recomputation in Large Transformer Models*, 2022,
#   arXiv:2205.05198, section 4.2: sequence parallelism in such a layout.
# - W. Liang et al., *TorchTitan*, 2024, arXiv:2410.06511, section 2: the same axes as one device mesh.
