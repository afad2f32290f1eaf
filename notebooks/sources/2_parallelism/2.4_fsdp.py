# %% [markdown]
# **You will learn** which parameters are whole at which moment, and what each gathering costs in bytes and memory.

# %% tags=["setup"]
import tempfile
from pathlib import Path

import torch
from fmlab.lab import Row, Table, caption, check, compare, figure, predict, show_source
from fmlab.lab.figures import PALETTE
from fmlab.meter import peak_memory, traffic
from fmlab.models import GPT
from fmlab.objectives import CausalLM
from fmlab.parallel import Layout, parallelize, parity
from fmlab.parallel.composed import Composed
from fmlab.parallel.fsdp import Chunks, cost
from fmlab.parallel.fsdp.hooks import Schedule
from fmlab.parallel.fsdp.messages import Group
from fmlab.train import adamw

# %load_ext fmlab.lab

# %% [markdown]
# ## 1 · Everybody keeps some rows
# Replicas all store the whole model. **FSDP**, *fully sharded data parallel*, does what ZeRO's stage 3 does ([[#2.3]]), but
# by rows: a rank stores some *rows* of every parameter, gradient and optimizer state, its **shard**.

# %%
guess_rows = predict(
    "5 rows are divided among 4 ranks, in equal chunks as far as they go. How many has rank 3?",
    unit="rows",
)
guess_rows

# %%
rows = torch.arange(5)
chunks = [len(Chunks().shard(rows, rank, 4)) for rank in range(4)]
print("rows by rank:", chunks)
compare("rows of the last rank", yours=guess_rows, measured=chunks[-1], unit="rows")

# %% [markdown]
# Chunks are as large as they must be: 2, 2, 1, and nothing for the last. An empty shard is normal.

# %%
show_source(Chunks.shard)

# %%
RANKS, LENGTH = 4, 32
torch.manual_seed(0)
tokens = torch.randint(4096, (16, LENGTH + 1))
batch = {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def build(engine="fmlab", **layout):
    """An engine of this notebook's model on the ranks that run the cell."""
    layout = Layout(**({"data": RANKS, "fsdp": True} | layout))
    return parallelize(GPT.from_preset("gpt2-tiny"), layout, CausalLM(), adamw(1e-3), engine)


# %%
model = GPT.from_preset("gpt2-tiny")
names = ["blocks.0.tokens.weight", "blocks.1.attention.qkv.weight", "blocks.1.mlp_norm.bias"]

# %%
# %%ranks 4 -o shards
torch.manual_seed(0)
engine = build()
mine = engine.layout.split(batch, rank)
held = dict(engine.ledger.parameters())
{name: tuple(held[name].shape) for name in names}

# %%
whole = dict(model.named_parameters())
Table(
    {
        "parameter": names,
        "whole": [str(tuple(whole[name].shape)) for name in names],
        "on rank 3": [str(shards[3][name]) for name in names],
    },
    kinds={"whole": "given", "on rank 3": "measured"},
)

# %% [markdown]
# ## 2 · What is gathered when?
# A layer cannot compute with rows 96 to 127 of its matrix. So before a block runs, its parameters are
# **gathered** from all ranks; afterwards they are given back. A block is a **unit**.

# %%
guess_gathered = predict(
    "How many times in a step are the parameters of one block in the middle gathered?",
    unit="times",
)
guess_gathered

# %%
# %%ranks 4 -o records
engine.step(mine)
record = engine.states.record_next_step()
engine.step(mine)
record

# %%
events = [(event.kind, event.unit) for event in records[0].events]
middle = [kind for kind, unit in events if unit == "blocks.2"]
print("block 2:", " → ".join(middle))
compare(
    "block 2 is gathered", yours=guess_gathered, measured=middle.count("here"), unit="times"
)

# %% [markdown]
# Once for the forward pass, and again for the backward pass, which needs the weights too. Then its gradients
# leave by a **reduce-scatter**: every rank gets the sum, of its own rows only.

# %%
show_source(Schedule._before_forward)

# %% [markdown]
# The backward pass finds its way through two functions that compute nothing. One stands where a unit's output
# leaves, one where its input enters.

# %%
show_source(Schedule, "backward")

# %% [markdown]
# The step of rank 0: a unit is on its way (orange), then whole (blue), and gone again.

# %%
units = ["root", *[f"blocks.{i}" for i in range(6)]]
begin = records[0].events[0].seconds
fig, ax = figure(x="time in the step [ms]", y="unit", title="A step of rank 0")
spans = {"on its way": ("asked", "here"), "whole": ("here", "given back")}
for (label, kinds), color in zip(spans.items(), (PALETTE[1], PALETTE[0]), strict=True):
    ax.barh(0, 0, color=color, label=label)
    for row, unit in enumerate(units):
        for start, end in records[0].spans(unit, *kinds):
            ax.barh(row, (end - start) * 1e3, left=(start - begin) * 1e3, color=color)
ax.set_yticks(range(len(units)), units)
ax.invert_yaxis()
ax.legend()
gathered = {unit: sum(event.unit == unit for event in records[0].of("here")) for unit in units}
caption(fig, kind="measured", text="What is whole at which moment.", numbers=gathered)

# %% [markdown]
# The **root** unit stays: the token table is tied to the head, so no single block owns it. The last block is
# not given back, since its backward pass comes next. And a unit is asked for *early*.

# %%
order = [
    f"{kind} {unit.removeprefix('blocks.')}"
    for kind, unit in events
    if kind in ("asked", "here")
]
print(" · ".join(order[:10]))

# %% [markdown]
# Block 1 is asked for while block 0 computes: **prefetching**. In the backward pass it goes the other way.

# %% [markdown]
# ## 3 · What does it cost to send?
# Call the bytes of all parameters $M$. A ring sends $\frac{n-1}{n}M$ for a gather or a reduce-scatter, and
# twice that for an all-reduce. Plain data parallelism all-reduces once: $2M$, say.

# %%
guess_bytes = predict(
    "And FSDP? Count gathers and reduce-scatters of the whole model: how many M?", unit="M"
)
guess_bytes

# %%
# %%ranks 4 -o sent
found = {}
for reshard in (True, False):
    engine.close()
    engine = build(reshard=reshard)
    engine.step(mine)
    with traffic() as line:
        engine.step(mine)
    found[reshard] = [line.bytes("all_gather", dtype="float32"), line.bytes("reduce_scatter")]
found

# %%
M = cost.sizes(model, RANKS).total
payload = {
    r: cost.expected_payload(model, Layout(data=RANKS, fsdp=True, reshard=r))
    for r in (True, False)
}
formula = {r: (p["all_gather"] + p["reduce_scatter"]) / M for r, p in payload.items()}
found = {r: sum(sent[0][r]) / M for r in (True, False)}

# %%
compare(
    Row("given back (reshard)", guess_bytes, formula[True], found[True], unit="M"),
    Row("kept (reshard=False)", formula=formula[False], measured=found[False], unit="M"),
)

# %% [markdown]
# The paper says $3M$ and $2M$. We send less than $3M$: the root and the last block are gathered once. For a
# model with many blocks the difference is small.

# %% [markdown]
# ## 4 · What does it hold?
# The peak of parameters, says FSDP's paper (Zhao et al. 2023), on $F$ ranks: $\frac{1}{F}\sum\psi + \max\psi$, all
# shards and the largest unit. Measure it, in a forward pass of one token.

# %%
# %%ranks 4 -o peaks
engine.close()
engine = build()
one = {"input_ids": torch.zeros(1, 1, dtype=torch.long)}
with torch.no_grad(), peak_memory() as memory:
    engine.model(**one)
sum(4 * p.numel() for _, p in engine.ledger.parameters()) + memory.peak

# %%
unit = cost.sizes(model, RANKS)
print(f"whole model {unit.total / 1e6:.1f} MB, root {unit.root / 1e6:.1f} MB")
print(f"largest block {max(unit.units) / 1e6:.1f} MB")
compare(
    Row("the paper's formula", formula=cost.paper_peak(unit, RANKS) / 1e6, unit="MB"),
    Row(
        "with root and copy",
        formula=cost.expected_peak(unit, RANKS) / 1e6,
        measured=peaks[0] / 1e6,
        unit="MB",
        digits=2,
    ),
)

# %% [markdown]
# Two differences. The root is there *beside* the largest block. And chunks arrive rank by rank, while a
# parameter's rows must lie one below the other: a copy, so that a unit is there twice for a moment.

# %%
show_source(Group, "gather")

# %% [markdown]
# The paper's FSDP laid a whole unit out as one row of numbers, which needs no copy. FSDP2 and this package
# divide parameter by parameter: each has its own rows, type and optimizer state.

# %% [markdown]
# ## 5 · Micro-batches, copies, 16 bits
# Each micro-batch gathers and reduces anew: gradients of the whole model would need room on every rank.
# **Hybrid sharding** keeps several copies: gathers stay among few ranks, on one host.

# %%
layouts = {
    "one micro-batch": {},
    "4 micro-batches": {"micro_batches": 4},
    "4, kept": {"micro_batches": 4, "reshard": False},
    "2 copies": {"replicas": 2},
}
per_rank = [
    cost.expected_bytes(model, Layout(data=RANKS, fsdp=True, **more)) / 1e6
    for more in layouts.values()
]

# %%
shard = [M / (RANKS // more.get("replicas", 1)) / 1e6 for more in layouts.values()]
Table(
    {"layout": list(layouts), "sent by a rank": per_rank, "parameters on a rank": shard},
    kinds={"sent by a rank": "modelled", "parameters on a rank": "modelled"},
    units={"sent by a rank": "MB", "parameters on a rank": "MB"},
)

# %% [markdown]
# In **bf16**, matrices are cast before they are gathered, since products would cast them anyway. Gradients are
# still summed in fp32, into fp32 shards.

# %%
# %%ranks 4 -o gathered
found = {}
for precision in ("fp32", "bf16"):
    engine.close()
    engine = build(precision=precision)
    engine.step(mine)
    record = engine.states.record_next_step()
    with traffic() as line:
        engine.step(mine)
    blocks = [
        call.bytes for call in line.calls if call.op == "all_gather" and call.bytes > 300_000
    ]
    found[precision] = {"a block": min(blocks), "reduced": line.bytes("reduce_scatter")}
found

# %%
compare(
    Row(
        "a block in bf16",
        formula=0.5,
        measured=gathered[0]["bf16"]["a block"] / gathered[0]["fp32"]["a block"],
        unit="of fp32",
        digits=2,
    ),
    Row(
        "gradients",
        formula=1,
        measured=gathered[0]["bf16"]["reduced"] / gathered[0]["fp32"]["reduced"],
        unit="of fp32",
    ),
)

# %% [markdown]
# ## 6 · A model that no rank can hold
# Then nobody can build it first and divide it later. On the **meta** device a model has shapes and no memory;
# each rank draws one parameter after the other and keeps its rows.

# %%
# %%ranks 4 -o built
torch.manual_seed(7)
with torch.device("meta"):
    empty = GPT.from_preset("gpt2-tiny")
with peak_memory() as memory:
    big = parallelize(empty, Layout(data=RANKS, fsdp=True), CausalLM(), adamw(1e-3))
loss = big.step(mine).loss
{"peak": memory.peak, "loss": round(loss, 1)}

# %%
print("peak while building:", f"{built[0]['peak'] / M:.2f} of the model")
print("loss of its first step:", built[0]["loss"])

# %% [markdown]
# Shards (0.25), the largest parameter (the table: 0.39) and a copy of its shard (0.10), never the whole. The
# numbers depend on a seed and on names alone, so 4 ranks, 400 ranks and one device draw the same model.

# %% [markdown]
# ## 7 · Checkpoints
# Every rank writes its own shards, at the same time, and none holds the whole. The files know nothing of ranks.

# %%
import shutil

folder = Path(tempfile.mkdtemp()) / "step"

# %%
# %%ranks 4 -o weights
if rank == 0:
    print("saving from", world_size, "ranks")
    shutil.rmtree(folder, ignore_errors=True)  # what this cell saved before
engine.save(folder)
full = engine.full_params()
round(float(full["blocks.1.attention.qkv.weight"].double().sum()), 2)

# %%
from fmlab.parallel.checkpoint import load_model

print("\n".join(sorted(path.name for path in folder.iterdir())))
alone = load_model(GPT.from_preset("gpt2-tiny"), folder)  # one process, no ranks
same = float(alone.blocks[1].attention.qkv.weight.detach().double().sum())
compare("a sum of weights, loaded by one process", formula=weights[0], measured=round(same, 2))

# %% [markdown]
# Other layouts and engines load it as well, and `alone.save_pretrained(…)` writes Hugging Face's format.

# %% [markdown]
# ## 8 · What production does
# PyTorch's FSDP2, `fully_shard`, is the same idea with the same hooks. Our `engine="torch"` wraps it. Both
# against one device, and what they send:

# %%
# %%ranks 4
engine.close()
for name in ("fmlab", "torch"):
    report = parity(
        lambda: GPT.from_preset("gpt2-tiny"),
        Layout(data=RANKS, fsdp=True),
        engine=name,
        batches=[batch],
    )
    if rank == 0:
        print(
            f"{name}: {len(report.rows)} gradients and weights equal one device's: {report.ok}"
        )

# %%
# %%ranks 4 -o beside
found = {}
for name in ("fmlab", "torch"):
    engine = build(name)
    engine.step(mine)
    with traffic() as line:
        engine.step(mine)
    found[name] = line.bytes("reduce_scatter")
    engine.close()
found

# %%
compare(
    Row("reduce-scatter, by hand", formula=M, measured=beside[0]["fmlab"], unit="B"),
    Row("reduce-scatter, FSDP2", formula=M, measured=beside[0]["torch"], unit="B"),
)

# %% [markdown]
# ## 9 · What breaks
# Three common bugs. None raises an error.


# %%
class AveragedTwice(Composed):
    def _accumulate(self, micro_batches, counts):
        sums = super()._accumulate(micro_batches, counts)
        for gradient in self.ledger.gradients().values():
            gradient /= RANKS  # an averaging reduce: but losses were divided already
        return sums


class NormOfOwnShards(Composed):
    def _divide(self, ledger):
        ledger = super()._divide(ledger)
        ledger.norm = lambda g: torch.stack([v.norm() for v in g.values()]).norm()
        return ledger


# %%
class RootForgotten(Composed):
    def _accumulate(self, micro_batches, counts):
        root = self.states.root
        root.reduce = lambda: None  # blocks are reduced; what no block owns is not
        return super()._accumulate(micro_batches, counts)


# %%
# %%ranks 4
for bug in (AveragedTwice, NormOfOwnShards, RootForgotten):
    layout = Layout(data=RANKS, fsdp=True)
    report = parity(lambda: GPT.from_preset("gpt2-tiny"), layout, engine=bug, batches=[batch])
    if rank == 0:
        print(
            f"{report.engine}: {len(report.different)} of {len(report.rows)} parameters differ"
        )
        print(f"   the norm is {report.grad_norm.factor:.2f}x one device's")

# %% [markdown]
# The numbers that give them away: 0.25 on 4 ranks is an average too many. A norm that is off while all
# gradients agree saw one rank's shards. One parameter that differs has been forgotten: the tied table.

# %% [markdown]
# ## Exercises
# ### Exercise 2.4.1 (core): which rows?
# Divide the rows of a parameter as FSDP does.


# %% exercise="2.4.1"
def rows_of(rows: int, ranks: int, rank: int) -> range:
    """Return the rows that `rank` holds of a parameter with so many rows.

    Chunks are equal and as large as needed, so the last ranks may hold fewer rows or none:
    5 rows on 4 ranks are 0-1, 2-3, 4, none. An empty shard is an empty range: range(5, 5).
    """
    # BEGIN SOLUTION
    size = -(-rows // ranks)
    return range(min(rank * size, rows), min((rank + 1) * size, rows))
    # END SOLUTION


# %% check="2.4.1"
check("2.4.1", rows_of)

# %% uses="2.4.1"
print("as in the package:", [len(rows_of(5, 4, rank)) for rank in range(4)] == chunks)

# %% [markdown]
# ### Exercise 2.4.2 (core): what is gathered when?
# Write down a step, without prefetching.


# %% exercise="2.4.2"
def step_of(blocks: int) -> list[tuple[str, int]]:
    """Return a step with blocks 0, 1, ... as a list of ("gather" | "free" | "reduce", block).

    Parameters are given back after the forward pass of a block and gathered again for its
    backward pass. The last block is not given back in between. In the backward pass a block's
    gradients are sent ("reduce") before its parameters are freed. There is no root unit.
    """
    # BEGIN SOLUTION
    forward = [(what, i) for i in range(blocks) for what in ("gather", "free")]
    backward = [
        (what, i) for i in reversed(range(blocks)) for what in ("gather", "reduce", "free")
    ]
    return forward[:-1] + backward[1:]
    # END SOLUTION


# %% check="2.4.2"
check("2.4.2", step_of)

# %% [markdown]
# ### Exercise 2.4.3 (optional): how many copies?
# Gathers among few ranks are cheaper, but shards are larger.


# %% exercise="2.4.3"
def ranks_of_a_copy(parameters: float, largest: float, ranks: int, memory: float) -> int:
    """Return the smallest number of ranks that can share a copy of the model; 0 if none can.

    The number must divide `ranks`. Each parameter has 16 bytes of states, which are divided.
    Beside its shard a rank holds the largest unit (`largest` parameters), gathered in bf16 and
    twice, for the copy. All that must not exceed `memory` bytes.
    """
    # BEGIN SOLUTION
    for shards in range(1, ranks + 1):
        if ranks % shards == 0 and 16 * parameters / shards + 2 * 2 * largest <= memory:
            return shards
    return 0
    # END SOLUTION


# %% check="2.4.3"
check("2.4.3", ranks_of_a_copy)

# %% [markdown] tags=["reading"]
# ## Further reading
# - Y. Zhao et al., *PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel*, VLDB 2023, sections 3.2
#   (what is sharded), 3.3 (overlap), 4.1 (deferred initialisation).
# - S. Rajbhandari et al., *ZeRO*, 2020, section 7: what stage 3 sends.
# - PyTorch's `fully_shard` documentation: FSDP2, per-parameter sharding.
