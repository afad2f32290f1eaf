# %% [markdown]
# **You will learn** how one sequence, its attention and a mixture's experts are divided among ranks.

# %% tags=["setup"]
from functools import partial

import torch
from fmlab.lab import Row, Table, caption, check, compare, figure, predict, show_source, within
from fmlab.meter import traffic
from fmlab.models import Llama
from fmlab.models.mixtral import Mixtral
from fmlab.objectives import CausalLM, ExpertsCausalLM, shift_labels
from fmlab.parallel import Layout, expert, parallelize, parity
from fmlab.parallel.composed import Composed
from fmlab.parallel.context import cost, cut, positions, ring, tile, ulysses
from fmlab.parallel.expert.cost import dispatch_bytes
from fmlab.train import adamw

# %load_ext fmlab.lab

# %% [markdown]
# ## 1 · One long row
# Data parallelism divides *rows*. A row of a million tokens is still one row, and its activations fit on no
# chip. **Context parallelism** divides the row: each rank has some positions of it, in every layer.

# %%
RANKS, LENGTH = 4, 64
torch.manual_seed(0)
batch = {"input_ids": torch.randint(512, (2, LENGTH))}
build_llama = partial(Llama.from_preset, "llama-tiny", vocab_size=512, num_layers=2)


def build(model, objective=None, **layout):
    """An engine on the ranks that run the cell."""
    return parallelize(model, Layout(**layout), objective or CausalLM(), adamw(1e-3))


# %%
# %%ranks 4 -o held
torch.manual_seed(rank)
engine = build(build_llama(), context=RANKS, context_balance="none")
part = engine.build.batch_steps[0](batch)  # what the engine makes of a micro-batch
result = engine.step([batch])
print(
    f"{part['input_ids'].shape[1]} tokens of each row, "
    f"positions {part['position_ids'][0, 0]}..{part['position_ids'][0, -1]}"
)
result.count

# %% [markdown]
# Every rank got the *same* two rows and kept 16 of 64 tokens. Embeddings, norms, matrices and the loss treat
# each position by itself: they need nobody else. Weights are whole; gradients are summed as in data
# parallelism.

# %%
show_source(cut.SequenceCut, "cut")

# %% [markdown]
# Labels are made **before** the cut: the label of a rank's last token is the first token of the next rank.
# Positions and documents are those of the whole row, too.

# %%
guess_targets = predict("How many targets do two rows of 64 tokens have?", unit="targets")
guess_targets

# %%
compare(
    "targets", yours=guess_targets, formula=2 * (LENGTH - 1), measured=held[0], unit="targets"
)

# %% [markdown]
# ## 2 · Attention in parts
# Only attention looks at other positions. Cut the keys in two and attend to each half. Is the mean of the two
# results the result?

# %%
torch.manual_seed(1)
query, key, value = torch.randn(
    3, 1, 1, 8, 4, dtype=torch.float64
).unbind()  # 8 tokens, width 4
whole, _ = tile.attend(query, key, value, scale=0.5)
halves = [
    tile.attend(query, k, v, scale=0.5)
    for k, v in zip(key.chunk(2, 2), value.chunk(2, 2), strict=True)
]

# %%
mean = sum(mixed for mixed, _ in halves) / 2
(merged, total), (other, of_other) = halves
tile.merge_(merged, total, other, of_other)  # in place
print(f"the mean of the halves is off by {(mean - whole).abs().max():.2f}")
within("put together by their sums", (merged - whole).abs().max(), below=1e-12)

# %% [markdown]
# Each half's softmax was divided by its own sum. The **log-sum-exp** remembers that sum, so the halves can be
# weighed by their share of the whole:

# %%
show_source(tile, "merge")

# %% [markdown]
# ## 3 · The ring
# So keys and values can come **one part at a time**. They go round a ring of ranks while queries stay. Each
# part is computed while the next is on its way.

# %%
show_source(ring, "forward")

# %% [markdown]
# Nobody ever holds all keys. The backward pass sends keys and values round again; behind them travels their
# gradient, to which every rank adds.

# %%
guess_ring = predict(
    "llama-tiny has 4 query heads and 2 key/value heads of width 32. "
    "How many bytes does a rank send for one layer's forward pass?",
    unit="B",
)
guess_ring

# %%
# %%ranks 4 -o sent
with traffic() as counted:
    engine.step([batch])
engine.close()
counted.bytes("send"), counted.count("send")

# %%
one_layer = cost.ring_bytes(rows=2, columns=16, kv_heads=2, head_size=32, ranks=4, itemsize=4)
repeated = cost.ring_bytes(rows=2, columns=16, kv_heads=4, head_size=32, ranks=4, itemsize=4)
compare(
    Row("a layer, forward", yours=guess_ring, formula=one_layer["forward"], unit="B"),
    Row("both layers, a step", formula=2 * one_layer["total"], measured=sent[0][0], unit="B"),
    Row("with copies for each query head", formula=2 * repeated["total"], unit="B"),
)

# %% [markdown]
# Keys and values make 3 hops forward, 3 backward, and their gradients 3 more. Copying key/value heads for
# each query head *before* the ring, a common slip, doubles all of it here, and is 4 times as much for
# Llama-3-8B.

# %% [markdown]
# ## 4 · Balance
# A token looks back only. So under equal chunks the first rank has little to do and the last one much.

# %%
guess_last = predict(
    "64 tokens in 4 chunks: the last rank's work is how many times the first rank's?",
    unit="times",
)
guess_last

# %%
pairs = positions.work(LENGTH, RANKS, "none")
compare(
    "last rank's work", yours=guess_last, formula=pairs[-1] / pairs[0], unit="times", digits=2
)

# %% [markdown]
# Two remedies: deal tokens out like cards (**striped**), or give rank $r$ chunks $r$ and $2n-1-r$ of $2n$
# (**mirrored**), one from either end:

# %%
show_source(positions, "columns")

# %%
balances = ["none", "striped", "mirrored"]
by_rank = [positions.work(LENGTH, RANKS, balance) for balance in balances]
table = {"balance": balances}
table |= {f"rank {r}": [pairs[r] for pairs in by_rank] for r in range(RANKS)}
table["critical path"] = [
    positions.critical_work(LENGTH, RANKS, balance) for balance in balances
]
numbers = [name for name in table if name != "balance"]
Table(table, kinds=dict.fromkeys(numbers, "modelled"), units=dict.fromkeys(numbers, "pairs"))

# %% [markdown]
# Ranks wait for one another after every step of the ring, so what counts is the **critical path**: the
# longest work of each step, added up. Each colour is a step, and a line its end. Try more ranks:

# %%
from fmlab.lab import balance_panel

balance_panel()

# %% [markdown]
# Does each compute what one device computes?

# %%
# %%ranks 4
for balance in balances:
    layout = Layout(context=RANKS, context_balance=balance)
    report = parity(build_llama, layout, batches=[batch], precision="fp64")
    if rank == 0:
        print(f"{balance}: {len(report.rows)} gradients equal one device's: {report.ok}")

# %% [markdown]
# ## 5 · Ulysses
# The other way: an **all-to-all** exchanges heads for positions. A rank then has *all* positions of a few
# heads, runs any attention on them, and exchanges back.

# %%
show_source(ulysses, "exchange")

# %%
# %%ranks 4 -o exchanged
engine = build(build_llama(), context=RANKS, context_method="ulysses")
with traffic() as counted:
    engine.step([batch])
engine.close()
report = parity(build_llama, engine.layout, batches=[batch], precision="fp64")
{"bytes": counted.bytes("all_to_all"), "equal": report.ok}

# %%
of_layer = cost.ulysses_bytes(
    rows=2, columns=16, heads=4, kv_heads=2, head_size=32, ranks=4, itemsize=4
)
print("equal to one device:", exchanged[0]["equal"])
compare(
    Row(
        "payload of a step",
        formula=2 * of_layer["total"],
        measured=exchanged[0]["bytes"],
        unit="B",
    ),
    Row("leaves the rank", formula=2 * of_layer["sent"], unit="B"),
)

# %% [markdown]
# Which sends less? For a layer of Llama-3-8B (32 heads, 8 of them key/value, width 128) and one row of
# 131,072 tokens in bf16 (the ring's gradients travel in fp32):

# %%
sizes = [2, 4, 8, 16, 32]
shape = {"head_size": 128, "itemsize": 2}
ring_mb = [cost.ring_bytes(1, 2**17 // n, 8, ranks=n, **shape)["total"] / 1e6 for n in sizes]
ulysses_mb = [
    cost.ulysses_bytes(1, 2**17 // n, 32, 8, ranks=n, **shape)["sent"] / 1e6 for n in sizes
]

# %%
fig, ax = figure(
    x="ranks [number]", y="sent by a rank [MB]", title="One layer, forward and backward"
)
ax.plot(sizes, ring_mb, marker="o", label="ring")
ax.plot(sizes, ulysses_mb, marker="s", label="Ulysses")
ax.set_xscale("log", base=2)
ax.legend()
caption(
    fig,
    kind="modelled",
    text="A ring's bytes grow towards a limit; Ulysses' shrink, and end at 32 heads.",
)

# %% [markdown]
# But a ring's messages hide behind its computing, and an all-to-all must be waited for. Ulysses needs heads
# to divide; a ring needs only positions. Large runs combine both.

# %% [markdown]
# ## 6 · Experts: tokens change hands
# A **mixture of experts** has many feed-forward networks, the experts; a small *router* picks two of them for each
# token. Most of its weights are experts:

# %%
build_mixtral = partial(Mixtral.from_preset, "mixtral-tiny", vocab_size=512, num_layers=2)
mixtral = build_mixtral()
in_experts = sum(
    p.numel() for name, p in mixtral.named_parameters() if name.endswith(("gate_up", "down"))
)
compare(
    Row("weights", measured=mixtral.num_parameters(), unit="parameters"),
    Row("in experts", measured=in_experts, unit="parameters"),
    Row("one token meets", measured=mixtral.num_active_parameters(), unit="parameters"),
)

# %% [markdown]
# **Expert parallelism** divides the experts among data ranks. Rows stay where they are; each token *visits*
# the ranks of its two experts and comes home.

# %%
show_source(expert.DispatchCore, "dispatch")

# %%
guess_away = predict(
    "8 experts on 4 ranks, all used alike: which share of the visits is to another rank?",
    unit="of 1",
)
guess_away

# %% tags=["timing"]
# %%ranks 4 -o visits
torch.manual_seed(rank)
rows = {"input_ids": torch.randint(512, (2, 64))}
engine = build(build_mixtral(), ExpertsCausalLM(), data=RANKS, expert=RANKS)
mixture = engine.model.blocks[1].mlp
dispatch, seen = mixture.core, []


def watching(x, expert, *rest):
    seen.append(torch.bincount(expert.flatten() // 2, minlength=RANKS).tolist())
    return dispatch(x, expert, *rest)


mixture.core = watching  # the core is injected, so anybody may look on
with traffic() as counted:
    engine.step([rows])
seen[0], counted.bytes("all_to_all")

# %%
table = torch.tensor([row for row, _ in visits])
away = 1 - table.diagonal().sum() / table.sum()
formula = dispatch_bytes(
    pairs=2 * 64 * 2, hidden_size=128, ranks=4, itemsize=4, experts=8, mixtures=2
)
compare(
    Row("visits away", guess_away, 3 / 4, float(away), unit="of 1", noisy=True),
    Row("visits of a layer", formula=4 * 2 * 64 * 2, measured=int(table.sum()), unit="visits"),
    Row(
        "payload of 4 ranks",
        formula=4 * formula["total"],
        measured=sum(size for _, size in visits),
        unit="B",
    ),
)

# %%
fig, ax = figure(
    x="expert's rank [number]", y="token's rank [number]", title="Who visits whom?"
)
ax.imshow(table, cmap="Blues", vmin=0, vmax=2 * int(table.max()))
for home in range(RANKS):
    for there in range(RANKS):
        ax.text(there, home, int(table[home, there]), ha="center", va="center")
ax.set_xticks(range(RANKS))
ax.set_yticks(range(RANKS))
ax.grid(visible=False)
caption(fig, kind="measured", text="Columns differ: some experts are busier.", noisy=True)

# %% [markdown]
# A rank cannot know how many tokens will come, so ranks first exchange *counts*. A popular expert makes its
# rank slow and all others wait: that is what balance losses are for.

# %% [markdown]
# ## 7 · Whose gradient is it?
# With 4 data ranks and `expert=2`, experts exist twice. Each kind of weight has its own group to sum over.

# %%
grid = Layout(data=4, expert=2).grid()
Table(
    {
        "weights": ["router, attention, …", "experts"],
        "divided among": ["nobody", str(grid.lines("expert"))],
        "gradient summed over": [str(grid.lines("data")), str(grid.lines("expert_replica"))],
    },
    kinds={"divided among": "given", "gradient summed over": "given"},
)

# %% [markdown]
# An expert's gradient already holds the tokens that came from other ranks. Losses were divided by the targets
# of *all* ranks, so nothing is scaled: not by 2, not by 1/2.

# %% [markdown]
# The **balance loss** multiplies two means over the batch: how often an expert is chosen, and how probable it
# is. Choices have no gradient, so it is enough to count *them* over all ranks:

# %%
show_source(expert.balance, "count")

# %%
# %%ranks 4
losses = ExpertsCausalLM(balance=0.5, router_z=0.1)
for degree in (1, 2, 4):
    layout = Layout(data=4, expert=degree)
    report = parity(build_mixtral, layout, objective=losses, precision="fp64", steps=1)
    if rank == 0:
        print(f"expert={degree}: {len(report.rows)} gradients equal one device's: {report.ok}")

# %% [markdown]
# ## 8 · What production does
# Megatron-LM and Llama 3 mirror. Llama 3 gathers all keys at once instead of a ring: few key/value heads make
# them small. DeepSpeed has Ulysses. PyTorch's `context_parallel` needs GPUs; given its CPU kernel, its ring
# returns our numbers.

# %% [markdown]
# ## 9 · What breaks
# Three common bugs; none raises an error.


# %%
class LabelsAfterTheCut(Composed):
    def _divide(self, ledger):
        ledger = super()._divide(ledger)
        right = self.build.batch_steps[0]

        def late(batch):
            part = right(batch)
            return {**part, "labels": shift_labels(part["input_ids"])}

        self.build.batch_steps[0] = late
        return ledger


# %%
class NotRescaled(Composed):
    def step(self, micro_batches):
        right, ring.merge_ = ring.merge_, average_
        try:
            return super().step(micro_batches)
        finally:
            ring.merge_ = right


def average_(mixed, logsumexp, part, part_logsumexp):
    first = logsumexp.isneginf()[..., None]
    mixed.copy_(torch.where(first, part, (mixed + part) / 2))
    logsumexp.copy_(torch.logaddexp(logsumexp, part_logsumexp))


# %%
class TimesTheDegree(Composed):
    def _accumulate(self, micro_batches, counts):
        sums = super()._accumulate(micro_batches, counts)
        for name, gradient in self.ledger.gradients().items():
            if self.ledger.entries[name].cuts:  # an expert
                gradient *= self.layout.expert
        return sums


# %%
# %%ranks 4
cut_rows, by_experts = Layout(context=4), Layout(data=4, expert=4)
for bug, model, layout in (
    (LabelsAfterTheCut, build_llama, cut_rows),
    (NotRescaled, build_llama, cut_rows),
    (TimesTheDegree, build_mixtral, by_experts),
):
    report = parity(model, layout, engine=bug, steps=1)
    if rank == 0:
        wrong = [row for row in report.rows if not row.gradient.ok]
        print(f"{report.engine}: loss equal: {report.loss.ok}, wrong gradients: {len(wrong)}")
        print(f"   the last of them is {wrong[-1].gradient.factor:.1f}x one device's")

# %% [markdown]
# What gives it away: a wrong *loss* means wrong labels or attention. A right loss with wrong gradients of
# experts *only*, by a whole factor, means they were summed or scaled like copies.

# %% [markdown]
# ## Exercises
# ### Exercise 2.7.1 (core): put attention together
# The heart of every ring and every flash kernel. (Exercise 2 of [[#1.14]] merged two parts; here are any number.)


# %% exercise="2.7.1"
def put_together(
    parts: list[tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (mixed [q,k], logsumexp [q]) of attention to all keys.

    parts[i]: the same of attention to some of the keys: the softmax-weighted values, and the
    log-sum-exp of the scores. A query that sees no key of a part has zeros and -inf there; one
    that sees none at all must get zeros and -inf. Scores may be as large as 1000.
    """
    # BEGIN SOLUTION
    totals = torch.stack([total for _, total in parts])
    whole = totals.logsumexp(0)
    shares = (totals - whole.masked_fill(whole.isinf(), 0)).exp()
    mixed = sum(share[:, None] * part for share, (part, _) in zip(shares, parts, strict=True))
    return mixed, whole
    # END SOLUTION


# %% check="2.7.1"
check("2.7.1", put_together)

# %% [markdown]
# ### Exercise 2.7.2 (core): even out a causal ring
# Which columns does a rank hold?


# %% exercise="2.7.2"
def mirrored(rank: int, ranks: int, length: int) -> list[int]:
    """Return the columns of `rank`, ascending, so that all ranks have equal causal work.

    Each rank holds two runs of neighbouring columns of equal length; 2 * ranks divides
    `length`.
    """
    # BEGIN SOLUTION
    size = length // (2 * ranks)
    chunks = (rank, 2 * ranks - 1 - rank)
    return [column for chunk in chunks for column in range(chunk * size, (chunk + 1) * size)]
    # END SOLUTION


# %% check="2.7.2"
check("2.7.2", mirrored)

# %% uses="2.7.2"
package = [
    [column for run in positions.columns_of(rank, 4, LENGTH, "mirrored") for column in run]
    for rank in range(4)
]
print("as the package:", [mirrored(rank, 4, LENGTH) for rank in range(4)] == package)

# %% [markdown]
# ### Exercise 2.7.3 (optional): how many tokens travel?
# What the ranks tell each other before tokens move.


# %% exercise="2.7.3"
def departures(choices: torch.Tensor, experts: int, ranks: int) -> list[int]:
    """Return how many (token, choice) pairs go to each rank.

    choices: int64 [n,k], the experts of each token. Rank 0 holds the first experts // ranks of
    them, rank 1 the next ones, and so on. The number `experts` is nobody: the pair found no
    seat and does not travel.
    """
    # BEGIN SOLUTION
    seated = choices[choices < experts]
    return torch.bincount(seated // (experts // ranks), minlength=ranks).tolist()
    # END SOLUTION


# %% check="2.7.3"
check("2.7.3", departures)

# %% [markdown] tags=["reading"]
# ## Further reading
# - H. Liu et al., *Ring Attention with Blockwise Transformers*, 2023, section 3: the ring.
# - W. Brandon et al., *Striped Attention*, 2023, section 3: why a causal ring waits.
# - A. Dubey et al., *The Llama 3 Herd of Models*, 2024, section 3.3.2: mirrored chunks, gathered keys.
# - S. A. Jacobs et al., *DeepSpeed Ulysses*, 2023, section 3: heads for positions.
# - D. Lepikhin et al., *GShard*, 2020, section 3: experts on many chips.
# - Z. Qiu et al., *Demons in the Detail*, 2025, section 3: balance over the global batch.
