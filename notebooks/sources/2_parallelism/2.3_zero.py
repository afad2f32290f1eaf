# %% [markdown]
# **You will learn** what each rank stores of a model in training, how ZeRO divides it, and what that sends.

# %% tags=["setup"]
from functools import partial

import torch
from fmlab.lab import Row, Table, caption, check, compare, figure, predict, show_source
from fmlab.lab.figures import PALETTE
from fmlab.meter import traffic
from fmlab.models import GPT
from fmlab.objectives import CausalLM
from fmlab.parallel import Layout, parallelize, parity, zero
from fmlab.parallel.composed import Composed
from fmlab.parallel.ddp import ring_bytes
from fmlab.parallel.zero import K, Slices, held_bytes, sent_bytes, state_bytes
from fmlab.train import adamw

# %load_ext fmlab.lab

# %% [markdown]
# ## 1 · What a replica stores
# Replicas ([[#2.2]]) all hold the same: parameters, gradients, and AdamW's two moments. Here all are fp32, 4 bytes
# each, as in [[#2.1]].

# %%
RANKS, LENGTH = 4, 32
torch.manual_seed(0)
tokens = torch.randint(4096, (8, LENGTH + 1))
batch = {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def build(engine="fmlab", dtype=torch.float32, **layout):
    """An engine of this notebook's model on the ranks that run the cell."""
    model = GPT.from_preset("gpt2-tiny").to(dtype)
    return parallelize(model, Layout(data=RANKS, **layout), CausalLM(), adamw(1e-3), engine)


count = GPT.from_preset("gpt2-tiny").num_parameters()
print(f"{count:,} parameters")

# %%
guess_replica = predict("How many bytes does a rank store for each parameter?", unit="bytes")
guess_replica

# %%
# %%ranks 4 -o held


def hold(**layout):
    """Bytes that this rank holds after a step, by line."""
    engine = build(**layout)
    engine.step(engine.layout.split(batch, rank))
    held = held_bytes(engine)
    engine.close()
    return held


hold().device

# %%
fp32 = dict(k=K["adam fp32"], parameter_bytes=4, gradient_bytes=4)
formula, lines = state_bytes(count, RANKS, 0, **fp32), ("parameters", "gradients", "optimizer")
each, measured = formula.total / count, held[0].total / count
rows = [Row("each parameter", yours=guess_replica, formula=each, measured=measured, unit="B")]
for line in lines:
    megabytes = [getattr(source, line) / 1e6 for source in (formula, held[0])]
    rows.append(Row(line, formula=megabytes[0], measured=megabytes[1], unit="MB"))
compare(*rows)

# %% [markdown]
# All four ranks store the same 21.6 MB. Three of four copies are redundant: ZeRO, the *zero redundancy
# optimizer*, divides them.

# %% [markdown]
# ## 2 · Slices
# How do four ranks share parameters of any shape equally? Lay them end to end in one vector, and cut that. The
# cuts fall where they fall.

# %%
sizes = {"embedding": 10, "bias": 1, "matrix": 6, "norm": 2}
offsets = dict(zip(sizes, (0, 10, 11, 17), strict=True))
length = -(-sum(sizes.values()) // RANKS)  # elements of a slice, rounded up
columns = {"parameter": list(sizes), "elements": list(sizes.values())}
kinds = {"elements": "given"}
for r in range(RANKS):
    bounds = [Slices(offsets[name], length).bounds(size, r) for name, size in sizes.items()]
    columns[f"rank {r}"] = [end - first for first, end in bounds]
    kinds[f"rank {r}"] = "modelled"
Table(columns, kinds=kinds)

# %% [markdown]
# A parameter may lie on several ranks, and a rank may own *nothing* of it. So an optimizer on slices must work
# element by element: Adam does; Muon, which looks at whole matrices, does not.

# %%
show_source(zero.partition, "slices")

# %% [markdown]
# ## 3 · Three stages
# Stage 1 divides the optimizer's state, stage 2 the gradients too, stage 3 the parameters too.

# %%
guess_2 = predict("How many bytes a parameter does a rank of 4 store in stage 2?", unit="bytes")
guess_2

# %%
# %%ranks 4 -o stages
[hold(zero=stage).device for stage in range(4)]

# %%
rows = []
for stage, mine in enumerate(stages[0]):
    expected = state_bytes(count, RANKS, stage, **fp32).total / count
    yours = {"yours": guess_2} if stage == 2 else {}
    rows.append(
        Row(f"stage {stage}", formula=expected, measured=mine.total / count, unit="B", **yours)
    )
compare(*rows)

# %%
fig, ax = figure(
    x="stage of ZeRO [number]", y="held by a rank [MB]", title="Four ranks, fp32, AdamW"
)
bottom = [0.0] * 4
for color, line in zip(PALETTE, lines, strict=False):
    sizes_mb = [getattr(mine, line) / 1e6 for mine in stages[0]]
    ax.bar(range(4), sizes_mb, bottom=bottom, color=color, label=line)
    bottom = [low + size for low, size in zip(bottom, sizes_mb, strict=True)]
ax.set_xticks(range(4))
ax.legend()
totals = {f"stage {s}": round(total, 1) for s, total in enumerate(bottom)}
caption(fig, kind="measured", text="What is divided shrinks to a quarter.", numbers=totals)

# %% [markdown]
# Only *states* shrink. Activations, and the vectors under way, do not: with large batches they are most of the
# memory ([[#2.1]]).

# %% [markdown]
# ## 4 · The figure in the paper
# Large models train in 16 bits: 2 bytes a parameter, 2 a gradient. The optimizer keeps fp32: a master copy and
# two moments, **K = 12**.

# %%
guess_paper = predict(
    "7.5 billion parameters on 64 GPUs: what does stage 3 store on each?", unit="GB"
)
guess_paper

# %%
paper = (120, 31.4, 16.6, 1.9)
rows = [
    Row(
        f"stage {stage}",
        formula=state_bytes(7_500_000_000, 64, stage).total / 1e9,
        quoted=paper[stage],
        source="arXiv:1910.02054, figure 1",
        unit="GB",
        digits=3,
        **({"yours": guess_paper} if stage == 3 else {}),
    )
    for stage in range(4)
]
compare(*rows)

# %% [markdown]
# Some say 18 bytes a parameter instead of 16: gradients that add up in fp32. Ours do. On a bf16 model:

# %%
# %%ranks 4 -o mixed
[hold(zero=stage, dtype=torch.bfloat16).device for stage in (1, 2, 3)]

# %%
compare(
    *[
        Row(
            f"stage {stage}",
            formula=state_bytes(count, RANKS, stage, gradient_bytes=4).total / count,
            measured=mine.total / count,
            unit="B",
        )
        for stage, mine in zip((1, 2, 3), mixed[0], strict=True)
    ]
)

# %% [markdown]
# ## 5 · What it sends
# Stages 1 and 2 **reduce-scatter** gradients (each rank gets the sum of its slice) and **all-gather** new
# parameters. Those are the two halves of replicas' all-reduce.

# %%
show_source(zero.summing, "send")

# %%
guess_sent = predict(
    "How many times the bytes of stage 2 does stage 3 send in a step?", unit="times"
)
guess_sent

# %%
# %%ranks 4 -o counted


def send(engine, micro_batches):
    """Bytes that this rank sends in a step with ring algorithms, a few small ones left out."""
    engine.step(micro_batches)
    with traffic() as sent:
        engine.step(micro_batches)
    large = [call for call in sent.calls if call.bytes > 2000]
    return sum(ring_bytes(call.op, call.bytes, RANKS) for call in large)


found = {}
for stage, parts in ((0, 1), (1, 1), (2, 1), (3, 1), (2, 2), (3, 2)):
    engine = build(zero=stage, micro_batches=parts)
    found[stage, parts] = send(engine, engine.layout.split(batch, rank))
    engine.close()
found

# %%
rows = []
for (stage, parts), measured in counted[0].items():
    expected = sent_bytes(count, RANKS, stage, parts)["total"] / 1e6
    name = f"stage {stage}, {parts} micro-batch" + "es" * (parts > 1)
    rows.append(Row(name, formula=expected, measured=measured / 1e6, unit="MB"))
ratio = counted[0][3, 1] / counted[0][2, 1]
compare(
    *rows, Row("stage 3 / stage 2", yours=guess_sent, formula=1.5, measured=ratio, unit="times")
)

# %% [markdown]
# Stage 2 costs nothing over replicas. Stage 3 gathers parameters twice, forward and backward, for *every*
# micro-batch. (A tied table, which two blocks share, stays between them; the count is the same.)

# %% [markdown]
# With several micro-batches, gradients in stage 2 add up whole on each rank until the last one: its saving is
# gone meanwhile. Stage 3 sums after each, and sends more.

# %% [markdown]
# ## 6 · Whole for a moment
# In stage 3 a block's parameters are whole only while it runs. An autograd function does it. A second one,
# tied to what a block returns, gathers again when the backward pass comes:

# %%
show_source(zero.gathering, "whole")

# %% [markdown]
# Autograd would keep the weights that it saved for the backward pass. So it is told to note *which part of
# which vector* it was, and to ask again:

# %%
show_source(zero.gathering, "pack")

# %% [markdown]
# Watch a step: how large a share of the parameters is whole, after each gathering and freeing?

# %%
# %%ranks 4 -o watched
engine = build(zero=3)
engine.step(engine.layout.split(batch, rank))
vectors, seen = engine.states.vectors, []


def watch(vector, event):
    """Call `event`, then note the share of parameters that are whole, if it has changed."""
    result = event()
    share = round(sum(v.flat.size for v in vectors if v.whole is not None) / count, 2)
    seen.extend([share] if seen[-1:] != [share] else [])
    return result


for vector in vectors:
    vector.gather = partial(watch, vector, vector.gather)
    vector.free = partial(watch, vector, vector.free)
engine.step(engine.layout.split(batch, rank))
seen

# %%
share = watched[0]
fig, ax = figure(
    x="event of the step [number]", y="whole parameters [share]", title="A step of stage 3"
)
ax.step(range(len(share)), share, where="post", color=PALETTE[0])
ax.set_ylim(0, 1)
text = "Layers come and go; the tied table (0.39) stays for them all. What is on its way is left out."
caption(fig, kind="measured", text=text, numbers={"largest share": max(share)})

# %% [markdown]
# Used on its own, a layer of such a model has no numbers. That is an error which names it, not a wrong result:

# %%
# %%ranks 4
try:
    engine.model.blocks[1].mlp(torch.zeros(1, 128))
except RuntimeError as error:
    if rank == 0:
        print(error)

# %% [markdown]
# ## 7 · Offload
# The host has more memory than the chip. With `offload`, slices and moments live there, and the update runs on
# the host (Ren et al. 2021).

# %%
# %%ranks 4 -o offloaded
[hold(zero=3, offload=what) for what in ("none", "optimizer", "parameters")]

# %%
places = ("none", "optimizer", "parameters")
Table(
    {
        "offload": places,
        "on the chip": [mine.device.total / count for mine in offloaded[0]],
        "in the host's memory": [mine.host.total / count for mine in offloaded[0]],
    },
    kinds={"on the chip": "measured", "in the host's memory": "measured"},
    units={"on the chip": "B a parameter", "in the host's memory": "B a parameter"},
)

# %% [markdown]
# On one chip of 80 GB, 16 bytes leave room for 5 billion parameters; the 2 bytes that must stay with
# `offload="optimizer"`, for 40 billion. The price: each step moves gradients out and weights in, over a slow
# link.

# %% [markdown]
# ## 8 · DeepSpeed
# The authors of ZeRO ship it as DeepSpeed. Our `deepspeed` engine gives it the same model, optimizer, data and
# loss. Its configuration:

# %%
from fmlab.parallel.engines import deepspeed_engine

show_source(deepspeed_engine.settings)

# %%
# %%ranks 4
import warnings

warnings.filterwarnings("ignore", category=FutureWarning)  # DeepSpeed uses torch's older names
build_model = partial(GPT.from_preset, "gpt2-tiny")
for name in ("fmlab", "deepspeed"):
    for stage in (1, 2, 3):
        report = parity(build_model, Layout(data=RANKS, zero=stage), name, batches=[batch])
        if rank == 0:
            print(
                f"{name}, stage {stage}: {len(report.rows)} gradients and weights equal: {report.ok}"
            )

# %% [markdown]
# ## 9 · What breaks
# Three bugs, none of which raises an error.


# %%
class DividedTwice(Composed):
    def _accumulate(self, micro_batches, counts):
        sums = super()._accumulate(micro_batches, counts)
        for gradient in self.ledger.gradients().values():
            gradient /= RANKS  # but losses were divided by the global count already
        return sums


class NormOfOwnSlices(Composed):
    def _divide(self, ledger):
        ledger = super()._divide(ledger)
        ledger.norm = lambda gradients: torch.stack(
            [g.norm() for g in gradients.values()]
        ).norm()
        return ledger


# %%
class GatherForgotten(Composed):
    def _divide(self, ledger):
        ledger = super()._divide(ledger)
        self.states.updated = lambda: None
        return ledger


# %%
# %%ranks 4
for bug, most in ((DividedTwice, None), (NormOfOwnSlices, 0.1), (GatherForgotten, None)):
    layout = Layout(data=RANKS, zero=2)
    report = parity(build_model, layout, bug, batches=[batch] * 2, max_grad_norm=most)
    if rank == 0:
        print(f"{report.engine}: the norm is {report.grad_norm.factor:.2f}x one device's")
        print(f"   {report.diagnosis}")

# %% [markdown]
# One factor everywhere: scaled twice. A norm that is too small, and different on each rank: its squares were
# not added up over ranks. Gradients right, weights wrong: the new weights never arrived.

# %% [markdown]
# ## Exercises
# ### Exercise 2.3.1 (core): who owns what?
# Cut one parameter as ZeRO does.


# %% exercise="2.3.1"
def owners(offset: int, numel: int, length: int, ranks: int) -> list[tuple[int, int]]:
    """Return which elements of a parameter each rank owns, as (first, end), end not included.

    The parameter's `numel` elements begin at `offset` of a vector in which rank r owns the
    `length` elements from r * length on. A rank that owns nothing of it gets an empty range
    with 0 <= first == end <= numel.
    """
    # BEGIN SOLUTION
    found = []
    for rank in range(ranks):
        first = min(max(rank * length - offset, 0), numel)
        end = min(max((rank + 1) * length - offset, 0), numel)
        found.append((first, end))
    return found
    # END SOLUTION


# %% check="2.3.1"
check("2.3.1", owners)

# %% uses="2.3.1"
print("the matrix of section 2:", owners(offsets["matrix"], sizes["matrix"], length, RANKS))

# %% [markdown]
# ### Exercise 2.3.2 (core): one norm for all ranks
# Clipping needs the norm of the whole gradient. Some of it is divided, some copied, some has two names.


# %% exercise="2.3.2"
def global_norm(
    ranks: list[dict[str, torch.Tensor]], copied: set[str], tied: list[tuple[str, str]]
) -> float:
    """Return the Euclidean norm of the whole gradient, each logical element counted once.

    ranks[r][name] is what rank r holds of a gradient: a piece (pieces of all ranks together are
    the gradient; one may be empty), or, for the names in `copied`, all of it. tied: pairs of
    names of one parameter, whose one gradient appears under both.
    """
    # BEGIN SOLUTION
    second_names = {second for _, second in tied}
    total = 0.0
    for rank, pieces in enumerate(ranks):
        for name, piece in pieces.items():
            if name in second_names or (name in copied and rank > 0):
                continue
            total += piece.double().square().sum().item()
    return total**0.5
    # END SOLUTION


# %% check="2.3.2"
check("2.3.2", global_norm)

# %% [markdown]
# ### Exercise 2.3.3 (optional): which stage?
# Later stages save more, and cost more. Choose the first that fits.


# %% exercise="2.3.3"
def first_stage(parameters: float, ranks: int, room: float, k: float = 12) -> int | None:
    """Return the lowest stage of ZeRO (0 to 3) whose states fit `room` bytes a rank, or None.

    Parameters and gradients have 2 bytes each, the optimizer has k bytes a parameter. What is
    divided is divided evenly among `ranks`.
    """
    # BEGIN SOLUTION
    for stage in range(4):
        weights = 2 / (ranks if stage >= 3 else 1)
        gradients = 2 / (ranks if stage >= 2 else 1)
        optimizer = k / (ranks if stage >= 1 else 1)
        if parameters * (weights + gradients + optimizer) <= room:
            return stage
    return None
    # END SOLUTION


# %% check="2.3.3"
check("2.3.3", first_stage)

# %% [markdown] tags=["reading"]
# ## Further reading
# - S. Rajbhandari et al., *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models*,
#   arXiv:1910.02054, sections 5 to 7: stages, memory, communication.
# - J. Ren et al., *ZeRO-Offload: Democratizing Billion-Scale Model Training*, arXiv:2101.06840, section 4.
# - S. Rajbhandari et al., *ZeRO-Infinity*, arXiv:2104.07857, section 5: beyond the host's memory.
