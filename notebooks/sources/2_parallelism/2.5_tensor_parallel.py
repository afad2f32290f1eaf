# %% [markdown]
# **You will learn** how ranks share every matrix with two kinds of messages, f and g, and what sequence
# parallelism changes.

# %% tags=["setup"]
import copy
from functools import partial

import torch
import torch.nn.functional as F
from fmlab.lab import Row, Table, caption, check, compare, figure, predict, show_source, within
from fmlab.meter import saved_activations, traffic
from fmlab.models import GPT, Llama
from fmlab.objectives import CausalLM
from fmlab.parallel import Layout, activations, parallelize, parity
from fmlab.parallel.composed import Composed
from fmlab.parallel.tensor import ColumnLinear, RowLinear, cost, legal_degrees, linears
from fmlab.parallel.tensor import cross_entropy as loss_module
from fmlab.parallel.tensor import functions as f_and_g
from fmlab.train import adamw

# %load_ext fmlab.lab

# %% [markdown]
# ## 1 · A pair of matrices, cut twice
# A feed-forward network is two matrices with a GELU between them. **Tensor parallelism** gives each rank a
# part of both. Two ranks, played in one process: the first matrix is cut by outputs, the second by inputs.

# %%
torch.manual_seed(0)
x, up, down = torch.randn(6, 8), torch.randn(32, 8), torch.randn(8, 32)
whole = F.gelu(x @ up.T) @ down.T
parts = [F.gelu(x @ u.T) @ d.T for u, d in zip(up.chunk(2), down.chunk(2, dim=1), strict=True)]
print("each rank makes", [list(part.shape) for part in parts])
within("largest error of their sum", (sum(parts) - whole).abs().max().item(), below=1e-4)

# %% [markdown]
# Each hidden unit lives on one rank, so GELU needs no message; one sum at the end does. The cuts are called
# **by columns** and **by rows**. The other way round, the sum is needed *before* the GELU:

# %%
halves = zip(x.chunk(2, dim=1), up.chunk(2, dim=1), strict=True)
summed_after = sum(F.gelu(x_part @ up_part.T) for x_part, up_part in halves)
error = (summed_after - F.gelu(x @ up.T)).abs().max().item()
print(f"GELU, then sum: wrong by up to {error:.1f}")

# %% [markdown]
# ## 2 · f and g
# In the forward pass the ranks add up their parts: that is **g**. In the backward pass each rank knows only
# what *its* units ask of x. The gradient is the sum again: **f**.

# %%
show_source(f_and_g, "g")

# %%
show_source(f_and_g, "f")

# %% [markdown]
# f stands before a pair, g behind it. Each is the other run backwards.

# %%
guess_loss = predict("Without f, by how much is the first step's loss wrong?", unit="%")
guess_loss

# %% [markdown]
# ## 3 · A GPT on four ranks
# Attention is such a pair too: queries, keys and values are cut by **heads**, the output matrix by rows. A
# model's *plan* says how each parameter is cut; the engine follows it.

# %%
RANKS, ROWS, LENGTH = 4, 4, 64
torch.manual_seed(0)
tokens = torch.randint(4096, (ROWS, LENGTH + 1))
batch = {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
build_model = partial(GPT.from_preset, "gpt2-tiny")


def build(engine="fmlab", layers=4, **layout):
    """An engine of this notebook's model on the ranks that run the cell."""
    model = build_model(num_layers=layers)
    return parallelize(model, Layout(**layout), CausalLM(), adamw(1e-3), engine)


# %%
guess_share = predict(
    "gpt2-tiny has 1,350,400 parameters. How many does each of 4 ranks hold?", unit="parameters"
)
guess_share

# %%
# %%ranks 4 -o shares
engine = build(tensor=RANKS)
print(f"loss {engine.step([batch]).loss:.2f}")
held = dict(engine.ledger.parameters())
first = [n for n in held if n.startswith(("blocks.0.", "blocks.1.")) and held[n].dim() > 1]
{"numel": sum(p.numel() for p in held.values()), **{n: list(held[n].shape) for n in first}}

# %%
model = build_model()
plan, share = model.parallel_plan(), shares[0]
divided = sum(plan.rule(n).shard(p, 0, RANKS).numel() for n, p in model.named_parameters())
compare(
    "on a rank", yours=guess_share, formula=divided, measured=share["numel"], unit="parameters"
)

# %%
matrices = [name for name in share if name != "numel"]
Table(
    {
        "matrix": matrices,
        "cut by": [plan.rule(name).kind for name in matrices],
        "whole": [str(list(model.get_parameter(name).shape)) for name in matrices],
        "on a rank": [str(share[name]) for name in matrices],
    },
    kinds={"whole": "given", "on a rank": "measured"},
)

# %% [markdown]
# Positions and norms are small and stay whole; so does the bias of a row matrix, which is added once, *after*
# g. Does all this compute what one device computes?

# %%
# %%ranks 4
report = parity(build_model, Layout(tensor=RANKS), precision="fp64", batches=[batch] * 2)
if rank == 0:
    print(f"{len(report.rows)} gradients and weights equal one device's: {report.ok}")

# %% [markdown]
# ## 4 · What travels?
# Let $S$ be the bytes of the stream, the hidden states between blocks: 4 for each row, position and feature.

# %%
guess_layer = predict(
    "How many all-reduces of S does a layer make, forward and backward?", unit="all-reduces"
)
guess_layer

# %%
# %%ranks 4 -o sent_by_depth
found = []
for layers in (2, 4):
    engine.close()
    engine = build(tensor=RANKS, layers=layers)
    with traffic() as sent:
        engine.step([batch])
    found.append(sent.bytes("all_reduce"))
found

# %%
S = ROWS * LENGTH * 128 * 4
two, four = sent_by_depth[0]
layer = cost.pair_payload(ROWS, LENGTH, 128, RANKS)["all_reduce"]
step = cost.language_model_payload(4, ROWS, LENGTH, 128, RANKS)["all_reduce"]
compare(
    Row(
        "all-reduces of S, a layer", yours=guess_layer, formula=4, measured=(four - two) / 2 / S
    ),
    Row("payload of a layer", formula=layer, measured=(four - two) // 2, unit="B"),
    Row("payload of a step", formula=step + 4, measured=four, unit="B"),
)

# %% [markdown]
# A step also sums the look-up and the loss (section 5), and 4 bytes for the gradient's norm. Data parallelism
# sends *gradients*, whatever the batch; tensor parallelism sends *activations*, for every token. It needs
# the fastest links.

# %% [markdown]
# ### Hide what can be hidden
# g's sum is needed at once. f's is not: the weight's gradient can be computed meanwhile.

# %%
show_source(linears, "backward")

# %% [markdown]
# ## 5 · A divided vocabulary
# The embedding is cut by words: a rank gives zeros for words of others, and g adds them up. The logits stay
# divided. A softmax needs three numbers of a token from all ranks:

# %%
show_source(loss_module, "softmax")

# %%
words, n = 50257, 2048
gathered, three = n * words * 4, 3 * n * 4
Table(
    {
        "GPT-2's loss of 2,048 tokens": ["gather the logits", "three numbers"],
        "bytes": [gathered, three],
    },
    kinds={"bytes": "modelled"},
    units={"bytes": "B"},
)

# %% [markdown]
# 50,257 words do not divide evenly: the last rank's table is padded. Padded words get a logit of $-\infty$,
# so no probability and no gradient.

# %% [markdown]
# ## 6 · Sequence parallelism
# Between the pairs all ranks still hold the same stream and compute the same norms. **Sequence parallelism**
# gives each rank its part of the *positions* there. f becomes an all-gather, g a reduce-scatter.

# %%
guess_kept = predict(
    "On 4 ranks, what share of one device's activations does a rank keep without it?", unit="%"
)
guess_kept

# %%
# %%ranks 4 -o kept_by
cases = (dict(tensor=RANKS), dict(tensor=RANKS, sequence_parallel=True))
kept_here = []
for layout in cases:
    by_depth = []
    for layers in (2, 4):
        engine.close()
        engine = build(layers=layers, **layout)
        with saved_activations(exclude=engine.model) as saved:
            engine.model(**batch)
        by_depth.append(saved.peak)
    kept_here.append((by_depth[1] - by_depth[0]) // 2)
kept_here

# %%
shape = activations.layer_shape(model.blocks[1])
runs = [activations.Run(ROWS, LENGTH), activations.Run(ROWS, LENGTH, tensor=RANKS)]
runs += [activations.Run(ROWS, LENGTH, tensor=RANKS, sequence_parallel=True)]
one, tensor, sequence = (sum(activations.kept(shape, run).values()) for run in runs)
compare(
    Row("a layer on one device", formula=one, unit="B"),
    Row("tensor parallel", formula=tensor, measured=kept_by[0][0], unit="B"),
    Row("and sequence parallel", formula=sequence, measured=kept_by[0][1], unit="B"),
    Row("share without it", yours=guess_kept, formula=tensor / one * 100, unit="%", digits=3),
)

# %% [markdown]
# What norms and matrices are *given* was kept four times over. Now it is divided like the rest. The gathered
# input is not kept: backward gathers it again. What does that cost?

# %%
# %%ranks 4 -o by_op
engine.close()
engine = build(sequence_parallel=True, tensor=RANKS)
engine.step([batch])  # the first step also compares the ranks' batches
with traffic() as sent:
    engine.step([batch])
{op: size for op, (_, size) in sent.by_op().items()}

# %%
in_stream = [p for n, p in model.named_parameters() if plan.rule(n).kind == "replicate"]
norms = (
    sum(p.numel() for p in in_stream) - model.get_parameter("blocks.0.positions.weight").numel()
)
payload = cost.language_model_payload(4, ROWS, LENGTH, 128, RANKS, True, replicated=norms)
payload["all_reduce"] += 4
compare(
    *[Row(op, formula=payload[op], measured=by_op[0][op], unit="B") for op in sorted(payload)]
)

# %%
plain, cut = (cost.pair_payload(ROWS, LENGTH, 128, RANKS, flag) for flag in (False, True))
ratio = cost.wire_bytes(cut, RANKS) / cost.wire_bytes(plain, RANKS)
print(f"on the wire, a layer with sequence parallelism sends {ratio:.2f}x as much")

# %% [markdown]
# An all-reduce *is* a reduce-scatter and an all-gather: dividing the stream is free. The quarter is the
# second gathering. Norms see part of the positions, so their gradients are summed.
#
# In a large model (s positions, b rows, width h):

# %%
ranks = [1, 2, 4, 8]
gpt3 = partial(activations.classic, 2048, 1, 12288, 96)  # positions, rows, width, heads
fig, ax = figure(
    x="tensor-parallel ranks [number]",
    y="one layer on a rank [MB]",
    title="What a layer of GPT-3 keeps",
)
for flag, label in ((False, "tensor parallel"), (True, "and sequence parallel")):
    ax.plot(ranks, [gpt3(t, flag) / 1e6 for t in ranks], marker="o", label=label)
ax.set_ylim(bottom=0)
ax.legend()
text = "Without sequence parallelism 10sbh bytes stay on every rank, however many there are."
caption(fig, kind="modelled", text=text)

# %% [markdown]
# ## 7 · Which degrees are legal?
# A rank needs whole heads. With grouped queries, key/value heads may be fewer than ranks: each is then
# **copied** to several ranks, whose gradients are summed.

# %%
with torch.device("meta"):
    gpt2, llama = GPT.from_preset("gpt2"), Llama.from_preset("llama3.1-8b")
for name, big in (("gpt2, 12 heads", gpt2), ("llama3.1-8b, 32 heads, 8 for keys", llama)):
    print(f"{name}: {legal_degrees(big, big.parallel_plan(), upto=32)}")

# %%
try:
    Layout(tensor=5).validate(5, model=gpt2)
except ValueError as refusal:
    print(refusal)

# %% [markdown]
# ## 8 · What production does
# Megatron-LM has these layers by hand. PyTorch writes each parameter as a **DTensor**, whose operations find
# their messages themselves. Our engine `torch` makes it from the same plan:

# %%
# %%ranks 4
report = parity(build_model, Layout(tensor=RANKS), "torch", precision="fp64", batches=[batch])
if rank == 0:
    print(
        f"DTensor: of {len(report.rows)} gradients and weights {len(report.different)} differ"
    )

# %% [markdown]
# ## 9 · What breaks
# Three common bugs. None raises an error. And the first loss, which you guessed in section 2?


# %%
class WithoutF(Composed):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        for module in self.model.modules():
            if isinstance(module, ColumnLinear):
                module.axis = copy.copy(module.axis)  # an axis on which nothing is summed
                module.axis.all_reduce_ = lambda x, async_op=False, **_: None if async_op else x


class NormsNotSummed(Composed):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.ledger.sum_partial_ = lambda gradients: None


# %%
class BiasOnEveryRank(Composed):
    """Each rank adds the bias of a row matrix to its part of the sum."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        for module in self.model.modules():
            if isinstance(module, RowLinear):
                once = module.product
                module.product = lambda x, m=module, once=once: once(x) + (RANKS - 1) * m.bias


# %%
# %%ranks 4 -o broken
found = {}
for bug, sequence in ((WithoutF, False), (NormsNotSummed, True), (BiasOnEveryRank, False)):
    layout = Layout(tensor=RANKS, sequence_parallel=sequence)
    report = parity(build_model, layout, bug, precision="fp64", batches=[batch])
    wrong = [row.name for row in report.rows if not row.gradient.ok]
    found[bug.__name__] = (round(report.loss.factor, 6), len(wrong), wrong[-1])
found

# %%
results = broken[0]
Table(
    {
        "bug": list(results),
        "loss": [factor for factor, _, _ in results.values()],
        "wrong gradients": [number for _, number, _ in results.values()],
        "the last of them": [name for _, _, name in results.values()],
    },
    kinds={"loss": "measured", "wrong gradients": "measured"},
    units={"loss": "of one device's", "wrong gradients": f"of {len(list(model.parameters()))}"},
)

# %%
error = round(100 * abs(results["WithoutF"][0] - 1), 6)
compare("error of the loss without f", yours=guess_loss, formula=0, measured=error, unit="%")

# %% [markdown]
# Biases begin at zero, and the other bugs are in the backward pass. What gives them away is *which* gradients
# differ: all behind an f, all norms and row biases, or row biases alone.

# %% [markdown]
# ## Exercises
# ### Exercise 2.5.1 (core): split a fused query-key-value matrix
# Fewer key/value heads than ranks: who holds which rows?


# %% exercise="2.5.1"
def rows_of(rank: int, ranks: int, heads: int, kv_heads: int, head_size: int) -> list[int]:
    """Return which rows of a fused query-key-value matrix `rank` holds, in ascending order.

    The matrix stacks `heads` query heads, then `kv_heads` key heads, then as many value heads;
    a head has head_size rows. Query head i uses key/value head i // (heads // kv_heads). A rank
    holds heads // ranks consecutive query heads, and each key/value head that these use.
    """
    # BEGIN SOLUTION
    mine = range(rank * heads // ranks, (rank + 1) * heads // ranks)
    used = sorted({i // (heads // kv_heads) for i in mine})
    found = [*mine, *(heads + g for g in used), *(heads + kv_heads + g for g in used)]
    return [head * head_size + row for head in found for row in range(head_size)]
    # END SOLUTION


# %% check="2.5.1"
check("2.5.1", rows_of)

# %% uses="2.5.1"
for r in range(4):
    print(f"rank {r}: rows {rows_of(r, ranks=4, heads=8, kv_heads=2, head_size=1)}")

# %% [markdown]
# ### Exercise 2.5.2 (core): a loss over divided words
# Three numbers from each rank, and no gathered logits.


# %% exercise="2.5.2"
def loss_of(shards: list[torch.Tensor], target: int, vocabulary: int) -> float:
    """Return -log softmax(logits)[target] of one token; shards[r] [w] are logits of rank r.

    All shards are equally long; words from number `vocabulary` on are padding and count for
    nothing. Logits may be as large as 1000. Do not put the shards together: use of each the
    largest logit, a sum of exponentials, and one logit.
    """
    # BEGIN SOLUTION
    words = len(shards[0])
    real = [shard[: max(0, vocabulary - r * words)] for r, shard in enumerate(shards)]
    largest = max(shard.max() for shard in real if len(shard))
    total = sum((shard - largest).exp().sum() for shard in real)
    return float(largest + total.log() - shards[target // words][target % words])
    # END SOLUTION


# %% check="2.5.2"
check("2.5.2", loss_of)

# %% uses="2.5.2"
logits = torch.randn(10, generator=torch.Generator().manual_seed(5))
shards = list(F.pad(logits, (0, 2)).chunk(4))
print(f"4 ranks: {loss_of(shards, 7, 10):.4f}, one device: {-logits.log_softmax(0)[7]:.4f}")

# %% [markdown]
# ### Exercise 2.5.3 (optional): legal degrees
# Which numbers of ranks can divide a decoder?


# %% exercise="2.5.3"
def legal(heads: int, kv_heads: int, ffn: int, most: int) -> list[int]:
    """Return the tensor-parallel degrees from 1 to `most` that can divide a decoder.

    Query heads and hidden units of the feed-forward network (ffn) are divided evenly. Key/value
    heads are too, or, where they are fewer than ranks, each is copied to equally many ranks.
    """
    # BEGIN SOLUTION
    return [
        t
        for t in range(1, most + 1)
        if heads % t == 0 and ffn % t == 0 and (kv_heads % t == 0 or t % kv_heads == 0)
    ]
    # END SOLUTION


# %% check="2.5.3"
check("2.5.3", legal)

# %% [markdown] tags=["reading"]
# ## Further reading
# - M. Shoeybi et al., *Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
#   Parallelism*, 2019, section 3: f, g, the divided vocabulary.
# - V. Korthikanti et al., *Reducing Activation Recomputation in Large Transformer Models*, 2022, section
#   4.2: sequence parallelism; 4.2.2: what is gathered again.
# - D. Narayanan et al., *Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM*,
#   2021, section 5.4: which ranks should be neighbours.
