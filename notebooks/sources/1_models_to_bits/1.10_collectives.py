# %% [markdown]
# **You will learn** how ranks combine their numbers, over which links, and which algorithm is the fastest when.

# %% tags=["setup"]
import math
import time
from dataclasses import replace

import torch
from fmlab.chips import cluster, host, switch
from fmlab.collectives import all_reduce, cost, prove, rings, run, schedule
from fmlab.collectives.proof import initial, play, ranks_of
from fmlab.lab import Row, Table, caption, check, compare, figure, predict, show_source
from fmlab.lab.figures import PALETTE
from fmlab.lab.overlap import Overlap
from fmlab.lab.stepper import stepper_panel
from fmlab.meter import LinkTraffic, link_traffic, wire

# %load_ext fmlab.lab

# %% [markdown]
# ## 1 · A collective is a schedule
# An **all-reduce** gives every rank the sum of all ranks' tensors. An algorithm for it is data: steps of messages. Here is
# a ring of 4 ranks, which cuts the tensor into 4 chunks:

# %%
plan = schedule("all_reduce", "ring", 4)
for number in (1, 2, 4):
    print(f"step {number} of {len(plan.steps)}")
    for send in sorted(plan.steps[number - 1], key=lambda send: send.source):
        print("   ", send)

# %% [markdown]
# Three steps add (*reduce-scatter*), three hand out the sums (*all-gather*). The second kind is all that is written; the
# first is the same played backwards, with additions in place of copies.

# %%
show_source(rings, "ring")

# %% [markdown]
# No ranks are needed to **prove** it. Let each number be the set of ranks that are in it. The ranks that are in each chunk
# of rank 0, before and after each step:


# %%
def inside(chunk):
    return ranks_of(state[0][chunk]).removeprefix("ranks ").removeprefix("rank ")


state = initial(plan)
history = [[inside(chunk) for chunk in range(4)]]
for step in plan.steps:
    play(plan, state, step)
    history.append([inside(chunk) for chunk in range(4)])
prove(plan)
chunks = zip(*history, strict=True)
Table(
    {
        "after step": [str(k) for k in range(7)],
        **{f"chunk {c}": v for c, v in enumerate(chunks)},
    }
)

# %%
from fmlab.collectives import ALGORITHMS

proven = 0
for collective, names in ALGORITHMS.items():
    for name in names:
        for n in (2, 4, 6, 8):
            dims = {"dims": (2, n // 2)} if name in ("torus", "hierarchical") else {}
            prove(schedule(collective, name, n, **dims))
            proven += 1
print(proven, "schedules deliver every contribution exactly once")

# %% [markdown]
# ## 2 · On real ranks
# The same data drives real ranks: each walks through the steps and does what concerns it. Messages are cut into pieces, so
# that one is added while the next arrives.

# %%
show_source(run, "step")

# %%
guess_sent = predict(
    "4 ranks all-reduce 12 MB by a ring. How much does each rank send?", unit="MB"
)
guess_sent

# %%
ELEMENTS = 3_000_001  # float32; not divisible by 4


# %%
# %%ranks 4 -o links
torch.manual_seed(rank)
x = torch.randint(-9, 9, (ELEMENTS,)).float()
expected = x.clone()
dist.all_reduce(expected)  # by torch, over gloo
with link_traffic() as counted:
    all_reduce(x, algorithm="ring")
print("equal to torch.distributed's:", torch.equal(x, expected))
dict(counted.bytes)

# %%
found = LinkTraffic.merged(links)
print("every link as predicted:", found == plan.link_bytes(ELEMENTS, itemsize=4))
sent = [sum(count for (a, _), count in found.items() if a == rank) / 1e6 for rank in range(4)]
compare("sent by rank 0", yours=guess_sent, formula=2 * 3 / 4 * 12, measured=sent[0], unit="MB")

# %% [markdown]
# No all-reduce in which all send alike gets by with less than $2\frac{n-1}{n}$ of the payload, unless the switch adds
# (NVLS, section 9). Other algorithms take fewer steps, over other links:

# %% [markdown]
# - *halving_doubling*: swap halves, then quarters, …, always with another partner
# - *double_tree*: sums climb two trees, and come down
# - *direct*: each rank adds up one chunk, which all send it at once, then hands it out
# - *one_shot*: all send everything to all

# %%
NAMES = ("ring", "halving_doubling", "double_tree", "direct", "one_shot")
plans = {name: schedule("all_reduce", name, 4) for name in NAMES}

# %%
# %%ranks 4 -o counted
found = []
for name, one in plans.items():
    x = torch.full((ELEMENTS,), rank + 1.0)
    with link_traffic() as mine:
        all_reduce(x, algorithm=name)
    sides = [None] * 4
    dist.all_gather_object(sides, dict(mine.bytes))
    every = LinkTraffic.merged(sides)
    assert x.min() == x.max() == 10
    assert every == one.link_bytes(ELEMENTS, itemsize=4)  # link by link, as predicted
    most, total = max(every.values()), sum(every.values())
    found.append((len(every), round(most / 1e6, 1), round(total / 1e6, 1)))
found

# %%
used, most, total = zip(*counted[0], strict=True)
Table(
    {
        "algorithm": list(NAMES),
        "steps": [len(plan.steps) for plan in plans.values()],
        "links used": used,
        "most on a link": most,
        "all together": total,
    },
    kinds={"steps": "modelled"}
    | dict.fromkeys(("links used", "most on a link", "all together"), "measured"),
    units={"most on a link": "MB", "all together": "MB"},
)

# %% [markdown]
# ## 3 · What does a library really send?
# A formula says what *could* be sent. The operating system counts what was. A reduce-scatter of $P$ bytes needs
# $\frac{n-1}{n}P$ from each rank:

# %%
from fmlab.collectives import reduce_scatter

# %%
# %%ranks 4 -o reduce_scatters
whole, block, lines = torch.ones(3_000_000), torch.ones(750_000), []
calls = (
    lambda: reduce_scatter(block, whole, algorithm="ring"),
    lambda: dist.reduce_scatter(block, list(whole.chunk(4))),
)
for call in calls:
    dist.barrier()
    with wire(required=False) as line:  # bytes on this rank's own TCP connections
        call()
        dist.barrier()
    lines.append(line.sent and round(line.sent / 1e6, 1))
lines

# %%
by_hand, gloo = reduce_scatters[0]
compare(
    Row("reduce-scatter by our ring", formula=3 / 4 * 12, measured=by_hand, unit="MB"),
    Row("by gloo", formula=3 / 4 * 12, measured=gloo, unit="MB"),
)

# %% [markdown]
# gloo sends the bytes of a whole all-reduce, twice as much. So count before you believe a formula, and compare two
# programs only over the same collectives.

# %% [markdown]
# ## 4 · Steps against bytes
# A message costs a **latency** $\alpha$ and its bytes over the bandwidth $B$. So an algorithm is two numbers:
#
# $$T = \text{steps}\cdot\alpha + \text{volume}\cdot P/B$$
#
# *Volume*: the payloads that go one after another. Each step of ring or *direct* sends a 64th, but *direct* needs two.

# %%
from fmlab.collectives import closed_form

forms = {name: closed_form("all_reduce", name, 64) for name in NAMES}
Table(
    {
        "64 ranks, a link for each pair": list(NAMES),
        "steps": [form.steps for form in forms.values()],
        "volume": [form.volume for form in forms.values()],
    },
    kinds={"steps": "modelled", "volume": "modelled"},
    units={"volume": "payloads"},
)

# %% [markdown]
# On a switch a rank's messages share its port. *one_shot* then sends $n-1$ payloads through it in a single step, the ring
# $2\frac{n-1}{n}$ in $2(n-1)$ steps.

# %%
guess_cross = predict(
    "8 chips on a switch, 450 GB/s, 3 µs a message. From which payload on is the ring faster "
    "than one_shot?",
    unit="MB",
)
guess_cross

# %%
eight = switch(8, 450e9, 3e-6)
exact = cost.crossover("all_reduce", eight, "one_shot", "ring")
formula = (14 - 1) * 3e-6 / ((7 - 14 / 8) / 450e9)  # latencies more / seconds a byte less
print(f"by pricing every message of both schedules: {exact / 1e6:.2f} MB")
compare("crossover", yours=guess_cross, formula=formula / 1e6, unit="MB")

# %% [markdown]
# ## 5 · The topology decides
# Messages that cross the same link wait for each other. A ring on a *torus*, a grid with joined ends: which link
# saturates? (Orange: the most of this step; blue: less; grey: nothing.) Step through it, then try *torus*.

# %%
stepper_panel()

# %% [markdown]
# A ring leaves most links idle, the torus algorithm none. Below, bandwidths are published, latencies too: about 1 µs a hop
# on TPU, the middle of 1 to 2 on Trainium2, about 15 between its hosts.

# %% [markdown]
# That of NVSwitch, which joins a host's GPUs over their NVLinks, is not. On A100, 14 steps took 42 µs with the start of
# the call: a fourteenth, 3 µs, is an upper bound.

# %%
from fmlab.collectives import machine

hop = machine("a100").protocols[0].latency / 14  # seconds; its ring has 14 steps
networks = {
    "8 H100, NVSwitch": host("p5.48xlarge").topology(latency=hop),
    "64 TPU v5p, 4x4x4 torus": cluster("tpu-v5p-host", 16),
    "16 Trainium2, 4x4 torus": host("trn2.48xlarge").topology(),
    "64 Trainium2, 4 hosts": cluster("trn2.48xlarge", 4),
}
small, large = 64e3, 1e9
best = [
    [cost.compare("all_reduce", p, t)[0] for t in networks.values()] for p in (small, large)
]

# %%
Table(
    {
        "network": list(networks),
        "64 KB by": [one.algorithm for one in best[0]],
        "time, 64 KB": [one.seconds * 1e6 for one in best[0]],
        "1 GB by": [one.algorithm for one in best[1]],
        "time, 1 GB": [one.seconds * 1e3 for one in best[1]],
        "1 GB by a ring": [
            cost.seconds("all_reduce", large, t, "ring") * 1e3 for t in networks.values()
        ],
    },
    kinds=dict.fromkeys(("time, 64 KB", "time, 1 GB", "1 GB by a ring"), "modelled"),
    units={"time, 64 KB": "µs", "time, 1 GB": "ms", "1 GB by a ring": "ms"},
)

# %% [markdown]
# The small times hold no start of a call: measured, nothing in section 6 takes less than 38 µs, start and steps together.
# The order of the algorithms is what the model is for:

# %%
trn2 = networks["16 Trainium2, 4x4 torus"]
switching = cost.crossover("all_reduce", trn2, "direct", "torus")
compare(
    Row(
        "Trainium2: stop sending directly above",
        formula=switching / 1e6,
        quoted=1,
        source="AWS Neuron SDK, intranode-collective-comm: mesh below 1 MB",
        unit="MB",
        digits=2,
    )
)

# %% [markdown]
# ### Between hosts
# The network is the slow link. A **hierarchical** all-reduce adds up inside the host first, so that only sums cross. Let 4
# ranks be 2 hosts of 2:

# %%
# %%ranks 4 -o crossing
found = {}
for name, dims in (("ring", {}), ("hierarchical", {"dims": (2, 2)})):
    with link_traffic() as one:
        all_reduce(torch.ones(3_000_000), algorithm=name, **dims)
    found[name] = sum(count for (a, b), count in one.bytes.items() if a // 2 != b // 2)
found

# %%
names = ("ring", "hierarchical")
across = {name: [rank[name] / 1e6 for rank in crossing] for name in names}
Table(
    {
        "12 MB over 2 hosts of 2": list(names),
        "between hosts": [sum(across[name]) for name in names],
        "by the busiest rank": [max(across[name]) for name in names],
        "ranks that send there": [sum(v > 0 for v in across[name]) for name in names],
    },
    kinds=dict.fromkeys(
        ("between hosts", "by the busiest rank", "ranks that send there"), "measured"
    ),
    units={"between hosts": "MB", "by the busiest rank": "MB"},
)

# %% [markdown]
# Fewer bytes, and from all adapters at once instead of one: with 8 chips a host and an adapter each, that is what makes
# the difference.

# %% [markdown]
# ## 6 · Does the model meet measurements?
# Libraries switch protocols with the payload, so we fit the least of three lines, latency + bytes / bandwidth, to
# published runs of nccl-tests.

# %%
ticks = {"32 KiB": 2**15, "1 MiB": 2**20, "32 MiB": 2**25, "1 GiB": 2**30, "16 GiB": 2**34}

# %%
fig, ax = figure(x="payload", y="time of an all-reduce [µs]", title="Quoted and fitted")
for name, colour, mark in (("a100", PALETTE[0], "o"), ("h200", PALETTE[1], "s")):
    rows = machine(name).rows
    xs, look = [row.row.payload for row in rows], {"color": colour, "markersize": 4}
    ax.plot(xs, [row.row.seconds * 1e6 for row in rows], mark, label=f"{name}, quoted", **look)
    ax.plot(xs, [row.modelled * 1e6 for row in rows], "-", label=f"{name}, fitted", **look)
ax.set(xscale="log", yscale="log")
ax.set_xticks(list(ticks.values()), list(ticks))
ax.minorticks_off()
caption(
    fig,
    kind="quoted",
    text="To 512 KiB the h200 stays at about 40 µs; the a100 climbs from the start.",
    source="stas00/ml-engineering, network/README.md @744d01e; lines: fitted by us",
)

# %%
from fmlab.collectives import machine_names

whole = {name: machine(name) for name in machine_names()}
half = {name: machine(name, every_second=True) for name in machine_names()}
seen = [[100 * error for error in m.errors()] for m in whole.values()]
unseen = [[100 * error for error in m.errors("held out")] for m in half.values()]
errors = dict(zip(("median", "worst"), zip(*seen, strict=True), strict=True))
errors |= dict(zip(("unseen, median", "unseen, worst"), zip(*unseen, strict=True), strict=True))
out = [sum("left out" in row.used for row in m.rows) for m in whole.values()]
Table(
    {"machine": list(whole), **errors, "rows left out": out},
    kinds=dict.fromkeys([*errors, "rows left out"], "modelled"),
    units=dict.fromkeys(errors, "%"),
    digits=2,
)

# %% [markdown]
# *p6-b200* is AWS's host of 8 B200. *Unseen* rows were kept from the fit. Left out: three rows of the four hosts, up to
# 128 KiB, which took longer than larger payloads or are printed with one digit.

# %% [markdown]
# ## 7 · What overlap buys
# A bucket of gradients can travel while the backward pass computes ([[#2.2]]). 1.5 billion parameters in fp32, 8 ranks in a ring,
# 4,096 tokens each, 300 TFLOP/s, 16 buckets; 3 µs a message on NVLink, 15 between hosts (section 5):

# %%
step = {
    "450 GB/s (NVLink)": Overlap(1.5e9, 4096, 8, 16, 300e12, 450e9, latency=3e-6),
    "50 GB/s (an adapter a chip)": Overlap(1.5e9, 4096, 8, 16, 300e12, 50e9, latency=15e-6),
    "12.5 GB/s (100 Gbit/s)": Overlap(1.5e9, 4096, 8, 16, 300e12, 12.5e9, latency=15e-6),
}
together = [one.buckets * one.bucket_seconds for one in step.values()]

# %%
columns = {
    "backward": [one.backward * 1e3 for one in step.values()],
    "all-reduce": [seconds * 1e3 for seconds in together],
    "in turn": [(o.backward + s) * 1e3 for o, s in zip(step.values(), together, strict=True)],
    "overlapped": [(one.backward + one.waiting) * 1e3 for one in step.values()],
}
Table(
    {"link, one way": list(step), **columns},
    kinds=dict.fromkeys(columns, "modelled"),
    units=dict.fromkeys(columns, "ms"),
)

# %% [markdown]
# At best overlap halves the time: when both take equally long. A fast link leaves little to hide, a slow one hides the
# backward pass instead. And here, where ranks share processor cores?

# %% tags=["timing"]
# %%ranks 4
matrix, payload = torch.randn(700, 700), torch.zeros(2_000_000)


def timed(communicate, compute):
    dist.barrier()
    start = time.perf_counter()
    work = dist.all_reduce(payload, async_op=True) if communicate else None
    for _ in range(8 if compute else 0):
        matrix @ matrix
    work and work.wait()
    dist.barrier()
    return (time.perf_counter() - start) * 1e3


rounds = [[timed(a, b) for a, b in ((1, 0), (0, 1), (1, 1))] for _ in range(8)]
a, b, c = torch.tensor(rounds[1:]).median(0).values
if rank == 0:
    print(f"all-reduce {a:.0f} ms, compute {b:.0f}, in turn {a + b:.0f}, both at once {c:.0f}")

# %% [markdown]
# Little or nothing is gained; a round may even cost more. The stored run has 4 ranks on 2 cores: moving and adding bytes
# takes turns with computing. At most waiting for each other is saved.

# %% [markdown]
# Accelerators have engines of their own to move bytes, and even there collectives take memory bandwidth and some cores away.

# %% [markdown]
# ## 8 · What production systems do
# NCCL prices ring, double tree and NVLS (the switch adds) for every call. Neuron's runtime changes from mesh to
# halving-doubling to ring with the payload. XLA knows the torus when it compiles. Ask which one you got:
# `NCCL_DEBUG=INFO` with `NCCL_DEBUG_SUBSYS=TUNING`.

# %% [markdown]
# ## 9 · What breaks
# **A ring with one wrong neighbour.** Nothing hangs and nothing raises, on real ranks either. Only the sum is wrong, which
# should be 10 everywhere. The proof says where:

# %%
from fmlab.collectives import ScheduleError

steps = [list(step) for step in plan.steps]
astray = next(send for send in steps[4] if send.source == 2)
steps[4][steps[4].index(astray)] = replace(astray, destination=1)  # the step 5 of rank 2
bent = replace(plan, steps=tuple(map(tuple, steps)))
try:
    prove(bent)
except ScheduleError as error:
    print(error)

# %%
# %%ranks 4
x = torch.full((8,), rank + 1.0)
run.execute(bent, run.Flat(x, bent.chunk_sizes(8)), None, run.COMBINE["sum"])
print([int(value) for value in x])

# %% [markdown]
# **Ranks that call different things.** Usually they hang, or add what does not belong together. Inside `checked` each
# collective is compared first, also torch's own:

# %%
from fmlab.collectives import Mismatch, checked

# %%
# %%ranks 4
gradient = torch.ones(6 if rank == 2 else 4)  # rank 2 has another model
try:
    with checked(timeout=10):
        dist.broadcast(torch.zeros(2), 0)
        dist.all_reduce(gradient)
except Mismatch as error:
    headline, *lines = str(error).split("\n")
    print(headline, *[line.partition(" at ")[0] for line in lines], sep="\n")

# %%
# %%ranks 4
try:
    with checked(timeout=10):
        if rank != 3:  # "only if there is a batch"
            dist.all_reduce(torch.ones(1))
except Mismatch as error:
    print(str(error).split("\n")[0])

# %% [markdown]
# **Bus bandwidth taken for payload over time.** nccl-tests prints both. To plan a step with *busbw* as if it were
# *algbw* makes it look almost twice as fast:

# %%
from fmlab.collectives import bus_factor

row = machine("h200").rows[15].row  # 1 GiB on 8 H200
algbw, busbw = row.payload / row.seconds, row.bus_bandwidth
compare(
    Row("payload / time", quoted=algbw / 1e9, source="ml-engineering @744d01e", unit="GB/s"),
    Row(
        "busbw: times 2(n-1)/n",
        formula=algbw * bus_factor("all_reduce", 8) / 1e9,
        quoted=busbw / 1e9,
        source="ml-engineering @744d01e",
        unit="GB/s",
    ),
    Row("a step planned with busbw", formula=busbw / algbw, unit="times too fast"),
)

# %% [markdown]
# And 464 GB/s is more than the 450 that this chip's links carry one way. The factor counts what a ring sends; here the
# switch added (NVLS), each rank sent less, and busbw can exceed the link.

# %% [markdown]
# ## Exercises
# ### Exercise 1.10.1 (core): double what you hold
# A ring needs n - 1 steps to gather. Do it in log2(n), for n a power of two.


# %% exercise="1.10.1"
def doubling(n: int) -> list[list[tuple[int, int, list[int]]]]:
    """Return an all-gather of n ranks, n a power of two, in log2(n) steps.

    Rank r begins with block r and must end with all n blocks. A step is a list of messages
    (source, destination, blocks) that leave at the same time: a rank can only send blocks that it held
    before the step. In each step every rank sends one message and receives one; no rank receives a block
    that it has already.
    """
    # BEGIN SOLUTION
    steps, held = [], 1
    while held < n:
        step = []
        for rank in range(n):
            first = (
                rank - rank % held
            )  # the ranks of its group are those that agree above bit `held`
            step.append((rank, rank ^ held, list(range(first, first + held))))
        steps.append(step)
        held *= 2
    return steps
    # END SOLUTION


# %% check="1.10.1"
check("1.10.1", doubling)

# %% [markdown]
# ### Exercise 1.10.2 (core): which algorithm, from which payload on?
# Every library has such a threshold somewhere.


# %% exercise="1.10.2"
def threshold(n: int, latency: float, bandwidth: float) -> float:
    """Return the payload in bytes from which on a ring all-reduce is faster than one_shot, on a switch.

    A rank sends at most `bandwidth` bytes a second, to all others together. A step costs `latency` seconds
    beside its bytes. one_shot: one step, in which each rank sends its whole payload to each of the n - 1
    others. Ring: 2 (n - 1) steps, in each of which a rank sends 1/n of the payload to its neighbour.
    n is at least 3.
    """
    # BEGIN SOLUTION
    more_steps = 2 * (n - 1) - 1
    less_volume = (n - 1) - 2 * (n - 1) / n
    return more_steps * latency * bandwidth / less_volume
    # END SOLUTION


# %% check="1.10.2"
check("1.10.2", threshold)

# %% uses="1.10.2"
priced = cost.crossover("all_reduce", switch(16, 100e9, 5e-6), "one_shot", "ring")
print(
    "as priced message by message:",
    math.isclose(threshold(16, 5e-6, 100e9), priced, rel_tol=0.01),
)

# %% [markdown]
# ### Exercise 1.10.3 (optional): who called what?
# The heart of `checked`, on the logs of all ranks.


# %% exercise="1.10.3"
def first_mismatch(calls: list[list[str]]) -> tuple[int, list[int]] | None:
    """Return (number of the call, from 0; the ranks that are wrong there), or None if all agree.

    calls[r] are the collectives of rank r in its order, as text such as "all_reduce float32[4]". Only the
    first number at which ranks disagree counts. Wrong are those that differ from what most ranks called; a
    rank that called nothing more has called None. Most ranks agree at every number.
    """
    # BEGIN SOLUTION
    for number in range(max(len(one) for one in calls)):
        entered = [one[number] if number < len(one) else None for one in calls]
        usual = max(set(entered), key=entered.count)
        wrong = [rank for rank, call in enumerate(entered) if call != usual]
        if wrong:
            return number, wrong
    return None
    # END SOLUTION


# %% check="1.10.3"
check("1.10.3", first_mismatch)

# %% [markdown] tags=["reading"]
# ## Further reading
# - Thakur, Rabenseifner, Gropp, *Optimization of Collective Communication Operations in MPICH* (2005), sections 3-4.
# - Patarasuk, Yuan, *Bandwidth Optimal All-reduce Algorithms* (2009): why none sends less, where ranks add.
# - Sanders, Speck, Träff, *Two-tree algorithms for full bandwidth broadcast, reduction and scan* (2009).
# - Chan, Heimlich, Purkayastha, van de Geijn, *Collective communication: theory, practice, and experience* (2007).
# - *How to Scale Your Model*, chapter on sharded matrices: collectives on a TPU torus.
# - Hu et al., *Demystifying NCCL* (2025): its protocols and algorithms.
