# %% [markdown]
# **You will learn** how copies of a model train as one, what they send, and how sending is hidden.

# %% tags=["setup"]
import time
from functools import partial

import torch
from fmlab.lab import Row, Table, caption, check, compare, figure, predict, show_source
from fmlab.lab.figures import PALETTE
from fmlab.lab.overlap import overlap_panel
from fmlab.meter import traffic, wire
from fmlab.models import GPT
from fmlab.objectives import CausalLM
from fmlab.parallel import Layout, ddp, parallelize, parity
from fmlab.parallel.ddp import DataParallel, plan_buckets, ring_bytes
from fmlab.train import adamw

# %load_ext fmlab.lab

# %% [markdown]
# ## 1 · Copies that agree
# In **data parallelism** each rank holds a whole copy, a *replica*, and reads its own rows. Equal weights
# and equal gradients keep replicas equal, so the gradients must be combined before each update.

# %%
RANKS, LENGTH = 4, 64
torch.manual_seed(0)
tokens = torch.randint(4096, (16, LENGTH + 1))
batch = {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def build(engine="fmlab", **layout):
    """An engine of this notebook's model on the ranks that run the cell."""
    model = GPT.from_preset("gpt2-tiny")
    return parallelize(model, Layout(data=RANKS, **layout), CausalLM(), adamw(1e-3), engine)


# %%
# %%ranks 4 -o results
torch.manual_seed(rank)  # other weights on each rank ...
engine = build(bucket_mb=1)
mine = engine.layout.split(batch, rank)  # 4 of the 16 rows
result = engine.step(mine)
print(f"{mine[0]['input_ids'].shape[0]} rows, loss {result.loss:.2f}")
{"targets": result.count, "replicas that differ": engine.differing_replicas()}

# %% [markdown]
# All report one loss: the mean over all 1,024 targets. The ranks began with *different* random weights; the
# engine gave them those of rank 0. Without that, replicas would stay different for ever.

# %%
show_source(ddp.replicas, "broadcast")

# %% [markdown]
# ## 2 · What travels?
# The gradients of 4 ranks are added up by an **all-reduce**. A ring ([[#1.10]]) does it in two passes; each rank sends
# $2\,\frac{n-1}{n}\,P$ bytes for a gradient of $P$ bytes.

# %%
guess_payload = predict(
    "A gradient has 4 bytes a parameter. How large is gpt2-tiny's (1,350,400 parameters)?",
    unit="MB",
)
guess_payload

# %%
guess_sent = predict("How much does each of the 4 ranks send for it?", unit="MB")
guess_sent

# %%
# %%ranks 4 -o counted
dist.barrier()
with (
    wire(required=False) as line,
    traffic() as sent,
):  # what the operating system counts; what PyTorch calls
    engine.step(mine)
dist.barrier()
gradients = sum(call.bytes for call in sent.calls if call.bytes > 1000)
{
    "gradients": gradients,
    "payload": sent.bytes("all_reduce"),
    "sent": line.sent and round(line.sent, -4),
}

# %%
model = GPT.from_preset("gpt2-tiny")
expected = ddp.expected_payload(model)
step, gradient = expected["total"] / 1e6, expected["gradients"] / 1e6
ring = ring_bytes("all_reduce", step, RANKS)
found = {name: size and size / 1e6 for name, size in counted[0].items()}
print(f"payload of a step: {counted[0]['payload']:,} bytes, formula {expected['total']:,}")

compare(
    Row("gradients", guess_payload, formula=gradient, measured=found["gradients"], unit="MB"),
    Row("payload of a step", formula=step, measured=found["payload"], unit="MB"),
    Row("sent by a rank", yours=guess_sent, formula=ring, measured=found["sent"], unit="MB"),
)

# %% [markdown]
# The step sends a little more than gradients: how many targets there are (before), the losses and which
# parameters were used (after). The wire adds a header to each message.

# %% [markdown]
# ## 3 · Buckets
# One message a gradient pays the start-up time of each. One message for all must wait for the last
# gradient. So gradients travel in **buckets**, filled from the last layer back.

# %%
show_source(ddp.buckets, "plan")

# %%
parameters = dict(model.named_parameters())
sizes = [25, 4, 1, 0.25, 1e-6]  # MiB
limits = ["25 MiB", "4 MiB", "1 MiB", "0.25 MiB", "none shared"]
plans = [plan_buckets(parameters, size * 2**20) for size in sizes]
Table(
    {
        "bucket limit": limits,
        "messages": [len(plan) for plan in plans],
        "gradients in the first": [len(plan[0]) for plan in plans],
        "leaves last": [plan[-1][-1] for plan in plans],
    },
    kinds={"messages": "modelled", "gradients in the first": "modelled"},
)

# %% [markdown]
# The token embedding always leaves last. It is also the head, so its gradient is complete only when the
# backward pass has gone through the whole model.

# %%
# %%ranks 4 -o sweep
found, seconds = [], []
for size in sizes:
    engine.close()
    engine = build(bucket_mb=size)
    engine.step(mine)
    with traffic() as sent:
        engine.step(mine)
    found.append((sent.count(), sent.bytes("all_reduce")))
    dist.barrier()
    start = time.perf_counter()
    engine.step(mine)
    seconds.append(time.perf_counter() - start)
found

# %%
print("all ranks agree:", all(rank == sweep[0] for rank in sweep))
Table(
    {
        "bucket limit": limits,
        "messages": [calls for calls, _ in sweep[0]],
        "payload": [size for _, size in sweep[0]],
    },
    kinds={"messages": "measured", "payload": "measured"},
    units={"payload": "B"},
)

# %% [markdown]
# Two messages more than buckets, and always the same bytes: buckets change *when* gradients travel, not how
# much. The time of one step each, on your machine:

# %% tags=["timing"]
# %%ranks 4
if rank == 0:
    for limit, second in zip(limits, seconds, strict=True):
        print(f"{limit}: {second * 1e3:.0f} ms")

# %% [markdown]
# ## 4 · Overlap
# Autograd calls a **hook** when a gradient is complete. The hook fills the bucket and sends a full one
# without waiting, while the backward pass goes on with earlier layers.

# %%
show_source(ddp.reducer, "hook")

# %%
guess_early = predict(
    "With 1 MiB buckets there are 5. How many are sent before the last gradient is ready?",
    unit="buckets",
)
guess_early

# %%
# %%ranks 4 -o timelines
engine.close()
engine = build(bucket_mb=1)
engine.step(mine)
timeline = engine.record_next_step()
engine.step(mine)
timeline

# %%
line = timelines[0]
early, buckets = line.sent_before_last_gradient, len(line.of("sent"))
compare(
    Row(
        "buckets",
        formula=len(plan_buckets(parameters, 2**20)),
        measured=buckets,
        unit="messages",
    ),
    Row("sent early", yours=guess_early, formula=buckets - 1, measured=early, unit="messages"),
    Row("hidden communication", measured=line.hidden_share, unit="of 1", noisy=True),
)

# %%
begin = line.of("backward")[0].seconds
kinds = ("gradient", "sent", "backward done")
ms = {kind: [(e.seconds - begin) * 1e3 for e in line.of(kind)] for kind in kinds}
arrived = {e.bucket: (e.seconds - begin) * 1e3 for e in line.of("arrived")}
ready = [e.bucket for e in line.of("gradient")]

# %%
fig, ax = figure(
    x="time in the backward pass [ms]", y="bucket [number]", title="A step of rank 0"
)
ax.plot(ms["gradient"], ready, "|", color=PALETTE[0], markersize=12)
for bucket, start in enumerate(ms["sent"]):
    ax.barh(bucket, arrived[bucket] - start, left=start, height=0.3, color=PALETTE[1])
ax.axvline(ms["backward done"][0], color="black", linestyle=":")
ax.invert_yaxis()
text = "Blue: a gradient is ready. Bars: a bucket is under way. Dotted: the backward pass ends."
numbers = {"gradients": len(ms["gradient"]), "buckets": buckets, "sent early": early}
caption(fig, kind="measured", text=text, numbers=numbers)

# %% [markdown]
# What is still under way at the dotted line costs time: always the last bucket, and more if the link is slow. So about
# 1/buckets stays visible until the link is the slower one. Try other models, links and chips:

# %%
overlap_panel()

# %% [markdown]
# ## 5 · Accumulation
# A batch too large for memory is run in **micro-batches**, whose gradients add up before the update.

# %%
guess_micro = predict(
    "With 4 micro-batches, how many times the gradient's bytes does a step send?", unit="times"
)
guess_micro

# %%
# %%ranks 4 -o accumulated
engine.close()
engine = build(micro_batches=4, bucket_mb=1)
mine_4 = engine.layout.split(batch, rank)
engine.step(mine_4)
with traffic() as sent:
    engine.step(mine_4)
sent.bytes("all_reduce")

# %%
times = accumulated[0] / counted[0]["payload"]
compare("gradients sent", yours=guess_micro, formula=1, measured=times, unit="times")

# %% [markdown]
# Only the last micro-batch communicates; the others add to the buckets on their own rank. On a
# slow network that saves the most.

# %%
show_source(DataParallel, "accumulate")

# %% [markdown]
# ## 6 · Unequal ranks
# Real rows differ in length, so ranks hold different numbers of targets. Averaging the ranks' mean losses
# then weighs the targets of short rows too much.

# %%
uneven = {name: tensor.clone() for name, tensor in batch.items()}
for row, targets in enumerate([2] * 4 + [16] * 4 + [64] * 8):
    uneven["labels"][row, targets:] = -100
counts = (uneven["labels"] != -100).view(RANKS, -1).sum(1)

# %%
weights = {
    "rank": range(RANKS),
    "targets": counts.tolist(),
    "weight of a target": [1 / RANKS / int(count) for count in counts],
    "right": [1 / int(counts.sum())] * RANKS,
}
Table(
    weights, kinds=dict(zip(weights, ("given", "given", "modelled", "modelled"), strict=True))
)

# %% [markdown]
# Our engine adds up the **counts** before the first forward pass. Each rank divides its *sum* of losses by
# the global count, and gradients are summed: nothing is averaged.

# %%
# %%ranks 4
build_model = partial(GPT.from_preset, "gpt2-tiny")
for name in ("fmlab", "torch"):  # by hand, and torch's DDP
    report = parity(build_model, Layout(data=RANKS), engine=name, batches=[uneven])
    if rank == 0:
        print(f"{name}: targets by rank {report.targets}")
        print(f"   {len(report.rows)} gradients and weights equal one device's: {report.ok}")

# %% [markdown]
# ## 7 · What production does
# PyTorch's `DistributedDataParallel` works the same way: hooks, buckets of 25 MiB, one message under way
# while the next fills. It **divides** by the number of ranks; our wrapper multiplies first.

# %%
from fmlab.parallel.engines import torch_ddp

show_source(torch_ddp.TorchDataParallel, "accumulate")

# %%
# %%ranks 4 -o beside
engine.close()
by_torch = build("torch", bucket_mb=1)
by_torch.step(mine)
with traffic() as sent:
    by_torch.step(mine)
sent.bytes("all_reduce")

# %%
compare("what torch sends in a step", formula=expected["total"], measured=beside[0], unit="B")

# %% [markdown]
# And the honest part: is it faster than one process here? One process with all rows, then four ranks:

# %% tags=["timing"]
alone = parallelize(GPT.from_preset("gpt2-tiny"), Layout(), CausalLM(), adamw(1e-3))
alone.step([batch])
start = time.perf_counter()
for _ in range(3):
    alone.step([batch])
print(f"one process: {(time.perf_counter() - start) / 3 * 1e3:.0f} ms a step")

# %% tags=["timing"]
# %%ranks 4
engine = build(bucket_mb=1)
for name, one in (("by hand", engine), ("torch", by_torch)):
    dist.barrier()
    start = time.perf_counter()
    for _ in range(3):
        one.step(mine)
    if rank == 0:
        print(f"{name}: {(time.perf_counter() - start) / 3 * 1e3:.0f} ms a step")

# %% [markdown]
# `fmlab bench ddp` compares the two properly: alternately, many times. Here you can trust bytes, counts and
# equality.

# %% [markdown]
# ## 8 · What breaks
# Three common bugs. None raises an error. Compare with one device.


# %%
class ScaledTwice(DataParallel):
    def _accumulate(self, micro_batches, counts):
        sums = super()._accumulate(micro_batches, counts)
        for bucket in self.reducer.buckets:
            bucket.flat /= RANKS  # "all-reduce, then average": but losses were divided already
        return sums


class MeanOfMeans(DataParallel):
    def _accumulate(self, micro_batches, counts):
        own = sum(int(self.objective.counts(b)["causal"]) for b in micro_batches)
        return super()._accumulate(micro_batches, {"causal": own * RANKS})


class LastBucketForgotten(DataParallel):
    def __init__(self, *args):
        super().__init__(*args)
        send, last = self.reducer.all_reduce, self.reducer.buckets[-1].flat
        self.reducer.all_reduce = lambda flat: None if flat is last else send(flat)


# %%
# %%ranks 4
for bug in (ScaledTwice, MeanOfMeans, LastBucketForgotten):
    layout = Layout(data=RANKS, bucket_mb=1)
    report = parity(build_model, layout, engine=bug, batches=[uneven])
    if rank == 0:
        print(
            f"{report.engine}: the gradient's norm is {report.grad_norm.factor:.2f}x one device's"
        )
        print(f"   {report.diagnosis}")

# %% [markdown]
# The number that gives it away: *one* factor for all gradients is a scaling bug; many factors are a
# weighting bug; a few parameters that even the ranks disagree about were never summed.

# %% [markdown]
# ## Exercises
# ### Exercise 2.2.1 (core): plan the buckets
# Decide which gradients travel together.


# %% exercise="2.2.1"
def buckets_of(sizes: list[tuple[str, int]], limit: int) -> list[list[str]]:
    """Return the names of the gradients by bucket, in the order in which the buckets are sent.

    sizes: (name, bytes) in the order in which the model registers its parameters. The backward
    pass makes gradients in the reverse order. A bucket holds at most `limit` bytes; a gradient
    that is larger has a bucket of its own. Fill each bucket as far as it goes, without changing
    the order.
    """
    # BEGIN SOLUTION
    plan, filled = [], 0
    for name, size in reversed(sizes):
        if not plan or filled + size > limit:
            plan.append([])
            filled = 0
        plan[-1].append(name)
        filled += size
    return plan
    # END SOLUTION


# %% check="2.2.1"
check("2.2.1", buckets_of)

# %% uses="2.2.1"
sizes_of = [(name, 4 * parameter.numel()) for name, parameter in parameters.items()]
print(
    "the same plan as the package:",
    buckets_of(sizes_of, 2**20) == plan_buckets(parameters, 2**20),
)

# %% [markdown]
# ### Exercise 2.2.2 (core): combine unequal ranks
# A library hands you each rank's gradient of its own *mean* loss. Repair it.


# %% exercise="2.2.2"
def combine(gradients: list[torch.Tensor], counts: list[int]) -> torch.Tensor:
    """Return the gradient of the mean loss over all targets of all ranks.

    gradients[r] is the gradient of rank r's own mean loss over its counts[r] targets. A rank
    with 0 targets has divided 0 by 0: its gradient is all nan, and must not matter. At least
    one rank has targets.
    """
    # BEGIN SOLUTION
    total = sum(counts)
    return sum(
        gradient * (count / total)
        for gradient, count in zip(gradients, counts, strict=True)
        if count
    )
    # END SOLUTION


# %% check="2.2.2"
check("2.2.2", combine)

# %% [markdown]
# ### Exercise 2.2.3 (optional): how long does the step wait?
# Put the timeline of section 4 into numbers.


# %% exercise="2.2.3"
def waiting(ready: list[float], seconds: list[float], backward: float) -> float:
    """Return the seconds from the end of the backward pass to the arrival of the last bucket.

    ready[i]: when bucket i is full, in seconds since the backward pass began. seconds[i]: how
    long it is on the wire. Buckets are sent in order, one at a time. backward: when the
    backward pass ends. 0.0 if all have arrived by then.
    """
    # BEGIN SOLUTION
    free = 0.0
    for full, duration in zip(ready, seconds, strict=True):
        free = max(free, full) + duration
    return max(0.0, free - backward)
    # END SOLUTION


# %% check="2.2.3"
check("2.2.3", waiting)

# %% [markdown] tags=["reading"]
# ## Further reading
# - S. Li et al., *PyTorch Distributed: Experiences on Accelerating Data Parallel Training*, VLDB 2020,
#   section 3.2: buckets, hooks, overlap.
# - P. Patarasuk and X. Yuan, *Bandwidth optimal all-reduce algorithms for clusters of workstations*, 2009,
#   section 3.
# - P. Goyal et al., *Accurate, Large Minibatch SGD*, 2017, section 3: how averages over ranks go wrong.
