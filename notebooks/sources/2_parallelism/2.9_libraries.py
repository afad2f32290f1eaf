# %% [markdown]
# **You will learn** what production libraries refuse, the errors behind it, and the way around each.

# %% tags=["setup"]
import torch
from fmlab.lab import Table, check, compare, predict, show_source
from fmlab.models import BERT, GPT, T5, BERTConfig, GPTConfig, Llama, LlamaConfig, T5Config
from fmlab.models.plan import Rule
from fmlab.parallel import Layout, parity
from fmlab.parallel.engines.refusals import refusals

# %load_ext fmlab.lab

# %% [markdown]
# ## 1 · One layout, three engines
# A `Layout` says what to divide, not how. Three **engines** run it: ours, by hand; `torch` (FSDP2, DTensor,
# pipelining); `deepspeed`. Four small models, each awkward in its own way:


# %%
def gpt():  # the head is the embedding: tied
    return GPT(GPTConfig(131, 24, num_layers=3, hidden_size=16, num_heads=2))


def llama():  # 4 heads share 2 heads of keys and values
    return Llama(LlamaConfig(131, 24, 3, 16, num_heads=4, num_kv_heads=2, ffn_size=24))


def bert():  # two losses; the vocabulary has a bias
    return BERT(BERTConfig(131, 24, 2, 16, 2, heads="pretraining", dropout=0.0))


def t5():  # two streams; one table three times
    return T5(T5Config(131, 2, 16, num_heads=2, head_size=8, ffn_size=24, dropout=0.0))


MODELS = {"GPT": gpt, "Llama": llama, "BERT": bert, "T5": t5}

# %%
METHODS = {
    "FSDP2": ("torch", Layout(data=2, fsdp=True)),
    "DeepSpeed ZeRO-3": ("deepspeed", Layout(data=2, zero=3)),
    "DTensor": ("torch", Layout(tensor=2, sequence_parallel=True)),
    "torch pipelining": ("torch", Layout(pipeline=2, micro_batches=2, schedule="zb-h1")),
    "DeepSpeed pipeline": ("deepspeed", Layout(pipeline=2, micro_batches=2)),
}

# %%
guess_refused = predict("How many of these 5 x 4 combinations are refused?", unit="cells")
guess_refused

# %%
# %%ranks 2 -o live -t 240
cells = {}
for method, (engine, layout) in METHODS.items():
    cells[method] = []
    for model in MODELS.values():
        try:
            report = parity(model, layout, engine, steps=1)
            cells[method] += ["equal" if report.ok else "DIFFERS"]
        except ValueError:
            cells[method] += ["refuses"]
    if rank == 0:
        print(f"{method}: done")
cells if rank == 0 else None

# %%
results = [cell for cells_of in live[0].values() for cell in cells_of]
refused = results.count("refuses")
print(f"{len(results)} combinations: {results.count('equal')} equal to one device")
by_model = dict(zip(MODELS, zip(*live[0].values(), strict=True), strict=True))
Table({"method": list(METHODS), **by_model}, kinds=dict.fromkeys(MODELS, "measured"))

# %%
compare("refused", yours=guess_refused, measured=refused, unit="cells")

# %% [markdown]
# *Equal* means: loss, norm, every gradient and every updated weight, as in 2.2. So most cells work. But none
# works out of the box: what follows is what it took.

# %% [markdown]
# ## 2 · Ask before you start
# A refusal must come before any process starts, name the part, and give the reason. `refusals` needs shapes
# only, so the model may be on the meta device.

# %%
ASKED = {
    "context": Layout(context=2),
    "4 ranks for 2 heads": Layout(tensor=4),
    "two streams": Layout(tensor=2, sequence_parallel=True),
    "offload": Layout(data=2, zero=2, offload="optimizer"),
    "few micro-batches": Layout(pipeline=4, micro_batches=2),
    "hybrid": Layout(data=4, zero=3, replicas=2),
    "gpipe": Layout(pipeline=2, micro_batches=2, schedule="gpipe"),
}

# %%
with torch.device("meta"):
    model = t5()


def answer(engine, layout):
    """The parts that an engine refuses of a layout."""
    try:
        layout.validate(layout.world_size, model=model)
    except ValueError:
        return "illegal"
    return ", ".join(refusals(engine, layout, model)) or "runs"


# %%
rows = {"layout": list(ASKED)}
for engine in ("fmlab", "torch", "deepspeed"):
    rows[engine] = [answer(engine, layout) for layout in ASKED.values()]
Table(rows, kinds=dict.fromkeys(("fmlab", "torch", "deepspeed"), "measured"))

# %%
for engine in ("torch", "deepspeed"):
    for part, reason in refusals(engine, ASKED["two streams"], model).items():
        print(f"{engine}, {part}: {reason}\n")

# %% [markdown]
# *Illegal*: the plan of this model does not allow the layout, whatever the engine. That too is said before anything
# starts, with what would be legal:

# %%
for name in ("context", "4 ranks for 2 heads"):
    try:
        ASKED[name].validate(ASKED[name].world_size, model=model)
    except ValueError as refusal:
        print(f"{name}: {refusal}\n")

# %% [markdown]
# ## 3 · The errors behind the refusals
# The GPT's plan allows `Layout(context=2)`, and engine `torch` refuses it. PyTorch divides the attention
# *kernels* of CUDA; on a CPU another kernel runs:

# %%
# %%ranks 2 -o errors -t 240
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel

mesh, said_by = init_device_mesh("cpu", (2,)), "nothing"
x, scale = torch.randn(2, 2, 16, 8), torch.ones(8, requires_grad=True)
try:
    with context_parallel(mesh, buffers=[x], buffer_seq_dims=[2]):
        q, k, v = x * scale, x * scale, x * scale
        torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
except NotImplementedError as error:
    said_by = str(error)
said_by

# %%
print(errors[0].replace(". ", ".\n").replace("default does", "default\ndoes"))

# %% [markdown]
# The way around: attention as a callable of the model. Ours is a ring of sends ([[#2.7]]), and needs no kernel.

# %% [markdown]
# ## 4 · Worse than an error
# What is *silently* wrong costs weeks. FSDP2 makes groups of parameters; we give each block its own, as the
# tutorials do. The GPT's table is in two blocks:

# %%
guess_tied = predict("How many tables of 131 x 16 does the model train then?", unit="tables")
guess_tied

# %%
# %%ranks 2 -o tables -t 240
from torch.distributed.fsdp import fully_shard

model = gpt()
for block in (*model.blocks, model):
    fully_shard(block)
tables_now = {id(block.tokens.weight) for block in (model.blocks[0], model.blocks[-1])}
len(tables_now)

# %%
compare("tables", yours=guess_tied, formula=1, measured=tables[0], unit="tables")

# %% [markdown]
# No error: embedding and head drift apart. The way around: blocks that share a parameter stay together, in
# the group of the root.

# %%
from fmlab.parallel.engines import torch_shard

show_source(torch_shard._shared)

# %% [markdown]
# DTensor's `Shard(0)` cuts rows in order. A fused query-key-value matrix of 2 heads of 2 rows has 12: which
# go to rank 0?

# %%
# %%ranks 2 -o cut -t 240
from torch.distributed.tensor import Shard, distribute_tensor

rows_of = torch.arange(12)
local = distribute_tensor(rows_of, mesh, [Shard(0)]).to_local()
wanted = Rule(".*", "column", parts=3, unit=2).shard(rows_of, rank, 2)
local.tolist(), wanted.tolist()

# %%
names = [f"{part}{head}" for part in "qkv" for head in (0, 0, 1, 1)]
for title, place in (("Shard(0)", 0), ("needed", 1)):
    print(f"{title:9}", *(names[row] for row in cut[0][place]))

# %% [markdown]
# All queries, half of the keys, no values: shapes fit, results are nonsense. The way around: a DTensor of the
# rows in another order, each rank's heads together.

# %%
from fmlab.parallel.engines.torch_ledger import TorchLedger

show_source(TorchLedger.arrange)

# %% [markdown]
# Third: **who divides?** FSDP2 and DeepSpeed divide gradients by the ranks, DeepSpeed also by micro-batches,
# torch's schedules by micro-batches. Our loss is divided by the global count already.

# %% [markdown]
# ## 5 · Moving ground
# Libraries move. These four programs, and the same GPT by our engine and by engine `torch`, on two releases:
# torch 2.9.1, where `torch_xla` stayed ([[#1.11]]), and this one.

# %%
from fmlab.lab import two_torches

show_source(two_torches, "programs")

# %%
guess_moved = predict("How many of these 8 fail on one of the releases?", unit="programs")
guess_moved

# %% tags=["timing"]
print("torch 2.9.1 in a process of its own, ten seconds or so ...")
old, made = two_torches.on_torch_2_9()
print(made)

# %%
# %%ranks 2 -o new -t 240
from fmlab.lab import two_torches

{name: two_torches.outcome(name) for name in two_torches.PROGRAMS}

# %%
pairs = {name: (old[name], new[0][name]) for name in old}
Table(
    {
        "program": list(pairs),
        "torch 2.9.1": [before.split(":")[0] for before, _ in pairs.values()],
        "this torch": [now.split(":")[0] for _, now in pairs.values()],
    },
    kinds={"torch 2.9.1": "measured", "this torch": "measured"},
)

# %%
moved = {name: pair for name, pair in pairs.items() if set(pair) != {"works"}}
compare("moved", yours=guess_moved, measured=len(moved), unit="programs")

# %%
for name, pair in moved.items():
    for release, said in zip(("2.9.1", "this torch"), pair, strict=True):
        if said != "works":
            print(f"{name}, {release}: {said}")

# %% [markdown]
# A frozen layer trains, without a word. 2.9's stages send 8 bytes into a place for 4, and gloo ends the
# process. Send, receive and all-reduce have not moved: our engine never noticed.

# %% [markdown]
# How does engine `torch` run its pipelines on both? By leaning on an underscore, knowingly, in one place, with
# a test of *results* (parity) on each release:

# %%
from fmlab.parallel.engines import torch_pipeline

show_source(torch_pipeline, "moving")

# %% [markdown]
# ## 6 · On paper
# Other libraries ask for the model in their own words:
#
# | Library | It asks for | Where |
# |---|---|---|
# | Megatron-LM | models built of its layers | `megatron/core/models` |
# | NxD (Neuron) | its parallel layers in the model | `neuronx_distributed/parallel_layers` |
# | Colossal-AI | a policy for each Hugging Face architecture | `colossalai/shardformer/policies` |
# | nanotron | a model rewritten for it | `src/nanotron/models` |
# | torchtitan | a parallelize function for each model | `torchtitan/models/*/infra` |
#
# Ours asks for a *plan*: regular expressions over names, proven by `check_plan`.

# %% [markdown]
# ## 7 · What breaks
# Leave out one way around at a time, and let parity speak.


# %%
# %%ranks 2
from fmlab.parallel.engines.torch_engine import TorchEngine


def averaged(*args, **kwargs):
    engine = TorchEngine(*args, **kwargs)
    for module in torch_shard.divided(engine.model):
        module.set_gradient_divide_factor(2.0)  # as FSDP2 comes
    return engine


def untied(*args, **kwargs):
    engine = TorchEngine(*args, **kwargs)
    engine.pipeline.tied.axes = {}  # each stage trains a table of its own
    return engine


# %%
# %%ranks 2 -o said -t 240
bugs = {averaged: Layout(data=2, fsdp=True), untied: Layout(pipeline=2, micro_batches=2)}
[
    f"{bug.__name__}: {parity(gpt, layout, engine=bug, steps=1).diagnosis}"
    for bug, layout in bugs.items()
]

# %%
print("\n".join(said[0]))

# %% [markdown]
# One factor for all gradients: somebody divides once more. One parameter that differs: two that should be one.

# %% [markdown]
# ## Exercises
# ### Exercise 2.9.1 (core): the rows of a rank
# Do for a fused matrix what `Shard(0)` does not.


# %% exercise="2.9.1"
def rows_of_rank(heads: int, width: int, parts: int, ranks: int, rank: int) -> list[int]:
    """Return the rows of a fused matrix that `rank` of `ranks` must hold, in ascending order.

    The matrix stacks `parts` matrices (queries, keys, values), each of `heads` heads of `width`
    rows. A rank holds the same heads of each part: consecutive ones, whole. `ranks` divides
    `heads`.
    """
    # BEGIN SOLUTION
    mine = heads // ranks
    found = []
    for part in range(parts):
        first = (part * heads + rank * mine) * width
        found += range(first, first + mine * width)
    return found
    # END SOLUTION


# %% check="2.9.1"
check("2.9.1", rows_of_rank)

# %% [markdown]
# ### Exercise 2.9.2 (core): undo a library's divisions
# You know what a library divides by. Give the number to multiply the loss by.


# %% exercise="2.9.2"
def undo(ranks: int, micro_batches: int, over_ranks: bool, over_micro_batches: bool) -> float:
    """Return the factor for each micro-batch's loss that makes gradients add up as on one
    device.

    The losses are shares of the global mean: their gradients need only be summed over ranks and
    micro-batches. over_ranks, over_micro_batches: whether the library divides the sum by their
    number.
    """
    # BEGIN SOLUTION
    return float((ranks if over_ranks else 1) * (micro_batches if over_micro_batches else 1))
    # END SOLUTION


# %% check="2.9.2"
check("2.9.2", undo)

# %% [markdown]
# ### Exercise 2.9.3 (optional): which blocks may be groups?
# Keep ties alive under FSDP2.


# %% exercise="2.9.3"
def own_groups(blocks: list[list[str]]) -> list[int]:
    """Return the indices of the blocks that may be a group of their own, in ascending order.

    blocks[i]: the names of the tensors that block i holds; the same name in two blocks is one
    tensor. A block that shares a tensor with any other block must stay in the root's group, and
    so must one without tensors.
    """
    # BEGIN SOLUTION
    holders: dict[str, set[int]] = {}
    for index, names in enumerate(blocks):
        for name in names:
            holders.setdefault(name, set()).add(index)
    alone = [all(len(holders[name]) == 1 for name in names) for names in blocks]
    return [index for index, names in enumerate(blocks) if names and alone[index]]
    # END SOLUTION


# %% check="2.9.3"
check("2.9.3", own_groups)

# %% [markdown] tags=["reading"]
# ## Further reading
# - W. Liang et al., *TorchTitan: One-stop PyTorch native solution for production ready LLM pre-training*,
#   2024, arXiv:2410.06511, section 2: how FSDP2, DTensor and pipelining compose.
# - S. Rajbhandari et al., *ZeRO*, 2019, arXiv:1910.02054, section 5: the stages.
# - M. Shoeybi et al., *Megatron-LM*, 2019, arXiv:1909.08053, section 3: layers written for it.
# - P. Qi et al., *Zero Bubble Pipeline Parallelism*, 2023, arXiv:2401.10241, section 2: the split backward pass.
