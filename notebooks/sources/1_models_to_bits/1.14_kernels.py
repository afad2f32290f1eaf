# %% [markdown]
# **You will learn** why kernels work on tiles, and how the size of a tile decides what crosses the memory bus.

# %% tags=["setup"]
import torch
import triton.language as tl
from fmlab import meter
from fmlab.chips import chip
from fmlab.kernels import triton as ft
from fmlab.kernels.tiles import CORES, NeuronCore, library, run
from fmlab.kernels.triton import flash, matrix_product, row_softmax
from fmlab.lab import Row, Table, caption, check, compare, figure, predict, show_source, within
from fmlab.lab.engines import engines_view
from fmlab.lab.roofline import operations, roofline_figure


# %% tags=["setup"]
def normal(*shape: int, seed: int = 0, dtype=torch.float32) -> torch.Tensor:
    """Random numbers, the same on every machine."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# %% [markdown]
# ## 1 · A program makes one tile
# A chip computes only on what lies in its small on-chip memory. So a large product is cut: each **program** makes one
# tile of C and loads what it needs. In Triton, a language for kernels inside Python:

# %%
show_source(matrix_product.matmul_kernel, region="matmul")

# %% [markdown]
# On a GPU this file is compiled. Here Triton's interpreter runs it, program after program: right numbers, no speed. And
# it can count.

# %%
a, b = normal(256, 256), normal(256, 256, seed=1)
exact = a.double() @ b.double()
with ft.count_bytes() as count:
    c = ft.matmul(a, b, ft.Tile(64, 64, 32))
within("relative error", ((c - exact).norm() / exact.norm()).item(), below=1e-6)
print(count.launches[0])

# %%
guess_loads = predict(
    "A and B have 262,144 bytes each. How many bytes did the 16 programs load?", unit="B"
)
guess_loads

# %%
formula = ft.matmul_bytes(256, 256, 256, 64, 64)
compare(
    Row("loaded", yours=guess_loads, formula=formula.loaded, measured=count.loaded, unit="B"),
    Row("stored", formula=formula.stored, measured=count.stored, unit="B"),
)

# %% [markdown]
# Four columns of tiles each load all of A; four rows of tiles each load all of B. The formula is this, and no cache is
# in it:

# %%
show_source(ft.matmul_bytes)

# %%
sides = [16, 32, 64, 128]
counted = []
for side in sides:
    with ft.count_bytes() as count:
        ft.matmul(a, b, ft.Tile(side, side, 64))
    counted.append(count.total)

# %%
Table(
    {
        "tile": [f"{side} x {side}" for side in sides],
        "formula": [ft.matmul_bytes(256, 256, 256, side, side).total for side in sides],
        "counted": counted,
        "intensity": [2 * 256**3 / moved for moved in counted],
    },
    kinds={"formula": "modelled", "counted": "measured", "intensity": "measured"},
    units={"formula": "B", "counted": "B", "intensity": "FLOP/B"},
)

# %% [markdown]
# Twice the side: nearly half the traffic. With 2 bytes a number a tile of side t reaches t/2 FLOPs a byte. How large must
# it be to keep an H100 computing?

# %%
guess_side = predict(
    "The ridge of an H100 is 295 FLOP/B in bf16. Which side t?", unit="numbers"
)
guess_side

# %%
ridge = chip("h100").roofline("bf16").ridge
compare("side of the tile", yours=guess_side, formula=2 * ridge, unit="numbers")

# %%
roof = chip("h100").roofline("bf16")
points = {}
for side in (16, 64, 256):
    moved = ft.matmul_bytes(4096, 4096, 4096, side, side, itemsize=2).total
    points[f"tiles of {side}"] = (2 * 4096**3 / moved, roof.attainable(2 * 4096**3 / moved))
fig, _ = roofline_figure({"H100, bf16": roof}, points, title="A product of 4096", height=2.6)
text = "What tiles of three sides reach at most, if memory answered every load."
numbers = {f"{name} [FLOP/B]": point[0] for name, point in points.items()}
caption(fig, kind="modelled", text=text, numbers=numbers)

# %% [markdown]
# Its fp32 sums alone, 590 x 590, are 1.4 MB: more than one GPU program can hold. So tiles are smaller, and the L2 cache
# answers what several programs ask for. Our count is what they **ask**.

# %% [markdown]
# ## 2 · When it does not fit
# Registers and on-chip memory set the limit. Triton can compile for a GPU that is not there, here an H100; the machine
# code says what a tile takes.

# %%
q, k, v = (normal(1, 1, 16, 64, seed=s, dtype=torch.bfloat16) for s in range(3))
made = {}
for tile in ((64, 64), (128, 64), (128, 128)):
    with ft.count_bytes() as count:
        ft.attention(q, k, v, causal=True, tile=tile)
    made[f"{tile[0]} queries, {tile[1]} keys"] = ft.compile_for(count.launches[0], "sm_90a")

# %%
Table(
    {
        "flash attention, tile": list(made),
        "on-chip memory": [one.shared for one in made.values()],
        "registers a thread": [one.registers for one in made.values()],
        "spilled a thread": [one.spilled for one in made.values()],
    },
    kinds=dict.fromkeys(
        ("on-chip memory", "registers a thread", "spilled a thread"), "measured"
    ),
    units={"on-chip memory": "B", "registers a thread": "registers", "spilled a thread": "B"},
)

# %% [markdown]
# Compiled for 128 threads a program, each with at most 255 registers. What does not fit is **spilled** to memory and fetched again: traffic that the
# formula above does not know.

# %% [markdown]
# ## 3 · A machine where you own the memory
# A NeuronCore, a core of Trainium, has no caches that fill themselves. A kernel says what lies where: tiles in 128
# partitions of SBUF, sums in PSUM; DMA engines copy between SBUF and HBM. Our machine imitates it:

# %%
for name, core in CORES.items():
    memory = core.sbuf_partition * 128 / 2**20
    print(
        f"{name}: {core.title}, SBUF of {memory:.0f} MiB, {core.bandwidth / 1e9:.0f} GB/s from HBM"
    )

# %%
show_source(library.matmul_naive)

# %% [markdown]
# Values are computed, times are **modelled** from figures of AWS's documentation: no hardware ran. For each product this
# kernel loads both operands again.

# %%
a, b = normal(512, 1024, dtype=torch.bfloat16), normal(512, 2048, seed=1, dtype=torch.bfloat16)
naive = run(library.matmul_naive, a, b)  # a is given transposed: [k, m]
exact = a.double().T @ b.double()
within("relative error", ((naive.output - exact).norm() / exact.norm()).item(), below=3e-3)

# %%
guess_blocked = predict(
    "Tiles of C are 128 x 512. If a program makes 4 x 2 of them at once: bytes over those of one?",
    unit="x",
)
guess_blocked

# %%
blocked = run(library.matmul_blocked, a, b, rows=4, columns=2)
shape = (1024, 2048, 512)
formulas = [library.matmul_bytes(*shape), library.matmul_bytes(*shape, rows=4, columns=2)]
compare(
    Row("one tile", formula=formulas[0], measured=naive.hbm_bytes, unit="B"),
    Row("4 x 2 tiles", formula=formulas[1], measured=blocked.hbm_bytes, unit="B"),
    Row(
        "ratio",
        yours=guess_blocked,
        formula=formulas[1] / formulas[0],
        measured=blocked.hbm_bytes / naive.hbm_bytes,
        unit="x",
    ),
)

# %% [markdown]
# ## 4 · Two buffers
# Same kernel, same bytes. With one place for each operand a load waits until the tensor engine has read the last tile;
# with two, it fills the other.

# %%
guess_time = predict("How many times as fast with two buffers?", unit="x")
guess_time

# %%
single, double = (run(library.matmul_blocked, a, b, buffers=n) for n in (1, 2))
compare(
    "one buffer over two", yours=guess_time, formula=single.seconds / double.seconds, unit="x"
)

# %%
engines_view(
    {"1 buffer": single, "2 buffers": double},
    "Dotted: transfers. With one buffer, loads and products take turns.",
)

# %% [markdown]
# And what does not fit is refused, with the line that asked for it. A row of 60,000 numbers:

# %% tags=["raises-exception"]
run(library.softmax, normal(128, 60_000))

# %% [markdown]
# ## 5 · Fusing
# A softmax written as five operations reads and writes the row again and again. Fused, the row stays on the chip.

# %%
show_source(row_softmax.softmax_kernel, region="softmax")

# %%
guess_fused = predict("Bytes of five operations over bytes of the fused kernel?", unit="x")
guess_fused

# %%
x = normal(256, 1000)


def five_operations() -> torch.Tensor:
    weights = (x - x.amax(-1, keepdim=True)).exp()
    return weights / weights.sum(-1, keepdim=True)


in_steps = operations(five_operations)
with ft.count_bytes() as count:
    fused = ft.softmax(x)
within("largest difference", (fused - five_operations()).abs().max().item(), below=1e-6)

# %%
steps = sum(one.bytes for one in in_steps)
row = 256 * 1000 * 4
on_machine = run(library.softmax, x).hbm_bytes
compare(
    Row("five operations", formula=8 * row, measured=steps, unit="B"),
    Row("fused, Triton", formula=2 * row, measured=count.total, unit="B"),
    Row("fused, tile machine", formula=2 * row, measured=on_machine, unit="B"),
    Row("ratio", yours=guess_fused, formula=4, measured=steps / count.total, unit="x"),
)

# %% [markdown]
# The same holds for a norm, a bias with GELU, a loss over a vocabulary, an optimizer step: each number once, and weights
# and bias again for every row.

# %%
vocabulary = 5000
logits, targets = normal(32, vocabulary), torch.arange(32)
weight = normal(1024)
one_of = {
    "layer norm": (lambda: ft.layer_norm(x, x[0], x[1]), 4 * 256 * 1000 + 2 * 256),
    "bias + GELU": (lambda: ft.bias_gelu(x, x[0]), 3 * 256 * 1000),
    "cross-entropy": (lambda: ft.cross_entropy(logits, targets), 32 * vocabulary + 5 * 32),
    "AdamW step": (lambda: ft.adamw_step(weight, weight, weight, weight, 1), 7 * 1024),
}

# %%
moved = {}
for name, (call, _) in one_of.items():
    with ft.count_bytes() as count:
        call()
    moved[name] = count.total
formula = [4 * numbers for _, numbers in one_of.values()]
Table(
    {"kernel": list(moved), "formula": formula, "counted": list(moved.values())},
    kinds={"formula": "modelled", "counted": "measured"},
    units={"formula": "B", "counted": "B"},
)

# %% [markdown]
# ## 6 · Flash attention
# A fused attention must not hold its table of weights. It keeps three things a query: largest score, sum, mixture
# ([[#1.2]], section 3).

# %%
show_source(flash.attention_kernel, region="online softmax")

# %% [markdown]
# > "Standard attention (Algorithm 0) requires Θ(Nd + N²) HBM accesses, while FlashAttention (Algorithm 1) requires
# > Θ(N²d²M⁻¹) HBM accesses."
#
# *Dao et al. 2022, theorem 2.* M is the size of the on-chip memory.

# %%
guess_flash = predict(
    "N = 512, d = 64, tiles of 128 queries: bytes of standard over flash?", unit="x"
)
guess_flash

# %%
n, d = 512, 64
q, k, v = (normal(1, 1, n, d, seed=s).requires_grad_() for s in range(3))
with ft.count_bytes() as moved:
    out = ft.attention(q, k, v, tile=(128, 64))
scaled = q.detach() / 8  # 1 / sqrt(d)
standard = sum(one.bytes for one in operations(lambda: torch.softmax(scaled @ k.mT, -1) @ v))
flash_formula = ft.attention_bytes(n, n, d, 128, 64).total
standard_formula = ft.standard_attention_bytes(n, n, d).total
compare(
    Row("flash", formula=flash_formula, measured=moved.total, unit="B"),
    Row("standard", formula=standard_formula, measured=standard, unit="B"),
    Row("ratio", yours=guess_flash, measured=standard / moved.total, unit="x"),
)

# %% [markdown]
# Keys and values are loaded once for each tile of queries, so that traffic falls with 1 / tile; the tile grows with M / d.
# That is the theorem.

# %%
tiles, moved = (16, 32, 64, 128), {}
for size in (128, 256, 512):
    heads = [normal(1, 1, size, d, seed=s) for s in range(3)]
    moved[size] = []
    for tile in tiles:
        with ft.count_bytes() as count:
            ft.attention(*heads, tile=(tile, 64))
        moved[size].append(count.total / 1e6)

# %%
fig, ax = figure(x="queries of a tile [queries]", y="moved [MB]", title="Forward, d = 64, fp32")
for size, counted in moved.items():
    (line,) = ax.plot(tiles, counted, "o", label=f"N = {size}, counted")
    curve = [ft.attention_bytes(size, size, d, tile, 64).total / 1e6 for tile in tiles]
    ax.plot(tiles, curve, "-", color=line.get_color(), label=f"N = {size}, formula")
ax.set(xscale="log", yscale="log")
ax.set_xticks(tiles, tiles)
ax.minorticks_off()
ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
text = "Twice the tile: nearly half the bytes. The lines are the formula."
caption(fig, kind="measured", text=text)

# %% [markdown]
# Backward, the weights are made **again** from one kept number a query. How much does autograd keep?

# %%
with meter.saved_activations() as kept_flash:
    out = ft.attention(q, k, v, tile=(128, 64))
with meter.saved_activations() as kept_table:
    table = torch.softmax(q @ k.mT / 8, -1) @ v
result, weights = 4 * n * (d + 1), 4 * n * n
compare(
    Row("flash: result, a number a query", formula=result, measured=kept_flash.peak, unit="B"),
    Row("standard: the weights", formula=weights, measured=kept_table.peak, unit="B"),
)

# %%
with ft.count_bytes() as back:
    ours = torch.autograd.grad(out.square().sum(), (q, k, v))
right = torch.autograd.grad(table.square().sum(), (q, k, v))
off = max(((a - b).norm() / b.norm()).item() for a, b in zip(ours, right, strict=True))
within("gradients differ by", off, below=1e-5)
formula = ft.attention_backward_bytes(n, n, d, 128, 64).total
compare("moved by the backward pass", formula=formula, measured=back.total, unit="B")

# %% [markdown]
# ## 7 · What production systems do
# - Matrix libraries hold hundreds of tiles and choose by shape. Triton **tries**: `triton.autotune`. Ours does on a GPU:

# %%
show_source(matrix_product.fastest)

# %% [markdown]
# - FlashAttention-2 is section 6 in CUDA; PyTorch's `scaled_dot_product_attention` calls it on NVIDIA's GPUs.
# - On Trainium kernels are written in NKI, on TPUs in Pallas. Our machine's calls stand beside NKI's in
#   docs/tile-machine.md.

# %% [markdown]
# ## 8 · What breaks
# Rows rarely fill a block. Here the lanes beyond a row are loaded as 0, which is a score like any other. No error is raised.


# %%
@ft.kernel
def careless_softmax(x_ptr, y_ptr, COLUMNS, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    row = tl.program_id(0) * COLUMNS
    x = tl.load(x_ptr + row + at, mask=at < COLUMNS, other=0.0)  # should be -inf
    weights = tl.exp(x - tl.max(x, axis=0))
    tl.store(y_ptr + row + at, weights / tl.sum(weights, axis=0), mask=at < COLUMNS)


# %%
flat, wrong = torch.zeros(1, 1000), torch.empty(1, 1000)
careless_softmax[(1,)](flat, wrong, 1000, 1024)
compare(
    Row("a row's sum", formula=1.0, measured=ft.softmax(flat).sum().item(), digits=4),
    Row("careless: 1000 / 1024", formula=1000 / 1024, measured=wrong.sum().item(), digits=4),
)

# %% [markdown]
# Another trap: Triton's interpreter keeps bf16 as 16 raw bits, and would compute on those. Ours refuses.


# %% tags=["raises-exception"]
@ft.kernel
def twice(x_ptr, y_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y_ptr + at, 2 * tl.load(x_ptr + at))


half = torch.ones(16, dtype=torch.bfloat16)
twice[(1,)](half, half.clone(), 16)

# %% [markdown]
# ## Exercises
# ### Exercise 1.14.1 (core): a kernel within a byte budget
# `matmul_naive` above loads tiles again and again. Write one that never does.

# %% tags=["setup"]
from fmlab.kernels.tiles.library.shapes import length, pieces


# %% exercise="1.14.1"
def product(nc: NeuronCore, at, b):
    """Return C = A B in HBM, with every element of A, B and C crossing HBM's bus once.

    at: A transposed, [k, m], and b: [k, n], both in HBM. All of B fits in SBUF, and so do 128
    columns of `at`. Sizes need not be multiples of a tile. A tile has at most 128 partitions, a
    PSUM tile 512 columns.
    """
    # BEGIN SOLUTION
    c = nc.hbm((at.shape[1], b.shape[1]), at.dtype)
    ks = pieces(at.shape[0], 128)
    b_tiles = [nc.load(b[k]) for k in ks]
    for m in pieces(at.shape[1], 128):
        a_tiles = [nc.load(at[k, m]) for k in ks]
        for n in pieces(b.shape[1], 512):
            total = nc.psum((length(m), length(n)))
            for i in range(len(ks)):
                nc.matmul(a_tiles[i], b_tiles[i][:, n], out=total, accumulate=i > 0)
            nc.store(c[m, n], nc.copy(total, dtype=c.dtype))
    return c
    # END SOLUTION


# %% check="1.14.1"
check("1.14.1", product)

# %% [markdown]
# ### Exercise 1.14.2 (core): the online softmax, in one number
# Attention over half of the keys, and over the other half: put them together, as flash kernels that split the keys do.


# %% exercise="1.14.2"
def merge(out, logsumexp, new_out, new_logsumexp) -> tuple:
    """Return (out, logsumexp) of attention over both sets of keys.

    out, new_out [n, d]: softmax(scores) @ values over one set of keys each; logsumexp,
    new_logsumexp [n]: the log of the sum of exp(score) there. A query that saw no key of a set
    has 0 and -inf. Scores may be in the thousands.
    """
    # BEGIN SOLUTION
    both = torch.logaddexp(logsumexp, new_logsumexp)
    shift = both.masked_fill(both == -torch.inf, 0)  # of queries that saw no key at all
    old, new = (logsumexp - shift).exp(), (new_logsumexp - shift).exp()
    return old[:, None] * out + new[:, None] * new_out, both
    # END SOLUTION


# %% check="1.14.2"
check("1.14.2", merge)

# %% [markdown]
# ### Exercise 1.14.3 (optional): which tile fits?
# The best tile is not always square, nor the largest.


# %% exercise="1.14.3"
def best_tile(m: int, n: int, memory: int, itemsize: int) -> tuple[int, int]:
    """Return the sides (tile_m, tile_n) that move the fewest bytes for [m, k] x [k, n].

    Sides are powers of two from 16 to 1024. On the chip lie a tile of A (tile_m x 32), one of B
    (32 x tile_n), in `itemsize` bytes a number, and the sums (tile_m x tile_n) in 4 bytes:
    together at most `memory` bytes. Of tiles that move equally few bytes, the one with the
    fewest sums; then the smaller tile_m.
    """
    # BEGIN SOLUTION
    sides = [2**power for power in range(4, 11)]
    fits = [
        (ft.matmul_bytes(m, n, 1, tm, tn, itemsize).total, tm * tn, tm, tn)
        for tm in sides
        for tn in sides
        if 32 * (tm + tn) * itemsize + 4 * tm * tn <= memory
    ]
    return min(fits)[2:]
    # END SOLUTION


# %% check="1.14.3"
check("1.14.3", best_tile)

# %% [markdown] tags=["reading"]
# ## Further reading
# - Dao et al. 2022, *FlashAttention*, arXiv:2205.14135, section 3 and theorem 2; Dao 2023, *FlashAttention-2*,
#   arXiv:2307.08691, section 3: the order of loops used here.
# - Milakov and Gimelshein 2018, arXiv:1805.02867: the online softmax.
# - Tillet, Kung and Cox 2019, *Triton*, MAPL: programs over tiles.
# - Hong and Kung 1981, *I/O complexity: the red-blue pebble game*, STOC: no order of a product moves less than m n k over the
#   square root of M, up to a constant.
# - AWS Neuron documentation, *NKI programming model* and *Trainium architecture guide*.
# - docs/tile-machine.md: what our machine imitates, and what not.
