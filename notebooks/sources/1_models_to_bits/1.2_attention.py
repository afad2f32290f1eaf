# %% [markdown]
# **You will learn** what masks, tiles, shared heads, windows, latents and running sums each save, and what each gives up.

# %% tags=["setup"]
from collections.abc import Iterable

import fmlab.models.attention as fa
import torch
import torch.nn.functional as F
from fmlab import meter
from fmlab.lab import Row, Table, caption, check, compare, figure, predict, show_source, within
from fmlab.models import Llama
from fmlab.models.attention import AttentionMask, cost
from fmlab.models.attention.latent import LatentCache

cpu = torch.device("cpu")


# %% tags=["setup"]
def random_heads(length: int, heads: int = 4, kv_heads: int = 4, width: int = 32) -> list:
    """Queries, keys and values, [1, heads, length, width]."""
    torch.manual_seed(0)
    return [torch.randn(1, h, length, width) for h in (heads, kv_heads, kv_heads)]


# %% [markdown]
# ## 1 · One formula
# Each query scores all keys, a softmax turns scores into weights, and the weights mix the values. This is all of it,
# table of weights included:

# %%
show_source(fa.quadratic_core)

# %% [markdown]
# Everything below changes one of three things: **who may look** (masks), **how it is computed** (tiles), or **what is
# kept** for the next token (caches).

# %% [markdown]
# ## 2 · Who may look?
# A mask says which keys (columns) each query (row) sees. A GPT's is causal; the others cut more away, or open a part.

# %%
n = 16
documents = torch.tensor([[0] * 6 + [1] * 7 + [2] * 3])
masks = {
    "causal": AttentionMask(True, n, n),
    "window of 4": AttentionMask(True, n, n, window=4),
    "prefix of 6": AttentionMask(True, n, n, prefix=torch.tensor([6])),
    "packed documents": AttentionMask(True, n, n, None, documents, documents),
    "padding": AttentionMask(False, n, n, real_keys=torch.arange(n)[None] < 11),
    "blocks": AttentionMask(
        False, n, n, blocks=fa.BlockPattern(fa.local_blocks(8, 1) | fa.global_blocks(8, 1), 2)
    ),
}


# %%
def draw(names: list[str], text: str):
    fig, axes = figure("key [position]", "query [position]", names, height=2.7)
    pairs = {}
    for ax, name in zip(axes, names, strict=True):
        table = masks[name].allowed(cpu)[0, 0]
        ax.imshow(table, cmap="Blues", vmin=0, vmax=1.3)
        ax.grid(False)
        pairs[f"{name}, pairs of {n * n}"] = int(table.sum())
    return caption(fig, kind="given", text=text, numbers=pairs)


# %%
draw(
    list(masks)[:3],
    "Blue: may look. A window keeps a band, a prefix looks at itself both ways.",
)

# %%
draw(list(masks)[3:], "Texts packed in one row stay strangers; padding is hidden as a KEY.")

# %% [markdown]
# A hidden pair is wasted work, if it is computed at all. How much would a window save?

# %%
guess_pairs = predict(
    "1,024 tokens, causal, window of 128: what share of all pairs is visible?", unit="%"
)
guess_pairs

# %%
length, window = 1024, 128
mask = AttentionMask(True, length, length, window=window)
counted = int(mask.allowed(cpu).sum())
paper = window * (window + 1) // 2 + (length - window) * window  # a ramp, then full windows
compare(
    Row("visible pairs", formula=paper, measured=counted, unit="pairs"),
    Row(
        "share", yours=guess_pairs, formula=100 * paper / length**2,
        measured=100 * counted / length**2, unit="%",
    ),
)  # fmt: skip

# %% [markdown]
# But a mask alone saves nothing: the plain formula computes every score and then throws most of them away. Tiles save:
# those without a visible pair are skipped.

# %%
q, k, v = random_heads(length)
work = {"visible pairs": [], "plain formula": [], "tiles of 64": []}
for span in (None, 512, 128, 32):
    mask = AttentionMask(True, length, length, window=span)
    work["visible pairs"].append(
        cost.attention_flops(length, length, 4, 32, "visible", window=span) / 1e6
    )
    for name, core in (("plain formula", fa.quadratic_core), ("tiles of 64", fa.flash_core)):
        tiled = {} if core is fa.quadratic_core else {"tile": 64}
        with meter.flops() as counted:
            core(q, k, v, mask, **tiled)
        work[name].append(counted.total / 1e6)

# %%
Table(
    {"causal, window": ["none", "512", "128", "32"], **work},
    kinds={"visible pairs": "modelled", "plain formula": "measured", "tiles of 64": "measured"},
    units=dict.fromkeys(work, "MFLOPs"),
)

# %% [markdown]
# "A window of 32 is 16 times cheaper" is true of pairs, not of this code: tiles at the edge are computed in full.
# Published FLOPs mostly count **all** pairs. Ask for the convention.

# %% [markdown]
# ## 3 · The same numbers without the table
# The weights are l x l for each head. The flash algorithm walks over tiles of keys with three running things a row:
# largest score, sum, mixture. A larger score scales the old sums down.

# %%
show_source(fa.flash._TiledAttention, region="online softmax")

# %%
guess_memory = predict(
    "4 heads of 32, 1,024 tokens, fp32: what does plain attention keep for backward?", unit="MB"
)
guess_memory

# %%
lengths = [256, 512, 1024, 2048]
cores = {"plain formula": fa.quadratic_core, "tiles": fa.flash_core}
memory = {
    name: [cost.measure_memory(core, AttentionMask(True, n, n), 4, 32) for n in lengths]
    for name, core in cores.items()
}
plain, tiles = (memory[name][2].saved / 1e6 for name in cores)

# %%
parts = {
    "two tables of weights a head": 2 * 4 * 1024**2 * 4 / 1e6,  # one number is 4 bytes
    "two masks, a byte a pair": 2 * 1024**2 / 1e6,
    "keys and values, copied": 2 * 4 * 1024 * 32 * 4 / 1e6,
}
total = dict(yours=guess_memory, formula=sum(parts.values()), measured=plain)
compare(
    *(Row(name, formula=size, unit="MB") for name, size in parts.items()),
    Row("plain formula, all", **total, unit="MB"),
    Row("tiles: output + one number a row", formula=4 * 1024 * 33 * 4 / 1e6, measured=tiles, unit="MB"),
)  # fmt: skip

# %% [markdown]
# The plain formula keeps the weights before and after the second masking, the mask of each, and copies of keys and
# values. The tiles keep a row's *log-sum-exp*, the logarithm of its softmax's sum: enough to make all weights
# **again**.

# %%
fig, ax = figure(x="sequence length [tokens]", y="most alive in a step [MB]")
for name, marker in zip(cores, "os", strict=True):
    ax.plot(lengths, [m.peak / 1e6 for m in memory[name]], marker=marker, label=name)
ax.set(xscale="log", yscale="log")
ax.set_xticks(lengths, lengths)
ax.set_yticks([1, 10, 100], [1, 10, 100])
ax.minorticks_off()
caption(
    fig,
    kind="measured",
    text="Twice the length: four times the table, at most twice the tiles.",
)

# %% [markdown]
# Is it exact? Each core against the definition in float64, outputs and gradients, with padding, a window and shared
# heads at once:

# %%
real = torch.arange(200)[None] >= 17
mask = AttentionMask(True, 200, 200, real, window=60)


def answer(core, dtype) -> list[torch.Tensor]:
    q, k, v = (x.to(dtype).requires_grad_() for x in random_heads(200, 4, 2))
    out = core(q, k, v, mask)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), [q, k, v])]


exact = answer(fa.definition_core, torch.float64)
for core in (fa.quadratic_core, fa.flash_core, fa.sdpa_core):
    pairs = zip(answer(core, torch.float32), exact, strict=True)
    worst = max(float((ours - right).norm() / right.norm()) for ours, right in pairs)
    within(f"{core.__name__:15} relative error", worst, below=1e-6)

# %% [markdown]
# Not an approximation: the same sum in another order. And in time? Ours is for reading; torch's fused kernel
# (`sdpa_core`, what all models here use) runs the same algorithm in C++.

# %% tags=["timing"]
import time

mask, times = AttentionMask(True, 2048, 2048), {}
inputs = random_heads(2048)
for core in (fa.quadratic_core, fa.flash_core, fa.sdpa_core):
    core(*inputs, mask)
    start = time.perf_counter()
    core(*inputs, mask)
    times[core.__name__] = 1000 * (time.perf_counter() - start)
compare(*(Row(name, measured=ms, unit="ms", noisy=True) for name, ms in times.items()))

# %% [markdown]
# ## 4 · What must be kept while writing?
# Each new token looks back at the keys and values of all tokens before it. They are kept, in every layer: the **KV
# cache**. For long texts it outgrows the model.

# %%
guess_cache = predict(
    "Llama-2 7B: 32 layers, 32 heads of 128, 16 bits. Cache of one text of 4,096 tokens?",
    unit="GB",
)
guess_cache

# %% [markdown]
# Who wants a smaller one? *Grouped*: several query heads share a key/value head; *multi-query*: all share one.
# *Latent*: a token keeps one short vector, from which every head's keys and values are made again.

# %%
layers, heads, width, tokens = 32, 32, 128, 4096
kept = {"dtype": torch.bfloat16, "device": "meta"}  # shapes only: no memory is taken
caches = {
    "multi-head": fa.KVCache(layers, 1, heads, tokens, width, **kept),
    "grouped, 8 key/value heads": fa.KVCache(layers, 1, 8, tokens, width, **kept),
    "multi-query, 1 key/value head": fa.KVCache(layers, 1, 1, tokens, width, **kept),
    "latent, 512 + 64 numbers": LatentCache(layers, 1, tokens, 512, 64, **kept),
    "window of 1,024": fa.WindowKVCache(layers, 1, heads, 1024, width, **kept),
}
formula = [cost.kv_cache_bytes(tokens, layers, g, width) for g in (heads, 8, 1)]
formula += [cost.latent_cache_bytes(tokens, layers, 512, 64)]
formula += [cost.kv_cache_bytes(tokens, layers, heads, width, window=1024)]

# %%
sizes = [cache.nbytes for cache in caches.values()]
compare(
    Row(
        "multi-head",
        yours=guess_cache,
        formula=formula[0] / 1e9,
        measured=sizes[0] / 1e9,
        unit="GB",
    )
)

# %%
Table(
    {"cache": caches, "formula": formula, "buffers": sizes, "share": [f"{s / sizes[0]:.1%}" for s in sizes]},
    kinds={"formula": "modelled", "buffers": "measured"},
    units={"formula": "B", "buffers": "B"},
)  # fmt: skip

# %% [markdown]
# A window of 1,024 counts the new token itself, so 1,023 before it are kept: 25.0 % of 4,096, less a token.

# %% [markdown]
# Query heads that **share** keys and values save cache and projections, but not one score: every query head still
# meets every key.

# %%
mask, flops, sizes = AttentionMask(True, 256, 256), {}, {}
for shared in (8, 2, 1):
    inputs = random_heads(256, 8, shared)
    with meter.flops() as counted:
        fa.quadratic_core(*inputs, mask)
    flops[f"{shared} key/value head{'s' * (shared > 1)}"] = counted.total
    sizes[shared] = inputs[1].nbytes + inputs[2].nbytes
Table(
    {"8 query heads": flops, "scores and mixture": flops.values(), "keys and values": sizes.values()},
    kinds={"scores and mixture": "measured", "keys and values": "measured"},
    units={"scores and mixture": "FLOPs", "keys and values": "B"},
)  # fmt: skip

# %% [markdown]
# ## 5 · Keep a sum instead
# Replace exp(q·k) by φ(q)·φ(k) with φ = elu + 1. Then φ(q) stands before a **sum over keys** that can be kept, and
# attention becomes a recurrent network.

# %%
show_source(fa.LinearState.step)

# %%
q, k, v = (x.double() for x in random_heads(300))
mask = AttentionMask(True, 300, 300)
parallel = fa.linear_core(q, k, v, mask)
state = fa.LinearState.empty(k, v)
sizes, outputs = {}, []
for t in range(300):
    one = [x[:, :, t : t + 1] for x in (q, k, v)]
    out, state = state.step(*one)
    outputs.append(out)
    sizes[t + 1] = state.nbytes

off = (torch.cat(outputs, 2) - parallel).abs().max().item()
within("recurrent and parallel differ by", off, below=1e-12)
print(f"state: {sizes[1]:,} bytes after 1 token, {sizes[300]:,} after 300")

# %% [markdown]
# The price: it is **another function**. Its weights are smoother, so it cannot pick one key out of many. Let one key
# match the query better and better:

# %%
sharpness = [0, 1, 2, 4, 8, 16]
mask, found = AttentionMask(True, 1, 64), {"softmax": [], "linear": []}
key = F.normalize(random_heads(64, 1, 1)[1], dim=-1)
value = torch.eye(64)[None, None]  # so the output shows the weights
for factor in sharpness:
    query = factor * key[:, :, 20:21] * 32**0.5  # looks for key 20
    for name, core in (("softmax", fa.sdpa_core), ("linear", fa.linear_core)):
        found[name].append(100 * core(query, key, value, mask)[0, 0, 0, 20].item())

# %%
fig, ax = figure(x="score of the right key [q·k / √width]", y="weight on the right key [%]")
for name, marker in zip(found, "os", strict=True):
    ax.plot(sharpness, found[name], marker=marker, label=name)
caption(
    fig,
    kind="measured",
    text="Softmax finds one key among 64; linear weights cannot.",
    digits=2,
)

# %% [markdown]
# ## 6 · All of it against length
# The same model as above, one text, 16 bits. With all heads kept, the cache outgrows the weights at about 26,000 tokens;
# the window and the sum do not grow.

# %%
counts = [2**p for p in range(10, 18)]
curves = {
    "multi-head": [cost.kv_cache_bytes(t, 32, 32, 128) for t in counts],
    "grouped (8)": [cost.kv_cache_bytes(t, 32, 8, 128) for t in counts],
    "latent": [cost.latent_cache_bytes(t, 32, 512, 64) for t in counts],
    "window of 1,024": [cost.kv_cache_bytes(t, 32, 32, 128, window=1024) for t in counts],
    "linear": [32 * 32 * 128 * (128 + 1) * 2 for _ in counts],
}
with torch.device("meta"):
    weights = 2 * Llama.from_preset("llama2-7b").num_parameters()

# %%
fig, ax = figure(x="length of the text [1,024 tokens]", y="its cache [GB]")
for (name, sizes), marker in zip(curves.items(), "os^Dv", strict=True):
    ax.plot([t / 1024 for t in counts], [s / 1e9 for s in sizes], marker=marker, label=name)
ax.axhline(weights / 1e9, color="black", linewidth=1, linestyle=":", label="the weights")
ax.set(xscale="log", yscale="log")
ax.set_xticks([1, 4, 16, 64, 128], [1, 4, 16, 64, 128])
ax.set_yticks([0.1, 1, 10, 100], ["0.1", "1", "10", "100"])
ax.minorticks_off()
ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
caption(fig, kind="modelled", text="Llama-2 7B's shape: 32 layers, 32 heads of 128.")

# %% [markdown]
# | Variant | Saves | Gives up |
# |---|---|---|
# | tiles | memory of training, hidden tiles | nothing: exact |
# | window, blocks | scores, cache | looking further in one layer |
# | grouped, multi-query | cache, projections | keys and values of each head's own |
# | latent | cache | ready keys: products rebuild them |
# | linear | everything that grows | picking out one key |

# %% [markdown]
# ## 7 · What breaks: the mask and the cache
# With a cache there are more keys than queries. A causal mask must then be aligned at the **end**. PyTorch's own
# `is_causal=True` aligns it at the start:

# %%
q, k, v = random_heads(9)
whole = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # 9 queries, 9 keys: right
last = F.scaled_dot_product_attention(q[:, :, -1:], k, v, is_causal=True)  # 1 query, 9 keys
ours = fa.sdpa_core(q[:, :, -1:], k, v, AttentionMask(True, 1, 9))
off = [(x - whole[:, :, -1:]).abs().max().item() for x in (last, ours)]
print(f"is_causal: last row off by {off[0]:.1f}")
within("our mask:  last row off by", off[1], below=1e-6)
first = (last - v[:, :, :1]).abs().max().item()
within("is_causal: off from just the FIRST value by", first, below=1e-6)

# %% [markdown]
# Nothing failed: text still comes out, written from one token of memory. The number that gives it away is cached
# against uncached logits. The second classic: padding that hides **rows** instead of columns.

# %%
real = torch.tensor([[True] * 6 + [False] * 3])
changed = v.clone()
changed[:, :, 6:] += 5  # only what padded tokens hold
for name, table in (("rows", real[:, None, :, None]), ("columns", real[:, None, None, :])):
    before, after = (
        F.scaled_dot_product_attention(q, k, x, attn_mask=table.expand(1, 1, 9, 9))
        for x in (v, changed)
    )
    moved = (after - before)[:, :, :6].abs().max().item()
    print(f"padding hides {name:7}: real tokens move by {moved:.1f}")

# %% [markdown]
# ## What production systems do
# Flash kernels everywhere. Llama 3 has 8 key/value heads, DeepSeek keeps latents, Mistral 7B had a window, Gemma 2 has
# windows in every other layer. FlexAttention compiles a mask, written as a function, into one kernel:

# %%
show_source(fa.flex.mask_function)

# %% [markdown]
# ## Exercises
# ### Exercise 1.2.1 (core): a window, with a cache


# %% exercise="1.2.1"
def visible(queries: int, keys: int, window: int) -> torch.Tensor:
    """Return a causal sliding-window mask, bool [queries, keys], True where the query may look.

    The queries are the LAST of the keys' positions. Each sees `window` keys at most: its own and those just before.
    """
    # BEGIN SOLUTION
    position = torch.arange(keys - queries, keys)[:, None]
    distance = position - torch.arange(keys)
    return (distance >= 0) & (distance < window)
    # END SOLUTION


# %% check="1.2.1"
check("1.2.1", visible)

# %% [markdown]
# ### Exercise 1.2.2 (core): the online softmax
# The tiles come once, one at a time. Never hold two; never let `exp` overflow.


# %% exercise="1.2.2"
def mix(tiles: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Return softmax(all scores) @ (all values), [q, k].

    `tiles` gives pairs (scores [q, c], values [c, k]); the softmax runs over the keys of all tiles together.
    """
    # BEGIN SOLUTION
    best = total = sums = None
    for scores, values in tiles:
        larger = scores.amax(-1, keepdim=True)
        if best is None:
            best, total, sums = larger, 0, 0
        larger = torch.maximum(best, larger)
        weights, shrink = (scores - larger).exp(), (best - larger).exp()
        total = total * shrink + weights.sum(-1, keepdim=True)
        sums = sums * shrink + weights @ values
        best = larger
    return sums / total
    # END SOLUTION


# %% check="1.2.2"
check("1.2.2", mix)

# %% [markdown]
# ### Exercise 1.2.3 (optional): cut a fused projection of grouped heads


# %% exercise="1.2.3"
def split_qkv(fused: torch.Tensor, heads: int, kv_heads: int) -> tuple:
    """fused [b, l, (heads + 2 * kv_heads) * k] -> query, key, value, each [b, heads, l, k].

    All queries stand first, then all keys, then all values, head by head. Query heads 0, 1, ... share the first
    key/value head, the next ones the second, and so on; repeat keys and values so that each query head has its own.
    """
    # BEGIN SOLUTION
    b, length, total = fused.shape
    k = total // (heads + 2 * kv_heads)
    parts = fused.split([heads * k, kv_heads * k, kv_heads * k], -1)
    query, key, value = (part.view(b, length, -1, k).transpose(1, 2) for part in parts)
    shared = heads // kv_heads
    return query, key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    # END SOLUTION


# %% check="1.2.3"
check("1.2.3", split_qkv)

# %% [markdown] tags=["reading"]
# ## Further reading
# - Vaswani et al. 2017, *Attention Is All You Need*, section 3.2.
# - Dao et al. 2022, *FlashAttention*, section 3; Milakov and Gimelshein 2018, *Online normalizer calculation for softmax*.
# - Shazeer 2019, *Fast Transformer Decoding*: multi-query; Ainslie et al. 2023, *GQA*: grouped queries.
# - DeepSeek-AI 2024, *DeepSeek-V2*, section 2.1: latent attention.
# - Katharopoulos et al. 2020, *Transformers are RNNs*, section 3: linear attention.
# - Child et al. 2019, *Sparse Transformers*; Zaheer et al. 2020, *Big Bird*: block patterns.
# - Dong et al. 2024, *Flex Attention*: masks as functions.
