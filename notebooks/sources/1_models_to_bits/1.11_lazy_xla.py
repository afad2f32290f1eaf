# The chapter on lazy tensors, in the kernel "fmlab (XLA)". Lengths and buckets are chosen so that no length of one
# part occurs in another: a program that was compiled is kept, and would not be counted again.

# %% [markdown]
# **You will learn** why a program for XLA is compiled again, how to see it coming, and how to stop it.

# %%
from fmlab.lab import need_xla

need_xla()

# %% tags=["setup"]
import torch
from fmlab.backends import get_backend, xla_spmd
from fmlab.backends.xla_counters import counted, graph_size, host_reads
from fmlab.backends.xla_program import capture, ir
from fmlab.data import LengthBuckets, signatures
from fmlab.lab import Row, Table, check, compare, predict, show_source
from fmlab.models import GPT
from fmlab.objectives import CausalLM
from fmlab.parallel import lazy
from fmlab.parallel.spmd import spmd_parity

# %% [markdown]
# ## 1 · When does it run?
# **XLA** (accelerated linear algebra) compiles for TPUs, and long did for Trainium. Its devices run **programs**, each
# made of many operations. PyTorch's code for it looks as ever:


# %%
xla = get_backend("xla")
torch.manual_seed(0)
x = xla.to_device(torch.randn(64, 64))


def four_operations():
    return torch.tanh(x @ x) * 2 + 1


# %%
guess_runs = predict(
    "y = four_operations(), and nobody reads y. How many programs does the device run?",
    unit="programs",
)
guess_runs

# %%
print(ir(four_operations()))

# %% [markdown]
# Operations are only **noted down**: shapes are known, numbers are not. From below: `aten::add` needs `aten::mul`, which
# needs `aten::tanh`, which needs `aten::mm`. At a **barrier** the notes become one program, compiled, kept and run.

# %%
with counted() as noted:
    y = four_operations()
del y  # never read, never run
with counted() as first:
    y = four_operations()
    xla.synchronize()
with counted() as again:
    y = four_operations()
    xla.synchronize()

# %%
compare(
    Row("run while noted down", guess_runs, 0, noted.runs, unit="programs"),
    Row("run at the barrier", formula=1, measured=first.runs, unit="programs"),
    Row("compiled the first time", formula=1, measured=first.compiles, unit="programs"),
    Row("compiled the second time", formula=0, measured=again.compiles, unit="programs"),
)

# %% [markdown]
# The same operations on the same **shapes** are the same program, compiled once. Tensors' values are its inputs
# (`device_data`). Python numbers may be either: above, 2 is an input, the 1 of `+ 1` a constant.

# %% [markdown]
# So a cell that compiles does it **once a kernel**: run again, it counts 0 programs, and has none to show (section 2 then
# fails with an `IndexError`). Restart the kernel before you run this chapter again.

# %% [markdown]
# ## 2 · What the compiler makes of it
# The notes become **HLO** (high-level operations), XLA's own language. The compiler rewrites it. Most of all it
# **fuses**: operations on the same elements become one, and what is between them never reaches memory.

# %%
with capture() as chain:
    z = torch.nn.functional.gelu(x) * 2 + 1
before, after = chain.before[0], chain.after[0]
print(
    f"{before.size} operations before, {after.kernels} piece of work after: {dict(after.fusions)}"
)

# %% [markdown]
# *kLoop* is a fusion that is one loop over the elements of its result. Now a whole training step: a small GPT, its backward
# pass and the update.


# %%
SHAPE = dict(hidden_size=32, num_heads=4, vocab_size=64, max_positions=64)


def small_gpt():
    return GPT.from_preset("gpt2-tiny", num_layers=1, **SHAPE)


def step(model, batch):
    """One step of plain gradient descent; the loss stays on the device."""
    loss = CausalLM()(model, batch)["causal"].sum / batch["labels"].numel()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
            parameter.grad = None
    return loss.detach()


# %%
def rows_of(length, rows=4):
    tokens = torch.randint(64, (rows, length + 1))
    return {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


model = xla.to_device(small_gpt())
batch = xla.to_device(rows_of(16))
with capture() as whole, counted() as compiled:
    step(model, batch)
    xla.synchronize()
before, after = whole.before[0], whole.after[0]

# %%
compare(
    Row("operations before", measured=before.size, unit="operations"),
    Row(
        "matrix products before",
        formula=3 * 5 + 3 * 2,
        measured=before.operations["dot"],
        unit="operations",
    ),
    Row("fusions before", formula=0, measured=sum(before.fusions.values()), unit="fusions"),
    Row("fusions after", measured=sum(after.fusions.values()), unit="fusions", noisy=True),
    Row("pieces of work after", measured=after.kernels, unit="kernels", noisy=True),
    Row("in the compiler", measured=compiled.seconds, unit="s", noisy=True),
)

# %% [markdown]
# Five weight matrices and attention's two products: each is one forward, two backward. About a hundred pieces of work
# remain. Compiling takes minutes for a large model, so it must not happen often.

# %% [markdown]
# ## 3 · Predict the compilations
# Texts differ in length. Here are the lengths of 16 batches of 4 rows; each batch is as long as its longest row.

# %%
lengths = [17, 23, 31, 42, 23, 55, 26, 33, 51, 29, 19, 38, 42, 45, 49, 36]

# %%
guess_bare = predict("Without padding: how many programs are compiled?", unit="programs")
guess_bare

# %%
guess_buckets = predict("Each padded to 16, 32, 48 or 56: how many?", unit="programs")
guess_buckets

# %% [markdown]
# A **bucket** is a length that shorter rows are padded to. Labels of padding are -100: no target, no loss.

# %%
show_source(LengthBuckets.pad)

# %%
plans = {
    "no padding": None,
    "4 buckets": LengthBuckets((16, 32, 48, 56)),
    "all to 64": LengthBuckets((64,)),
}

# %% [markdown]
# We evaluate the loss of each batch. A training step compiles as often, and takes longer at it.

# %%
measured = {}
for name, buckets in plans.items():
    with counted() as done, torch.no_grad():
        for length in lengths:
            batch = rows_of(length) if buckets is None else buckets.pad(rows_of(length))
            batch.pop("attention_mask", None)  # a causal model never looks to the right
            with xla.step():
                loss = CausalLM()(model, xla.to_device(batch))["causal"].sum
    measured[name] = done

# %%
foreseen = {
    name: len(signatures([n for n in lengths for _ in range(4)], 4, buckets))
    for name, buckets in plans.items()
}
guesses = {"no padding": guess_bare, "4 buckets": guess_buckets}
compare(
    *(
        Row(name, guesses.get(name), foreseen[name], measured[name].compiles, unit="programs")
        for name in plans
    )
)

# %%
Table(
    {
        "plan": list(plans),
        "padding": [0, *(round(100 * b.waste(lengths), 1) for b in plans.values() if b)],
    },
    kinds={"padding": "modelled"},
    units={"padding": "%"},
)

# %% [markdown]
# The formula counts distinct (rows, length) *before* anything is trained; a bucket that no batch needs costs nothing.
# Padding is work for nothing, and so is compiling. The time here:

# %% tags=["timing"]
for name, done in measured.items():
    print(f"{name:12} {done.seconds:5.1f} s in the compiler")

# %% [markdown]
# Is the loss of padded rows still the loss? The padding has no targets, so it must be.

# %%
short = rows_of(20)
padded = LengthBuckets((30,)).pad(short)
padded.pop("attention_mask")
with torch.no_grad():
    losses = [float(CausalLM()(model, xla.to_device(b))["causal"].sum) for b in (short, padded)]
print("relative difference below 1e-6:", abs(losses[1] / losses[0] - 1) < 1e-6)

# %% [markdown]
# ## 4 · A number that the host reads
# `loss.item()` wants a number *now*. The host cannot go on without it. Which line asked:

# %%
batch = xla.to_device(rows_of(21))
with host_reads() as reads, counted() as cut, xla.step():
    loss = CausalLM()(model, batch)["causal"].sum
    if loss.item() > 0:
        loss.backward()
print(reads)

# %%
guess_cut = predict(
    "Without the read this step is one program. How many was it?", unit="programs"
)
guess_cut

# %%
compare(
    Row("programs of the step", guess_cut, formula=2, measured=cut.runs, unit="programs"),
    Row("reads by the host", formula=1, measured=cut.reads, unit="reads"),
)

# %% [markdown]
# What was noted before the read ran for it; the rest became a second program. Reading *after* the step makes no second
# program; the host still waits.

# %% [markdown]
# Our engine reads loss and norm once, at the end, and lets the device decide whether the gradient is finite. If not, each
# weight keeps its old value:

# %%
show_source(lazy.kept_unless, "keep")

# %% [markdown]
# ## 5 · One program for eight devices
# **SPMD** (single program, multiple data): write for one device, mark tensors as sharded, and the compiler divides the
# program and puts in the collectives. Our CPU plays eight devices, in a process of its own.


# %%
def two_layers():
    return GPT.from_preset("gpt2-tiny", num_layers=2, **SHAPE)


parameters = len(list(two_layers().parameters()))
guess_reduce = predict(
    f"Data parallel, {parameters} parameters. How many all-reduces, if nothing is combined?",
    unit="all-reduces",
)
guess_reduce

# %%
meshes = {"data": {"data": 8}, "tensor": {"data": 2, "model": 4}}
reports = spmd_parity(two_layers, rows_of(16, rows=16), meshes)
for name, report in reports.items():
    equal = abs(report.loss / report.reference - 1) < 1e-6 and report.worst < 1e-5
    print(f"{name}: loss and {parameters} gradients equal one device's: {equal}")

# %%
data, tensor = reports["data"].collectives, reports["tensor"].collectives
all_reduces = dict(unit="all-reduces")
compare(
    Row("data parallel", guess_reduce, parameters + 2, data["all-reduce"], **all_reduces),
    Row("tensor parallel", None, parameters + 17, tensor["all-reduce"], **all_reduces),
)

# %% [markdown]
# Each gradient is summed over the devices, the loss too. One more: the table of tokens is also the output matrix, and the
# two parts of its gradient are summed apart. XLA combined none.

# %% [markdown]
# Tensor parallel does the same over its data axis. Its model axis adds two a layer forward, two backward ([[#2.5]]), and seven
# for the divided vocabulary: the look-up, five in the loss, one back. The model's plan decides:

# %%
show_source(xla_spmd.spec_of)

# %%
kinds = sorted({*data, *tensor})
Table(
    {
        "collective": kinds,
        "data 8": [data.get(kind, 0) for kind in kinds],
        "data 2 x model 4": [tensor.get(kind, 0) for kind in kinds],
    },
    kinds={"data 8": "measured", "data 2 x model 4": "measured"},
)

# %% [markdown]
# Who asked for the **all-gathers** in a data-parallel step? torch_xla lowers a LayerNorm to XLA's undivided batch norm: rows
# are gathered, forward and backward. Tensor parallel does so for the fused *qkv*, too.

# %%
norms = sum("norm" in name for name, _ in two_layers().named_parameters()) // 2
compare(
    Row("batch norms, one layer", formula=3, measured=before.operations["batch-norm-training"]),
    Row("all-gathers, two layers", formula=2 * norms, measured=data["all-gather"]),
    Row("with tensor parallel", formula=2 * norms + 2 * 2, measured=tensor["all-gather"]),
)

# %% [markdown]
# ## 6 · What production does
# The same: fixed or bucketed lengths, no partial last batch, no read in the step. One report of a RoBERTa run without
# padding:

# %%
compare(
    Row("programs in 493 steps", quoted=429, source="pytorch/xla issue 3356", unit="programs"),
    Row("padded to 512", formula=len(signatures([512] * 493 * 8, 8)), unit="programs"),
)

# %% [markdown]
# torch_xla 2.9 was its last release. Its successors on TPU and Trainium run operations at once or compile with
# `torch.compile`, and still compile for each shape: chapter [[#3.2]].

# %% [markdown]
# ## 7 · What breaks
# **No barrier.** Three micro-batches are added up, and nobody says that they may run. The notes grow.

# %%
model = xla.to_device(small_gpt())
sizes = []
for _ in range(3):
    CausalLM()(model, xla.to_device(rows_of(16)))["causal"].sum.backward()
    sizes.append(graph_size([parameter.grad for parameter in model.parameters()]))
print("times as long as the first:", [round(size / sizes[0], 1) for size in sizes])
xla.synchronize()

# %% [markdown]
# **The last batch.** 8,551 sentences in batches of 8 leave 7: another shape, so another program, late in the epoch.

# %%
print("keep:", sorted(signatures([64] * 8551, 8)))
print("drop:", sorted(signatures([64] * 8551, 8, last="drop")))

# %% [markdown]
# **A hidden read.** Nobody wrote `.item()` here. But how many numbers are above 0 is the *shape* of the result, so
# the host must know it.

# %%
with host_reads() as reads, counted() as hidden:
    positive = x[x > 0]
    clamped = x.clamp(min=0)  # the same shape, whatever the values: no read
print(reads)
print("programs run before a barrier:", hidden.runs)

# %% [markdown]
# ## Exercises
# ### Exercise 1.11.1 (core): three buckets
# You see 200 lengths. Thousands more will come from the same source; at most three programs, and less than 15 % padding.


# %% exercise="1.11.1"
def three_buckets(lengths: list[int], longest: int) -> list[int]:
    """Return at most three lengths in rising order, to which rows are padded.

    lengths: a sample. Rows that come later are like these, but may be as long as `longest`. Each row must fit
    a bucket. Choose so that less than 15 % of all positions are padding.
    """
    # BEGIN SOLUTION
    ends = sorted(set(lengths) - {longest})
    pairs = [[low, high] for low in ends for high in ends if low < high] or [ends[:1]]

    def held(buckets):
        return sum(next(b for b in buckets if length <= b) for length in lengths)

    return min(([*pair, longest] for pair in pairs), key=held)
    # END SOLUTION


# %% check="1.11.1"
check("1.11.1", three_buckets)

# %% [markdown]
# ### Exercise 1.11.2 (core): count the programs
# Say before the run how often it will compile.


# %% exercise="1.11.2"
def count_programs(
    lengths: list[int], batch_size: int, buckets: list[int], drop_last: bool
) -> int:
    """Return how many programs an epoch compiles.

    lengths: of the rows, in the order in which they are batched. A batch is padded to the shortest bucket
    that holds its longest row. The last batch may have fewer rows; drop_last leaves it out.
    """
    # BEGIN SOLUTION
    seen = set()
    for start in range(0, len(lengths), batch_size):
        batch = lengths[start : start + batch_size]
        if len(batch) == batch_size or not drop_last:
            seen.add((len(batch), min(b for b in buckets if b >= max(batch))))
    return len(seen)
    # END SOLUTION


# %% check="1.11.2"
check("1.11.2", count_programs)

# %% uses="1.11.2"
print("the same as measured:", count_programs(lengths, 1, [16, 32, 48, 56], False) == 3)

# %% [markdown]
# ### Exercise 1.11.3 (optional): log without waiting
# Report the loss without reading it at every step.


# %% exercise="1.11.3"
def window_means(step, batches: list, every: int) -> list[float]:
    """Call step(batch) for each batch and return the mean loss of each window of `every` steps, as floats.

    step returns a loss on the device: `+` and `/` note something down, float(loss) makes the host wait. Wait
    once a window. The last window may be shorter.
    """
    # BEGIN SOLUTION
    means = []
    for start in range(0, len(batches), every):
        window = batches[start : start + every]
        total = step(window[0])
        for batch in window[1:]:
            total = total + step(batch)
        means.append(float(total / len(window)))
    return means
    # END SOLUTION


# %% check="1.11.3"
check("1.11.3", window_means)

# %% [markdown] tags=["reading"]
# ## Further reading
# - A. Suhan et al., *LazyTensor: combining eager execution with domain-specific compilers*, 2021, sections 3
#   and 4: notes, barriers, caches.
# - Y. Xu et al., *GSPMD: General and Scalable Parallelization for ML Computation Graphs*, 2021, section 3:
#   marks, and how the compiler completes them.
# - The OpenXLA project, *XLA operation semantics*: what HLO's operations mean.
