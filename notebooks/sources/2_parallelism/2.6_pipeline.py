# %% [markdown]
# **You will learn** how stages of a model work at the same time, what a schedule costs, and what it holds.

# %% tags=["setup"]
from functools import partial
from itertools import pairwise

import torch
from fmlab.lab import Row, Table, check, compare, predict, schedule_panel, show_source
from fmlab.lab.pipelines import NAMES, PacedModel, PacedObjective, bubble_of
from fmlab.lab.timeline import schedule_view, trace_view
from fmlab.models import GPT, GPTConfig
from fmlab.objectives import CausalLM
from fmlab.parallel import Layout, parallelize, parity, pipeline
from fmlab.parallel.composed import Composed
from fmlab.parallel.pipeline.stages import crossing, cut_blocks, work_of
from fmlab.sim.schedule import most_in_flight, replay_schedule, schedule
from fmlab.train import adamw

# %load_ext fmlab.lab

# %% [markdown]
# ## 1 · Cut
# A model is a list of blocks. A **pipeline** gives each rank a *stage*: some blocks in a row. Ranks send each
# other activations, not weights, so a pipeline talks least of all strategies.

# %%
config = GPTConfig(vocab_size=1000, max_positions=64, num_layers=7, hidden_size=64, num_heads=4)
build_model = partial(GPT, config)
model = build_model()
plan = model.parallel_plan()
for part in cut_blocks(model, plan, 2):
    blocks = [type(model.blocks[i]).__name__ for i in part]
    sent = crossing(list(model.blocks), part.start) if part.start else []
    print(f"blocks {part.start} to {part.stop - 1}: {len(blocks)} blocks, receives {sent}")

# %% [markdown]
# Seven layers on two stages are 3 and 4. But the last stage also has the output head. How heavy is that?

# %%
guess_head = predict(
    "A layer multiplies 49,152 weights a token. How many layers is the head worth?",
    unit="layers",
)
guess_head

# %%
work = [work_of(block) for block in model.blocks]
compare(
    "head",
    yours=guess_head,
    formula=64 * 1000 / (12 * 64**2),
    measured=work[-1] / work[1],
    unit="layers",
)

# %%
found = {}
for where in ("even", "weighted"):
    found[where] = [sum(work[i] for i in part) for part in cut_blocks(model, plan, 2, where)]
Table(
    {
        "cut": list(found),
        "stage 0": [w[0] for w in found.values()],
        "stage 1": [w[1] for w in found.values()],
    },
    kinds={"stage 0": "modelled", "stage 1": "modelled"},
    units={"stage 0": "weights a token", "stage 1": "weights a token"},
)

# %% [markdown]
# The slowest stage sets the pace. `Layout(stage_cuts="weighted")` makes the largest stage as small as can be; a
# tuple of block numbers cuts where you say.

# %% [markdown]
# ## 2 · Micro-batches
# With one batch, a single stage works at a time. So the batch is cut into **micro-batches**, and the stages work
# on different ones. What still idles is the **bubble**.

# %%
guess_one = predict(
    "4 stages, 1 micro-batch: which share of their time do stages idle?", unit="%"
)
guess_one

# %%
guess_eight = predict(
    "And with 8 micro-batches, all forward first, then all backward?", unit="%"
)
guess_eight

# %%
for m in (1, 8):
    seconds = replay_schedule(schedule("gpipe", 4, m), forward=1, backward=2).seconds
    print(f"{m} micro-batches: {seconds:g} forward passes long, {3 * m} of them busy")
compare(
    Row("1 micro-batch", guess_one, formula=100 * 3 / (1 + 3), unit="%"),
    Row("8 micro-batches", guess_eight, formula=100 * 3 / (8 + 3), unit="%"),
)

# %% [markdown]
# The bubble is $\frac{p-1}{m+p-1}$ for $p$ stages and $m$ micro-batches. A schedule is a list of passes; a simulator
# replays it, and says when each pass can start. This one, all forward first, is **GPipe**'s.

# %%
schedule_view(replay_schedule(schedule("gpipe", 4, 8)))

# %% [markdown]
# ## 3 · Which schedule?
# A schedule only says in which order a stage runs its passes. Try all five; each bar is a pass, its colour the
# kind. How many micro-batches take 1F1B below 10 %?

# %%
schedule_panel()

# %% [markdown]
# **1F1B** (one forward, one backward) begins a backward pass as soon as it can. Its bubble is GPipe's, but a stage
# holds the activations of at most $p$ micro-batches, not of all $m$.

# %%
table = {"schedule": list(NAMES), "bubble": [], "by formula": [], "holds at most": []}
for name, (kind, chunks) in NAMES.items():
    actions = schedule(kind, 4, 8, chunks)
    seconds = replay_schedule(actions, kind=kind).seconds
    table["bubble"].append(f"{1 - 24 / seconds:.1%}")
    table["by formula"].append(f"{bubble_of(name, 4, 8):.1%}")
    table["holds at most"].append(max(map(most_in_flight, actions)) / chunks)
Table(
    table,
    kinds={"bubble": "modelled", "by formula": "modelled", "holds at most": "modelled"},
    units={"holds at most": "micro-batches"},
)

# %% [markdown]
# - **Interleaved**: two chunks of the model a stage. The bubble halves, messages double.
# - **ZB-H1** (*zero bubble*): 1F1B whose weight gradients wait and fill the bubble.
# - **ZBV**: chunks go down the stages and up again.

# %% [markdown]
# ## 4 · The same lists on real ranks
# Four ranks on few cores cannot show the times of four chips. So here each pass *waits* 15 ms a block instead of
# multiplying. Processes, messages and autograd are real.


# %%
def record(name):
    kind, chunks = NAMES[name]
    layout = Layout(pipeline=4, schedule=kind, virtual_stages=chunks, micro_batches=8)
    engine = parallelize(PacedModel(8, 0.015), layout, PacedObjective(), adamw(1e-3))
    batches = [{"x": torch.full((2, 4), float(i))} for i in range(8)]
    engine.step(batches[:1])  # the first step also sends shapes
    engine.pipeline.record_next_step()
    engine.step(batches)
    trace = engine.pipeline.trace()
    engine.close()
    return trace


# %%
# %%ranks 4 -o everyone
traces = {name: record(name) for name in NAMES}
traces if rank == 0 else "as rank 0"

# %%
measured = everyone[0]
for name, (kind, chunks) in NAMES.items():
    same = measured[name].order() == schedule(kind, 4, 8, chunks)
    most = [stage.most_in_flight / chunks for stage in measured[name].stages]
    print(f"{name}: ran as scheduled: {same}; stages held {most} micro-batches")

# %% [markdown]
# The panel above shows 1F1B as simulated. As it ran:

# %% tags=["timing"]
trace_view(measured["1F1B"])

# %% [markdown]
# And ZBV, the V: simulated, then real. Pale bars are the second chunk.

# %%
schedule_view(replay_schedule(schedule("zbv", 4, 8, 2), kind="zbv"))

# %% tags=["timing"]
trace_view(measured["ZBV"])

# %%
compare(
    *(
        Row(
            name,
            formula=100 * bubble_of(name, 4, 8),
            measured=100 * trace.bubble,
            unit="%",
            noisy=True,
        )
        for name, trace in measured.items()
    )
)

# %% [markdown]
# Measured bubbles are larger: messages, Python between passes, and whatever else this machine does. The order of
# schedules should be the same.

# %% [markdown]
# ## 5 · How does it run?
# A stage takes its actions one by one. It waits for a message only where an action needs one, and never for one
# it sends.

# %%
show_source(pipeline.runtime.Pipeline, region="perform")

# %% [markdown]
# Each pair of stages has one channel for each direction. Messages arrive in the order of the sender's schedule,
# which everyone knows: so no two stages can wait for each other.

# %%
show_source(pipeline.messages, region="order")

# %% [markdown]
# ## 6 · A backward pass in two parts
# Behind $y = xW$ the backward pass owes two products: the gradient of $x$, for which the stage before waits, and
# that of $W$, which nobody needs before the optimizer.

# %%
show_source(pipeline.split_backward, region="input")

# %%
from fmlab.parallel.pipeline.split_backward import SplitBackward, edge_of
from torch.utils.flop_counter import FlopCounterMode

layer = torch.nn.Linear(256, 256)
x = torch.randn(64, 256, requires_grad=True)
output = layer(x)
split = SplitBackward([edge_of(output)], [edge_of(x)])
with FlopCounterMode(display=False) as part_b:
    split.input_pass([torch.ones_like(output)])
with FlopCounterMode(display=False) as part_w:
    split.weight_pass()
print(f"B: {part_b.get_total_flops():,} FLOPs, W: {part_w.get_total_flops():,}")

# %% [markdown]
# Each part is one product of $2 \cdot 64 \cdot 256^2$ FLOPs: nothing is computed twice.

# %% [markdown]
# ## 7 · What a stage holds
# Activations stay until the backward pass. With the real model: bytes that the first of two stages holds between
# passes, 6 micro-batches.

# %%
guess_times = predict("How many times more does GPipe hold there than 1F1B?", unit="times")
guess_times


# %%
def held(kind):
    layout = Layout(pipeline=2, schedule=kind, micro_batches=6)
    engine = parallelize(build_model(), layout, CausalLM(), adamw(1e-3))
    tokens = torch.randint(1000, (12, 33), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:].contiguous()}
    engine.pipeline.record_next_step()
    engine.step(layout.split(batch, 0))
    trace = engine.pipeline.trace()
    engine.close()
    pairs = [(stage.passes[0].held, stage.most_held) for stage in trace.stages]
    return [(round(one / 1e6, 2), round(most / 1e6, 2)) for one, most in pairs]  # MB


# %%
# %%ranks 2 -o bytes_held
{kind: held(kind) for kind in ("gpipe", "1f1b")}

# %%
stage_0 = {kind: stages[0] for kind, stages in bytes_held[0].items()}
one = stage_0["1f1b"][0]
print(f"one micro-batch: {one:.2f} MB on stage 0")
most = {kind: pair[1] for kind, pair in stage_0.items()}
compare(
    Row("GPipe", formula=6 * one, measured=most["gpipe"], unit="MB"),
    Row("1F1B", formula=2 * one, measured=most["1f1b"], unit="MB"),
    Row("ratio", guess_times, formula=3, measured=most["gpipe"] / most["1f1b"], unit="times"),
)

# %% [markdown]
# ## 8 · Equal to one device
# The head and the token table are one parameter, and live on two stages. Each adds its part of the gradient; the
# two are summed over just these stages, and count once in the norm.

# %%
# %%ranks 2
for name, (kind, chunks) in NAMES.items():
    layout = Layout(pipeline=2, schedule=kind, virtual_stages=chunks, micro_batches=4)
    report = parity(build_model, layout, precision="fp64", steps=1)
    if rank == 0:
        print(
            f"{name}: {len(report.rows)} gradients and weights equal one device's: {report.ok}"
        )

# %% [markdown]
# ## 9 · What production does
# PyTorch's `torch.distributed.pipelining` runs the same schedules. Megatron-LM trains with interleaved 1F1B.
# DeepSeek-V3's *DualPipe* splits backward passes too, and feeds its pipeline from both ends.

# %%
# %%ranks 2
report = parity(build_model, Layout(pipeline=2, micro_batches=4), engine="torch", steps=1)
if rank == 0:
    print(f"{report.engine}: {len(report.rows)} gradients and weights equal: {report.ok}")

# %% [markdown]
# ## 10 · What breaks
# Three common bugs. None raises an error. Compare with one device.


# %%
class UntiedHead(Composed):  # first and last stage each keep their own gradient of the table
    def _divide(self, ledger):
        ledger = super()._divide(ledger)
        object.__setattr__(ledger.entries["blocks.0.tokens.weight"], "partial", ())
        return ledger


class ScaledByOneStage(Composed):  # one stage takes a mean over its micro-batches
    def _accumulate(self, micro_batches, counts):
        sums = super()._accumulate(micro_batches, counts)
        for gradient in self.ledger.gradients().values() if self.stages.rank else ():
            gradient /= len(micro_batches)
        return sums


# %%
class LostMicroBatch(Composed):  # an off-by-one in the schedule
    def _accumulate(self, micro_batches, counts):
        return super()._accumulate(micro_batches[:-1], counts)


# %%
# %%ranks 2
for bug in (UntiedHead, ScaledByOneStage, LostMicroBatch):
    report = parity(build_model, Layout(pipeline=2, micro_batches=4), engine=bug, steps=1)
    if rank == 0:
        wrong = [row.gradient.factor for row in report.different]
        print(f"{report.engine}: {len(wrong)} of {len(report.rows)} parameters differ")
        print(
            f"   loss {report.loss.factor:.2f}x, smallest factor of a gradient {min(wrong):.2f}x"
        )

# %% [markdown]
# The number that gives it away: *one* parameter is a tie; all of one stage, by one factor, is a stage's own scaling; a
# loss that is too small is a micro-batch that never ran.

# %% [markdown]
# ## Exercises
# ### Exercise 2.6.1 (core): write the 1F1B schedule
# The order of one stage's passes, as words.


# %% exercise="2.6.1"
def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> list[str]:
    """Return the passes of a stage under 1F1B, in order: "F0", "B0", ...

    A stage first does as many forward passes as there are stages behind it (fewer if there are
    not so many micro-batches), then one forward and one backward pass in turn, and at last the
    backward passes that are left.
    """
    # BEGIN SOLUTION
    ahead = min(stages - 1 - stage, micro_batches)
    order = [f"F{i}" for i in range(ahead)]
    for i in range(micro_batches - ahead):
        order += [f"F{i + ahead}", f"B{i}"]
    return order + [f"B{i}" for i in range(micro_batches - ahead, micro_batches)]
    # END SOLUTION


# %% check="2.6.1"
check("2.6.1", one_forward_one_backward)

# %% uses="2.6.1"
for stage in range(4):
    print(" ".join(one_forward_one_backward(stage, 4, 6)))

# %% [markdown]
# ### Exercise 2.6.2 (core): choose the micro-batches
# Enough, and no more: each one makes the passes smaller and less efficient.


# %% exercise="2.6.2"
def fewest_micro_batches(stages: int, chunks: int, bubble: float) -> int:
    """Return the smallest number of micro-batches with which the bubble is not above `bubble`.

    chunks: of each stage. 1 means 1F1B; 2 and more interleaved, whose bubble is
    (p-1) / (v m + p-1), and whose micro-batches come in whole groups of as many as there are
    stages. Allow a rounding error of 1e-9.
    """
    # BEGIN SOLUTION
    step = stages if chunks > 1 else 1
    m = step
    while (stages - 1) / (chunks * m + stages - 1) > bubble + 1e-9:
        m += step
    return m
    # END SOLUTION


# %% check="2.6.2"
check("2.6.2", fewest_micro_batches)

# %% [markdown]
# ### Exercise 2.6.3 (optional): cut by work
# The slowest stage sets the pace.


# %% exercise="2.6.3"
def cut_by_work(work: list[int], stages: int) -> list[int]:
    """Return the index of the first block of each stage but the first.

    work[i] is what block i costs. Each stage has one block at least, all in order. Of all cuts,
    return one whose stage with the most work has as little as possible.
    """
    # BEGIN SOLUTION
    from itertools import combinations

    def slowest(starts):
        return max(sum(work[a:b]) for a, b in pairwise([0, *starts, len(work)]))

    return list(min(combinations(range(1, len(work)), stages - 1), key=slowest))
    # END SOLUTION


# %% check="2.6.3"
check("2.6.3", cut_by_work)

# %% [markdown] tags=["reading"]
# ## Further reading
# - Y. Huang et al., *GPipe*, 2019, section 2.3: micro-batches and the bubble.
# - D. Narayanan et al., *Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM*, 2021,
#   section 2.2: 1F1B and its interleaved form.
# - P. Qi et al., *Zero Bubble Pipeline Parallelism*, 2023, section 2: the backward pass in two parts.
# - DeepSeek-AI, *DeepSeek-V3 Technical Report*, 2024, section 3.2.1: DualPipe.
