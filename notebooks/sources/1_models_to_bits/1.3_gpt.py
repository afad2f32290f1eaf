# %% [markdown]
# **You will learn** where every parameter and every FLOP of a GPT is, and check ours against transformers' GPT-2.

# %% tags=["setup"]
import copy
import tempfile

import torch
from fmlab import meter
from fmlab.lab import Row, Table, caption, check, compare, figure, predict, show_source
from fmlab.models import GPT, GPTConfig, check_plan
from fmlab.models.gpt import GPTHead, GPTLayer
from fmlab.models.gpt_hf import weights
from transformers import GPT2LMHeadModel, logging

logging.set_verbosity_error()
logging.disable_progress_bar()


# %% tags=["setup"]
def on_paper(name: str, **overrides) -> GPT:
    """A model without memory: shapes only, on torch's meta device."""
    with torch.device("meta"):
        return GPT.from_preset(name, **overrides)


# %% [markdown]
# ## 1 · The whole model is a loop
# A GPT is a list of blocks: an embedding, equal layers, a head. Each block changes a small set of named tensors.

# %%
small = on_paper("gpt2")
print(
    [type(block).__name__ for block in small.blocks][:3], "…", type(small.blocks[-1]).__name__
)
show_source(GPTLayer.forward)

# %% [markdown]
# Attention mixes positions; the feed-forward part (MLP) works on each position alone. Both **add** to the stream
# `hidden`, which runs from the embedding to the head. (New to attention? [[1.2]]. Shapes: b rows, l tokens, width d.)

# %% [markdown]
# ## 2 · Where are the parameters?
# GPT-2 "small": 12 layers, width d = 768, 50,257 pieces, 1,024 positions. Papers call it 117M; blogs say 124M, 163M.

# %%
guess_n = predict("How many parameters does GPT-2 small have?", unit="parameters")
guess_n

# %%
d, layers, vocab, positions = 768, 12, 50_257, 1_024
parts = {
    "token embedding, V·d": vocab * d,
    "position embedding, P·d": positions * d,
    "attention, 4d² + 4d a layer": layers * (4 * d * d + 4 * d),
    "MLP, 8d² + 5d a layer": layers * (8 * d * d + 5 * d),
    "norms, 4d a layer + 2d": layers * 4 * d + 2 * d,
}
total, counted = sum(parts.values()), small.num_parameters()
compare("all", yours=guess_n, formula=total, measured=counted, unit="parameters")

# %%
Table(
    {
        "part": parts,
        "parameters": parts.values(),
        "share": [f"{n / total:.2%}" for n in parts.values()],
    },
    kinds={"parameters": "modelled"},
)

# %% [markdown]
# The head costs nothing: its matrix **is** the token embedding (they are *tied*). Count it twice and you get the 163M of
# the blogs; leave out the positions and you get another number again.

# %%
conventions = {
    "tied, everything": small.num_parameters(),
    "head counted as its own": on_paper("gpt2", tie_embeddings=False).num_parameters(),
    "without positions": small.num_parameters(positions=False),
    "without any embedding": small.num_parameters(embeddings=False, positions=False),
}
Table(
    {"convention": conventions, "parameters": conventions.values()},
    kinds={"parameters": "measured"},
)

# %% [markdown]
# ## 3 · What grows?
# From GPT-2 to GPT-3 the width grows 16-fold. Embeddings grow with d, layers with d².

# %%
names = ["gpt2", "gpt2-xl", "gpt3-6.7b", "gpt3-13b", "gpt3-175b"]
models = [on_paper(name) for name in names]
totals = [model.num_parameters() for model in models]
inside = [model.num_parameters(embeddings=False, positions=False) for model in models]
share = [100 * n / t for n, t in zip(inside, totals, strict=True)]

# %%
fig, ax = figure(x="share of the parameters [%]", y="model")
ax.barh(names, share, label="layers")
ax.barh(names, [100 - part for part in share], left=share, label="embeddings")
ax.invert_yaxis()
ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2)
caption(fig, kind="measured", text="In large models almost all parameters are in the layers.")

# %%
Table(
    {
        "model": names,
        "counted here": totals,
        "12·L·d²": [12 * m.config.num_layers * m.config.hidden_size**2 for m in models],
        "paper": ["117M", "1542M", "6.7B", "13.0B", "175.0B"],
    },
    kinds={"counted here": "measured", "12·L·d²": "modelled", "paper": "quoted"},
    source="GPT-2: Radford et al. 2019, table 2; GPT-3: Brown et al. 2020, table 2.1",
)

# %% [markdown]
# GPT-2's released models count to 124M and 1,558M, not to what its paper says. And two rows of GPT-3's table cannot be
# built: XL prints 24 heads of 128 for width 2,048 (we take 16), and 13B:

# %%
try:
    on_paper("gpt3-13b", hidden_size=5140)  # as printed, with 40 heads; ours is 5,120
except ValueError as error:
    print(error)

# %% [markdown]
# ## 4 · Where are the FLOPs?
# A matrix with N weights costs 2N FLOPs a token: a multiply and an add. The backward pass costs twice the forward pass,
# for gradients of inputs and of weights: **6N** a token, N counting every matrix, the head's too.

# %%
guess_flops = predict(
    "L = 4, d = 128, V = 4,096: FLOPs of one step on 4 x 128 tokens?", unit="FLOPs"
)
guess_flops

# %%
torch.manual_seed(0)
model = GPT.from_preset("gpt2-tiny")
rows = torch.randint(4096, (4, 129))
with meter.flops() as work:
    model(rows[:, :-1], labels=rows[:, 1:]).loss_sum.backward()

# %%
c, tokens, length = model.config, 4 * 128, 128
matrices = 12 * c.num_layers * c.hidden_size**2 + c.vocab_size * c.hidden_size
products = 6 * matrices * tokens
scores = (4 + 10) * c.num_layers * length * c.hidden_size * tokens
fused = sum(n for op, n in work.by_op.items() if "attention" in op)
compare(
    Row("matrices, 6N a token", formula=products, measured=work.total - fused, unit="FLOPs"),
    Row("attention scores", formula=scores, measured=fused, unit="FLOPs"),
    Row(
        "both", yours=guess_flops, formula=products + scores, measured=work.total, unit="FLOPs"
    ),
)

# %% [markdown]
# The scores need two products forward and **five** backward: the fused kernel computes them again instead of storing
# them. Published "model FLOPs" count four. Always ask which convention a number uses.

# %%
lengths = [256, 1024, 4096, 16384, 65536]
fig, ax = figure(x="sequence length [tokens]", y="attention scores, share of a layer [%]")
for name in ("gpt2", "gpt3-175b"):
    width = on_paper(name).config.hidden_size
    ax.plot(lengths, [100 * n / (n + 6 * width) for n in lengths], marker="o", label=name)
ax.set_xscale("log", base=2)
ax.legend()
caption(
    fig,
    kind="modelled",
    text="12·L·d·l against 72·L·d² a token; the head is left out. Half at l = 6d.",
)

# %% [markdown]
# ## 5 · Is it really GPT-2?
# We save our random weights in Hugging Face's format, let transformers load them, and compare logits, loss and every
# gradient.

# %%
ours = GPT(
    GPTConfig(vocab_size=503, max_positions=64, num_layers=3, hidden_size=96, num_heads=4)
)
with tempfile.TemporaryDirectory() as folder:
    ours.save_pretrained(folder)
    theirs = GPT2LMHeadModel.from_pretrained(folder).eval()

rows = torch.randint(503, (4, 33))
with torch.no_grad():
    error = (ours.eval()(rows).logits - theirs(rows).logits).abs().max().item()
print(f"logits agree to 1e-5: {error < 1e-5}")

# %%
loss = ours(rows[:, :-1], labels=rows[:, 1:]).loss_sum / rows[:, 1:].numel()
reference = theirs(rows, labels=rows).loss  # transformers moves the labels itself
loss.backward()
reference.backward()
print(f"losses agree to 1e-5: {abs(loss.item() - reference.item()) < 1e-5}")

# %%
grads, others = ({n: p.grad for n, p in m.named_parameters()} for m in (ours, theirs))
whole = torch.cat([grad.flatten() for grad in grads.values()]).norm()
errors = []
for pair in weights(ours.config):  # our name, their name, and whether theirs is transposed
    wanted = others[pair.theirs].T if pair.transposed else others[pair.theirs]
    errors.append((grads[pair.ours] - wanted).norm() / max(wanted.norm(), 1e-6 * whole))
print(f"{len(errors)} gradients agree to 1e-5: {max(errors) < 1e-5}")

# %% [markdown]
# ## 6 · What is stored between steps of writing?
# To write a piece, a GPT needs keys and values of all pieces before it. A **cache** keeps them; only the new piece is
# computed. ([[#1.2]] compares caches by size.)

# %%
guess_cache = predict(
    "Writing 32 pieces one by one: how many times fewer FLOPs with a cache?", unit="x"
)
guess_cache

# %%
model.eval()
text = torch.randint(4096, (1, 32))
with torch.no_grad(), meter.flops() as again:
    full = [model(text[:, : n + 1]).logits[:, -1] for n in range(32)]

cache = model.new_cache(batch=1, max_length=32)
with torch.no_grad(), meter.flops() as cached:
    step = [model(text[:, n : n + 1], cache=cache).logits[:, -1] for n in range(32)]

# %%
same = max((a - b).abs().max().item() for a, b in zip(full, step, strict=True))
print(f"same logits to 1e-4: {same < 1e-4}")
ratio = again.total / cached.total
compare("without / with", yours=guess_cache, formula=(1 + 32) / 2, measured=ratio, unit="x")

# %% [markdown]
# The scores add the rest. The price is memory: 2·L·d numbers for each piece, as long as the
# text is written. Chapter [[#1.8]] measures what that costs.

# %% [markdown]
# ## 7 · How may it be cut?
# Later chapters spread one model over many ranks. The model itself declares how; `check_plan` proves the declaration:
# each weight has one rule, and cutting and joining gives it back exactly.

# %%
for rule in model.parallel_plan().rules[:5]:
    print(f"{rule.kind:9} {rule.pattern}")
check_plan(model, {"input_ids": text})
print("plan proven")

# %% [markdown]
# ## 8 · What breaks: the head comes loose
# Tying is a fragile promise: many ways to move, copy or load a model break it without a word. The parameter count gives
# it away.

# %%
loose = copy.deepcopy(model)
loose.blocks[-1].tokens.weight = torch.nn.Parameter(loose.blocks[-1].tokens.weight.clone())
extra = sum(p.numel() for p in loose.parameters()) - model.num_parameters()
compare("parameters too many", formula=4096 * 128, measured=extra, unit="parameters")

# %% [markdown]
# From here on the two copies get different gradients and drift apart. PyTorch itself loses ties when a model moves to
# another kind of device. Ours ties them again:

# %%
plain = torch.nn.ModuleList([torch.nn.Embedding(9, 4), torch.nn.Linear(4, 9, bias=False)])
plain[1].weight = plain[0].weight
plain.to("meta")
print("plain PyTorch, after a move: tied", plain[0].weight is plain[1].weight)
moved = copy.deepcopy(model).to("meta")
print(
    "our GPT, after a move: tied",
    moved.blocks[0].tokens.weight is moved.blocks[-1].tokens.weight,
)

# %% [markdown]
# ## What production systems do
# The same architecture runs everywhere, with one more trick you have already used here: the loss is computed in pieces,
# so that the logits (tokens x vocabulary) never exist in full.

# %%
show_source(GPTHead.forward)

# %% [markdown]
# ## Exercises
# ### Exercise 1.3.1 (core): count it without building it


# %% exercise="1.3.1"
def count_parameters(layers: int, width: int, vocab: int, positions: int) -> int:
    """Return the number of parameters of a GPT-2 with a tied head and an MLP four times as wide.

    Everything has a bias but the embeddings and the head; each layer has two norms, and one stands at the end.
    """
    # BEGIN SOLUTION
    layer = (4 * width**2 + 4 * width) + (8 * width**2 + 5 * width) + 2 * 2 * width
    return (vocab + positions) * width + layers * layer + 2 * width
    # END SOLUTION


# %% check="1.3.1"
check("1.3.1", count_parameters)

# %% [markdown]
# ### Exercise 1.3.2 (core): model FLOPs of training, for one token
# Convention: matrices and full attention, backward twice the forward, nothing computed again; looking up an embedding
# is free.


# %% exercise="1.3.2"
def training_flops(layers: int, width: int, vocab: int, length: int) -> int:
    """Return the model FLOPs of training a GPT-2 on one token of a sequence of `length` tokens."""
    # BEGIN SOLUTION
    matrices = 12 * layers * width**2 + vocab * width
    return 6 * matrices + 12 * layers * width * length
    # END SOLUTION


# %% check="1.3.2"
check("1.3.2", training_flops)

# %% [markdown]
# ### Exercise 1.3.3 (optional): one piece against the cache


# %% exercise="1.3.3"
def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """query [h, k], keys [h, t, k], values [h, t, k] -> [h, k]: softmax attention of one new piece.

    The piece may look at all t cached pieces; its own key and value are among them.
    """
    # BEGIN SOLUTION
    scores = torch.einsum("hk,htk->ht", query, keys) / query.shape[-1] ** 0.5
    return torch.einsum("ht,htk->hk", scores.softmax(-1), values)
    # END SOLUTION


# %% check="1.3.3"
check("1.3.3", attend)

# %% [markdown] tags=["reading"]
# ## Further reading
# - Radford et al. 2019, *Language Models are Unsupervised Multitask Learners*, section 2.3: GPT-2.
# - Brown et al. 2020, *Language Models are Few-Shot Learners*, table 2.1 and appendix D: sizes and FLOPs of GPT-3.
# - Press and Wolf 2017, *Using the Output Embedding to Improve Language Models*: tying.
# - Korthikanti et al. 2022, *Reducing Activation Recomputation*, appendix A: FLOPs with attention and logits.
# - Dao et al. 2022, *FlashAttention*, section 3: scores that are computed twice and stored never.
