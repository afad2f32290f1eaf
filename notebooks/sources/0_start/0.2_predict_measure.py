# %% [markdown]
# **You will learn** to check a training run with three habits: predict a number, measure it, compare with one device.

# %% tags=["setup"]
from functools import partial

import torch
from fmlab import meter
from fmlab.lab import Row, check, compare, predict, show_source
from fmlab.models import GPT
from fmlab.objectives import CausalLM
from fmlab.parallel import Layout, parallelize, parity
from fmlab.parallel.ddp.cost import ring_bytes
from fmlab.train import adamw

# %load_ext fmlab.lab

# %% [markdown]
# ## 1 · Predict memory
# A weight has 4 bytes in **fp32**, the usual 32-bit number. Training stores more: a **gradient** for each weight; and AdamW,
# the **optimizer** that updates the weights, keeps two running averages for each.

# %%
guess_state = predict(
    "How many bytes does fp32 training with AdamW store for each weight?", unit="B/parameter"
)
guess_state

# %% [markdown]
# `parallelize` makes an **engine** of a model, a layout, an objective (the loss) and an optimizer: it owns the training
# step. An empty `Layout()` is one process.

# %%
torch.manual_seed(0)
model = GPT.from_preset("gpt2-tiny")
engine = parallelize(model, Layout(), CausalLM(), adamw(1e-3))
rows = torch.randint(4096, (8, 65))
batch = {"input_ids": rows[:, :-1], "labels": rows[:, 1:]}
result = engine.step([batch])

# %%
moments = {
    f"{i} {name}": value
    for i, state in enumerate(engine.optimizer.state.values())
    for name, value in state.items()
    if value.dim() > 0
}
held = [*engine.full_params().values(), *engine.full_grads().values(), *moments.values()]
measured = sum(t.numel() * t.element_size() for t in {id(t): t for t in held}.values())
n = model.num_parameters()
print(f"{measured:,} bytes for {n:,} parameters")
compare(
    "state", yours=guess_state, formula=4 + 4 + 4 + 4, measured=measured / n, unit="B/parameter"
)

# %% [markdown]
# Sixteen times the parameters, to the byte. AdamW's step counters are scalars and left out. Half-precision recipes also
# come to 16 or 18; chapter [[#2.1]] adds *activations*, what the forward pass keeps.

# %% [markdown]
# ## 2 · Predict traffic
# Four ranks add up a tensor of P bytes with a **ring**: each sends a quarter to its neighbour, three times to add up,
# three times to spread the sums.

# %%
guess_wire = predict("P = 4 MB on 4 ranks. How many bytes does each rank send?", unit="B")
guess_wire

# %%
# %%ranks 4 -o seen
P = 4_000_000
tensor = torch.ones(P // 4)  # fp32: 4 bytes a number
dist.barrier()
with meter.traffic() as asked, meter.wire(required=False) as line:
    dist.all_reduce(tensor)
print("the sum is right:", bool((tensor == world_size).all()))
(asked.bytes("all_reduce"), line.sent and round(line.sent, -4))  # under 0.2 % of it is headers

# %% [markdown]
# `traffic` counts what the program asked for. `wire` asks the operating system what left through this process's own sockets
# (Linux only; a dash elsewhere).

# %%
payload, sent = seen[0]
compare(
    Row("payload", formula=4_000_000, measured=payload, unit="B"),
    Row(
        "sent by rank 0",
        yours=guess_wire,
        formula=int(ring_bytes("all_reduce", payload, 4)),
        measured=sent,
        unit="B",
    ),
)

# %% [markdown]
# $2(n-1)/n \cdot P$: with many ranks a little less than twice the tensor, however many there are. As far as bytes go,
# data parallelism scales.

# %% [markdown]
# ## 3 · Compare with one device
# Numbers that agree with a formula can still train the wrong model. `parity` runs one step on one device and on the
# ranks, from the same weights and pieces, and compares everything.

# %%
# %%ranks 4
small = partial(GPT.from_preset, "gpt2-tiny", num_layers=2, vocab_size=501)
report = parity(small, Layout(data=4))
print(f"targets on each rank: {list(report.targets)}")
print(
    f"{len(report.rows)} gradients, largest relative error below 1e-5: {report.worst.gradient.error < 1e-5}"
)
print(f"equal to one device: {report.ok}")

# %% [markdown]
# The ranks have *different* numbers of **targets**, pieces to predict, on purpose: with equal shares, an average of averages
# would pass for right. Chapter [[#2.2]] breaks that one.

# %% [markdown]
# ## 4 · Break it on purpose
# This is the line that adds up the gradients of all ranks:

# %%
from fmlab.parallel.ddp import Reducer

show_source(Reducer.all_reduce)

# %% [markdown]
# **Bug 1.** Somebody divides by the number of ranks, "to get the mean". But the losses were already divided by the count
# of *all* targets.

# %%
guess_factor = predict(
    "On 4 ranks: each gradient becomes how many times the right one?", unit="x"
)
guess_factor

# %%
# %%ranks 4 -o factors
from fmlab.parallel.ddp import DataParallel, Reducer


class DividedAgain(Reducer):
    def all_reduce(self, flat):
        flat /= dist.get_world_size()
        return super().all_reduce(flat)


class Engine1(DataParallel):
    reducer_class = DividedAgain


report = parity(small, Layout(data=4), engine=Engine1)
print(report.diagnosis)
round(report.worst.gradient.factor, 4)

# %%
compare(
    "factor of every gradient", yours=guess_factor, formula=1 / 4, measured=factors[0], unit="x"
)

# %% [markdown]
# Does training crash? No. AdamW even hides it: its step does not depend on the gradient's scale. But clipping, which
# shortens large gradients, sets in four times too late; and plain gradient descent would learn four times too slowly.

# %% [markdown]
# **Bug 2.** Gradients travel in groups, called **buckets**. Here one of them is never added up.


# %%
# %%ranks 4
class Forgetful(Reducer):
    def all_reduce(self, flat):
        return None if flat is self.buckets[0].flat else super().all_reduce(flat)


class Engine2(DataParallel):
    reducer_class = Forgetful


report = parity(small, Layout(data=4, bucket_mb=0.5), engine=Engine2)
print(
    f"parameters that differ: {len(report.different)} of {len(report.rows)}; ranks agree: {not report.ranks_differ}"
)
print(report.diagnosis)

# %% [markdown]
# ## 5 · What breaks: a rank that does not call
# A **collective**, such as all-reduce, needs every rank. If one is missing, a cluster hangs, then times out: after 10
# minutes (NCCL, the library of GPUs) or 30 (gloo, of CPUs). Here the pool names rank and call within seconds.

# %% tags=["raises-exception", "timing"]
# %%ranks 4 --timeout 5
if rank != 2:
    dist.all_reduce(torch.ones(3))

# %% [markdown]
# The ranks start again by themselves, and the next cell works.

# %%
# %%ranks 4
total = torch.ones(1)
dist.all_reduce(total)
int(total)

# %% [markdown]
# ## What production systems do
# torchtitan accepts a new parallelism when its loss curve follows that of a plain FSDP run ([[#2.4]]), its *control*
# (torchtitan's `docs/converging.md`). Megatron-LM's tests compare losses with stored ones, exactly in deterministic
# mode. Neither compares gradients: parity does.

# %% [markdown]
# ## Exercises
# ### Exercise 0.2.1 (core): how many bytes?


# %% exercise="0.2.1"
def ring_all_reduce_bytes(numbers: int, bytes_each: int, ranks: int) -> float:
    """Return the bytes that each rank sends in a ring all-reduce of `numbers` numbers."""
    # BEGIN SOLUTION
    return 2 * (ranks - 1) / ranks * numbers * bytes_each
    # END SOLUTION


# %% check="0.2.1"
check("0.2.1", ring_all_reduce_bytes)

# %% [markdown]
# ### Exercise 0.2.2 (core): one mean over all ranks
# Rank r has the **sum** of the losses of its targets and their **count**. Some ranks may have no targets.


# %% exercise="0.2.2"
def global_mean(sums: list[float], counts: list[int]) -> float:
    """Return the mean loss over all targets of all ranks; 0.0 if there are none at all."""
    # BEGIN SOLUTION
    return sum(sums) / sum(counts) if sum(counts) else 0.0
    # END SOLUTION


# %% check="0.2.2"
check("0.2.2", global_mean)

# %% [markdown]
# ### Exercise 0.2.3 (optional): the diagnosis
# You get, for each parameter, gradient on the ranks / gradient on one device. What happened on `ranks` ranks?


# %% exercise="0.2.3"
def diagnose(factors: dict[str, float], ranks: int) -> str:
    """Return "fine", "divided twice" (1/ranks), "not divided" (ranks), or "another bug".

    Allow 1 % of rounding. Say one of the middle two only if *every* parameter shows it.
    """

    # BEGIN SOLUTION
    def all_near(target: float) -> bool:
        return all(abs(factor - target) <= 0.01 * target for factor in factors.values())

    names = {1.0: "fine", 1 / ranks: "divided twice", float(ranks): "not divided"}
    return next((name for target, name in names.items() if all_near(target)), "another bug")
    # END SOLUTION


# %% check="0.2.3"
check("0.2.3", diagnose)

# %% [markdown] tags=["reading"]
# ## Further reading
# - Patarasuk and Yuan 2009, *Bandwidth optimal all-reduce algorithms*, section 3: why 2(n-1)/n cannot be beaten.
# - Li et al. 2020, *PyTorch Distributed: Experiences on Accelerating Data Parallel Training*, section 3.
# - Rajbhandari et al. 2020, *ZeRO*, section 3: where the 16 bytes of a parameter go.
# - Kingma and Ba 2015, *Adam*, algorithm 1: the two running averages.
