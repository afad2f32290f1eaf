# %% [markdown]
# **You will learn** what fills the memory of a training step, how to predict it, and what to give up first.

# %% tags=["setup"]
from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.nn.functional as F
from fmlab.chips import chip
from fmlab.lab import Row, Table, caption, check, compare, figure, predict, show_source, within
from fmlab.lab.memory import memory_panel
from fmlab.meter import flops, peak_memory, saved_activations
from fmlab.models import GPT
from fmlab.objectives import CausalLM
from fmlab.parallel import Layout, activations, parallelize, parity
from fmlab.parallel.activations import Run, classic, kept, layer_shape
from fmlab.parallel.composed import Composed
from fmlab.train import adamw

# %load_ext fmlab.lab

# %% [markdown]
# ## 1 · States
# Before any token comes, a step needs its **states**: the weights, a gradient for each, and what AdamW remembers of
# each. You counted them in [[#0.2]]; now by their parts.

# %%
ROWS, LENGTH = 8, 256
torch.manual_seed(0)
tokens = torch.randint(4096, (ROWS, LENGTH + 1))
batch = {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def engine_of(model, **layout):
    """The training step of a model; `Composed` also where the layout is plain."""
    return parallelize(model, Layout(**layout), CausalLM(), adamw(1e-3), Composed)


# %%
guess_states = predict(
    "How many bytes a parameter are weights, gradients and AdamW's state, in fp32?", unit="B"
)
guess_states

# %%
with peak_memory() as alive:
    model = GPT.from_preset("gpt2-tiny")
    engine = engine_of(model)
    engine.step([batch])
parameters = sum(p.numel() for p in model.parameters())
state = engine.optimizer.state.values()
sizes = {
    "weights": sum(p.nbytes for p in model.parameters()),
    "gradients": sum(p.grad.nbytes for p in model.parameters()),
    "optimizer": sum(t.nbytes for s in state for t in s.values() if t.dim()),
}
found = sum(sizes.values()) / parameters
compare("states", yours=guess_states, formula=4 + 4 + 8, measured=found, unit="B")

# %% [markdown]
# Mixed precision with 16-bit weights keeps 2 + 2 + 12: the fp32 copy moves to the optimizer. Again 16; 18
# if gradients are summed in fp32. What that means:

# %%
counts = {"gpt2": 124e6, "gpt2-xl": 1.56e9, "7B": 7e9, "GPT-3": 175e9}
Table(
    {
        "model": list(counts),
        "states": [16 * n / 1e9 for n in counts.values()],
        "H100s": [16 * n / chip("h100").memory_bytes for n in counts.values()],
    },
    kinds={"states": "modelled", "H100s": "modelled"},
    units={"states": "GB"},
)

# %% [markdown]
# ## 2 · Activations
# Backward needs what forward made. A layer keeps what enters its norms and matrices, queries, keys and
# values, and what enters GELU.

# %%
guess_layer = predict(
    "For a token, how many numbers does a GPT layer of width d keep, in multiples of d?",
    unit="d",
)
guess_layer

# %%
layer, shape = model.blocks[1], layer_shape(model.blocks[1])
state = model.blocks[0](model.prepare(batch["input_ids"]))
with saved_activations(model) as saved:
    layer(state)
    result = layer(state)
run = Run(ROWS, LENGTH)
numbers = saved.live / 4 / (ROWS * LENGTH) / shape.width
compare("numbers kept", yours=guess_layer, formula=16, measured=numbers, unit="d", digits=2)

# %%
terms = kept(shape, run)
Table(
    {
        "what": list(terms),
        "bytes": list(terms.values()),
        "of width d": [size / 4 / ROWS / LENGTH / shape.width for size in terms.values()],
    },
    kinds={"bytes": "modelled", "of width d": "modelled"},
)

# %%
print(f"formula {sum(terms.values()):,} bytes, measured {saved.live:,} bytes")

# %% [markdown]
# Equal to the byte: the formula is read from our blocks, one term for each tensor that autograd saves.

# %% [markdown]
# ## 3 · The square
# Textbook attention also keeps its tables, one number for each pair of positions. Fused attention makes
# them again, tile by tile.

# %%
from fmlab.models.attention import quadratic_core

plain = GPT(model.config, attention_core=quadratic_core)
lengths, curves = (32, 64, 128, 256), {"textbook": [], "fused": []}
for name, one in (("textbook", plain), ("fused", model)):
    for length in lengths:
        state = one.blocks[0](one.prepare(batch["input_ids"][:1, :length]))
        with saved_activations(one) as saved:
            result = one.blocks[1](state)
        curves[name].append(saved.live / length)

# %%
fig, ax = figure(x="length [tokens]", y="kept [kB/token]", title="One layer")
for name, line in curves.items():
    ax.plot(lengths, [size / 1e3 for size in line], marker="o", label=name)
ax.set_ylim(bottom=0)
ax.legend()
caption(fig, kind="measured", text="Tables grow with the length, for each token.", digits=3)

# %% [markdown]
# With dropout in 16 bits, tables take $5as^2b$ bytes of $sbh\,(34 + 5as/h)$: a heads, s tokens, b rows,
# width h. For GPT-3 that is 70 %. Our formula agrees when given the same layer:

# %%
gpt3 = activations.LayerShape(12288, 96, 96, 128, 4 * 12288)
ours = activations.total(gpt3, Run(1, 2048, 2, 2, dropout=True, tables=True))
paper = classic(s=2048, b=1, h=12288, a=96)
source = "Korthikanti 2022, table 2"
compare("a layer of GPT-3", formula=ours / 1e9, quoted=paper / 1e9, source=source, unit="GB")

# %% [markdown]
# ## 4 · Logits
# The head makes a number for each token *and* each word (piece) of the vocabulary: 50,257 for GPT-2.

# %%
guess_tables = predict(
    "How many tables of tokens x words does the usual loss need at once?", unit="tables"
)
guess_tables

# %%
n, d, v = 512, 64, 50257
hidden, head = torch.randn(n, d, requires_grad=True), torch.randn(v, d, requires_grad=True)
labels = torch.randint(v, (n,))


def tables(loss):
    """The most memory of forward and backward, in tables of [n, v]."""
    with peak_memory() as memory:
        loss().backward()
    hidden.grad = head.grad = None
    return memory.peak / (4 * n * v)


# %%
from fmlab.models.cross_entropy import linear_cross_entropy

usual = tables(lambda: F.cross_entropy(hidden @ head.T, labels, reduction="sum"))
with patch("fmlab.models.cross_entropy.CHUNK_BYTES", 8_000_000):  # small, to fit this example
    chunks = tables(lambda: linear_cross_entropy(hidden, head, labels))
compare(
    Row("the usual loss", guess_tables, formula=3, measured=usual, unit="tables", digits=2),
    Row("in chunks", measured=chunks, unit="tables", digits=1),
)

# %% [markdown]
# Logits, log-probabilities, their gradient. In chunks, a few rows at a time become gradients at once;
# what is left is mostly the head's own gradient. All our models do so.

# %% [markdown]
# ## 5 · The whole ledger
# Now predict the peak of a step. It comes at the end of the forward pass: old gradients are gone, all
# activations are there, and the loss has its chunk.

# %%
ledger = {
    "weights": 4 * parameters,
    "optimizer": 8 * parameters,
    "activations": activations.total(shape, run, model.config.num_layers),
    "a chunk of probabilities": 4 * ROWS * LENGTH * 4096,
    "gradients of the head": 4 * (4096 + ROWS * LENGTH) * shape.width,
}
Table({"term": list(ledger), "bytes": list(ledger.values())}, kinds={"bytes": "modelled"})

# %%
with peak_memory() as alive:
    model = GPT.from_preset("gpt2-tiny")
    engine = engine_of(model)
    for _ in range(2):
        engine.step([batch])
off = abs(sum(ledger.values()) / alive.peak - 1)
compare("peak", formula=sum(ledger.values()) / 1e6, measured=alive.peak / 1e6, unit="MB")

# %%
within("the formula is off by a share of", off, below=0.06)

# %% [markdown]
# A planner ([[3.1]]) has such lines for any model, chip and layout. Its sum counts gradients and the loss's tables
# together, which here do not meet: it errs on the safe side.

# %%
from fmlab.planner import Calibration, plan

bare = Calibration(reserve=0, context_bytes=0)  # no CUDA here, and an allocator without gaps
how = dict(precision="fp32", states="fp32-16", calibration=bare)
planned = plan("gpt2-tiny", chip="h100", global_batch=ROWS, seq_len=LENGTH, **how)
compare(
    *(Row(name, formula=line.value / 1e6, unit="MB") for name, line in planned.memory.items()),
    Row("peak", formula=planned.peak_memory / 1e6, measured=alive.peak / 1e6, unit="MB"),
)

# %% [markdown]
# ## 6 · Compute again
# **Recomputation** keeps only what enters a layer, and runs the layer once more when its backward pass begins.
# Autograd's hooks make that short ([[1.13]] does it in a graph):

# %%
from fmlab.parallel.recompute import again, recomputed

show_source(again.Call, "hooks")

# %%
guess_bytes = predict(
    "Which part of the activations is left when all layers are computed again?", unit="of 1"
)
guess_bytes

# %%
guess_work = predict("How many times the operations does a step then take?", unit="times")
guess_work


# %%
def measure(**layout):
    """Kept bytes, operations and gradients of the second step."""
    torch.manual_seed(0)
    model = GPT.from_preset("gpt2-tiny", dropout=0.1)
    engine = engine_of(model, **layout)
    engine.step([batch])
    with saved_activations(model) as saved, flops() as work:
        engine.step([batch])
    return saved.peak, work.total, engine.full_grads(), recomputed(model)


# %%
ways = {
    "nothing": {},
    "selective": {"recompute": "selective"},
    "full": {"recompute": "full"},
    "60 % may stay": {"recompute": "budget", "activation_budget": 0.6},
}
measured = {name: measure(**layout) for name, layout in ways.items()}
bytes_0, work_0, gradients, _ = measured["nothing"]

# %%
Table(
    {
        "computed again": list(measured),
        "kept": [m[0] / bytes_0 for m in measured.values()],
        "operations": [m[1] / work_0 for m in measured.values()],
        "layers": [len(m[3]) for m in measured.values()],
    },
    kinds=dict.fromkeys(("kept", "operations", "layers"), "measured"),
    units={"kept": "of 1", "operations": "times"},
)

# %%
layers, head_bytes = model.config.num_layers, ledger["gradients of the head"]
ends = head_bytes + ROWS * LENGTH * shape.width * 5  # the head's norm, the embedding's mask
all_kept = activations.total(shape, Run(ROWS, LENGTH, dropout=True, tables=True), layers) + ends
inputs = activations.total(shape, Run(ROWS, LENGTH, recompute="full"), layers) + ends
left, work = measured["full"][0] / bytes_0, measured["full"][1] / work_0
compare(
    Row("kept", guess_bytes, formula=inputs / all_kept, measured=left, unit="of 1", digits=2),
    Row("operations", guess_work, measured=work, unit="times", digits=3),
)

# %% [markdown]
# One more forward pass would be a third; the head is not run again. *Selective* drops only the tables, for
# a few operations. A *budget* chooses layers by measured bytes and operations.

# %%
same = {
    name: all(torch.equal(gradient, m[2][key]) for key, gradient in gradients.items())
    for name, m in measured.items()
}
print(
    "gradients equal bit for bit, with dropout on:", all(same.values()), f"({len(same)} ways)"
)

# %% [markdown]
# ## 7 · Which term does not fit?
# Move the sliders until it fits. Then find: a model that dies of its logits, one that dies of its states,
# and one that no fix here can save.

# %%
memory_panel()

# %% [markdown]
# ## 8 · What production does
# Megatron-LM fuses attention and recomputes selectively. `torch.utils.checkpoint` is *full*, layer by
# layer; `torch.compile` has a budget and solves for it. Beside ours:

# %%
from torch.utils.checkpoint import checkpoint

costs = {}
for name, wrap in (("ours", again.compute_again), ("torch", checkpoint)):
    one = GPT(model.config)
    for block in one.blocks[1:-1]:
        extra = {"use_reentrant": False} if wrap is checkpoint else {}
        block.forward = lambda s, run=block.forward, wrap=wrap, extra=extra: wrap(
            run, s, **extra
        )
    with flops() as work:
        one(**batch).loss_sum.backward()
    costs[name] = work.total
for name, count in costs.items():
    print(f"operations of a step, {name}: {count:,}")

# %% [markdown]
# ## 9 · What breaks
# Two bugs that raise no error. First: the second run draws *other* dropout masks.


# %%
from fmlab.models.dropout import Masks, drawing_masks
from fmlab.parallel.recompute.conditions import Conditions


def with_dropout():
    return GPT.from_preset("gpt2-tiny", num_layers=2, vocab_size=131, dropout=0.1)


@contextmanager
def other_masks(conditions):
    with torch.enable_grad(), drawing_masks(Masks(seed=99, step=0)):
        yield


# %%
print("right:", parity(with_dropout, Layout(recompute="full")).ok)
with patch.object(Conditions, "again", other_masks):
    report = parity(with_dropout, Layout(recompute="full"))
print("with other masks in the second run:", report.ok)
print(f"{len(report.different)} of {len(report.rows)} gradients or weights differ")
print(f"the worst is off by {report.worst.gradient.error:.1f} times its size")

# %% [markdown]
# The forward pass is perfect; the gradients belong to another network. Second: a list that keeps losses, to
# print their mean later.

# %%
history, held = [], []
with saved_activations(model) as saved:
    for _ in range(3):
        history.append(model(**batch).loss_sum)  # should be .detach()
        held.append(saved.live / 1e6)
compare(
    Row("after 1 step", measured=held[0], unit="MB"),
    Row("after 3 steps", formula=3 * held[0], measured=held[2], unit="MB"),
)

# %% [markdown]
# Each loss holds its graph, and the graph all activations: memory grows with every step. The number that
# gives it away is the slope.

# %%
history.clear()
print(f"after the list is gone: {saved.live} bytes")

# %% [markdown]
# ## Exercises
# ### Exercise 2.1.1 (core): count the states
# Fine-tuning freezes most weights. What is left?


# %% exercise="2.1.1"
def state_bytes(trained: int, frozen: int, mixed: bool) -> int:
    """Return the bytes of weights, gradients and AdamW's state.

    trained, frozen: how many parameters. mixed=False: all in fp32. mixed=True: weights and
    gradients have 2 bytes, and AdamW keeps an fp32 copy of each weight that it trains, besides
    its two fp32 moments.
    """
    # BEGIN SOLUTION
    weight = 2 if mixed else 4
    optimizer = 12 if mixed else 8
    return trained * (2 * weight + optimizer) + frozen * weight
    # END SOLUTION


# %% check="2.1.1"
check("2.1.1", state_bytes)

# %% [markdown]
# ### Exercise 2.1.2 (core): choose the layers
# Layers differ in embeddings, experts, lengths. Which ones keep everything?


# %% exercise="2.1.2"
def choose(layers: list[tuple[int, int, int]], budget: int) -> list[int]:
    """Return the numbers (from 0, ascending) of the layers that keep everything; others rerun.

    layers: (kept, given, operations) of each, 12 at most. A layer that keeps everything takes
    `kept` bytes; one that runs again takes `given` bytes, what goes into it, and costs
    `operations`. Together they may take `budget` bytes, and must cost as few operations as
    possible. If even all together that run again take more, return []. Where choices cost the
    same, any will do.
    """
    # BEGIN SOLUTION
    from itertools import combinations

    best, least = [], sum(operations for _, _, operations in layers)
    for count in range(1, len(layers) + 1):
        for keep in combinations(range(len(layers)), count):
            taken = sum(
                kept if i in keep else given for i, (kept, given, _) in enumerate(layers)
            )
            cost = sum(
                operations for i, (_, _, operations) in enumerate(layers) if i not in keep
            )
            if taken <= budget and cost < least:
                best, least = list(keep), cost
    return best
    # END SOLUTION


# %% check="2.1.2"
check("2.1.2", choose)

# %% [markdown]
# ### Exercise 2.1.3 (optional): write recomputation
# Use `torch.autograd.graph.saved_tensors_hooks(pack, unpack)`: `pack` may give anything for a tensor, and
# `unpack` must give the tensor back.


# %% exercise="2.1.3"
def run_again(function, x: torch.Tensor) -> torch.Tensor:
    """Return function(x), keeping nothing of what it saves for its backward pass but x itself.

    function: one tensor to one tensor; it may use weights that require gradients, and draw
    random numbers on the CPU: the second run must draw the same ones, and leave the generator
    as it finds it.
    """
    # BEGIN SOLUTION
    before, numbers, values = torch.get_rng_state(), iter(range(10**9)), []
    hooks = torch.autograd.graph.saved_tensors_hooks

    def unpack(number):
        if not values:
            now = torch.get_rng_state()
            torch.set_rng_state(before)
            with (
                torch.enable_grad(),
                hooks(lambda t: values.append(t.detach()), lambda _: None),
            ):
                function(x)
            torch.set_rng_state(now)
        return values[number]

    with hooks(lambda tensor: next(numbers), unpack):
        return function(x)
    # END SOLUTION


# %% check="2.1.3"
check("2.1.3", run_again)

# %% [markdown] tags=["reading"]
# ## Further reading
# - V. Korthikanti et al., *Reducing Activation Recomputation in Large Transformer Models*, 2022, section 4
#   (bytes of a layer) and 5 (selective recomputation).
# - T. Chen et al., *Training Deep Nets with Sublinear Memory Cost*, 2016, section 4.
# - S. Rajbhandari et al., *ZeRO*, 2019, section 3: where did all the memory go?
# - E. Wijmans et al., *Cut Your Losses in Large-Vocabulary Language Models*, 2024, section 3.
