# %% [markdown]
# **You will learn** what a compiler does to a model's graphs, and how to count what each pass saved.

# %% tags=["setup"]
from statistics import median

import torch
import torch.nn.functional as F
from fmlab import compiler
from fmlab.compiler import CostModel, Fusion, PassManager, capture, kernels, optimize
from fmlab.compiler import graph as g
from fmlab.compiler.passes import attention
from fmlab.compiler.passes.base import GraphPass, insert, replace
from fmlab.lab import Row, Table, caption, check, compare, figure, predict, show_source, within
from fmlab.lab.graph_diff import changes, cpp, graph_diff_panel, show_change
from fmlab.lab.graph_memory import run_graph, show_plan
from fmlab.lab.written import WrittenLayer, bias_gelu, given, loss_and_gradients
from fmlab.meter import peak_memory
from fmlab.meter.machine import best_seconds

# %load_ext fmlab.lab

# %% [markdown]
# ## 1 · Two graphs
# A GPT layer as one writes it down: attention and norm step by step, three separate projections.

# %%
show_source(WrittenLayer, region="forward")

# %% [markdown]
# `capture` runs it once on tensors that have shapes and no data (chapter [[#1.12]]), and torch differentiates: a **forward**
# graph and a **backward** graph. What the second needs of the first is kept between them.

# %%
layer, inputs = given("GPT layer, written out")
x = inputs["x"]
program = capture(layer, x)
for line in g.text(program.forward.graph).splitlines()[17:25]:
    print(line[:110])

# %%
guess_nodes = predict("How many nodes have both graphs together, views included?", unit="nodes")
guess_nodes

# %%
counted = g.counts(program.forward.graph) + g.counts(program.backward.graph)
compare(
    Row("nodes", yours=guess_nodes, measured=counted.total(), unit="nodes"),
    Row(
        "matrix products",
        measured=counted["mm"] + counted["addmm"] + counted["bmm"],
        unit="nodes",
    ),
    Row("kept for the backward graph", measured=program.saved_bytes, unit="B"),
)

# %% [markdown]
# ## 2 · Patterns
# Two products with a softmax between them **are** attention. The compiler looks for exactly that, before
# differentiation: torch then differentiates the one operator. (A compiler works in **passes**: each takes a graph and
# gives a better one.)

# %%
show_source(attention, region="pattern")

# %%
graph_diff_panel()

# %% [markdown]
# Bytes are those that each operator reads and writes, as if no cache kept any. The table of scores is no longer written.
# Move the panel to the next pass: our norm, nine operators, is a pattern too.

# %%
steps = changes(layer, x)
show_change(steps[1], most=13)

# %% [markdown]
# A pattern may match and still be **illegal**. Here somebody else reads the weights of attention, which the one operator
# never gives:


# %%
def watched(q, k, v):
    weights = (q @ k.transpose(-2, -1) * 0.125).softmax(-1)
    return weights @ v, weights.amax()


heads = [torch.randn(2, 4, 32, 64, requires_grad=True) for _ in range(3)]
watching = compiler.compile(watched, *heads)
print(watching.program.reports[0][1])

# %% [markdown]
# ## 3 · Cleaning up
# People and autograd leave waste: factors of 1, orders of dims that cancel, the same thing twice.


# %%
def wasteful(x, y):
    scaled = (x * 1 / 8).t().relu().t()
    return scaled.exp() + scaled.exp() * (y + 0) + torch.arange(64.0).exp()


small = torch.randn(64, 64)
cleaned = capture(wasteful, small, small, backward=False)
for one in PassManager(compiler.default_passes()).steps(cleaned.graphs):
    print(one)

# %% [markdown]
# `y + 0` stays, as it makes 0.0 of -0.0. A rewrite here gives the **same bits**, or its claim says what it rounds.

# %%
guess_clean = predict("What share of the layer's bytes will cleaning up save?", unit="%")
guess_clean

# %%
names, nodes, moved = ["2 norms"], [sum(len(s.before) for s in steps[2:4])], []
moved.append(sum(s.report.bytes_before for s in steps[2:4]))
for number, pair in enumerate(zip(steps[2::2], steps[3::2], strict=True), 3):
    names.append(f"{number} {pair[0].made_by}")  # a pass, on the forward and the backward graph
    nodes.append(sum(len(one.after) for one in pair))
    moved.append(sum(one.report.bytes_after for one in pair))
Table(
    {"after pass": names, "nodes": nodes, "read and written": moved},
    kinds={"nodes": "measured", "read and written": "measured"},
    units={"read and written": "B"},
)

# %%
saved = 1 - moved[names.index("8 dead code")] / moved[0]
compare("saved by cleaning up", yours=guess_clean, measured=100 * saved, unit="%", digits=2)

# %% [markdown]
# Views went, and views move nothing: torch's own tracing leaves little waste. Splitting a bias even **adds** bytes,
# which fusion must win back. Step through it all in the panel above.

# %% [markdown]
# ## 4 · Fusion: what is legal
# A **group** runs as one kernel that reads and writes its memory once. A node may join the groups of what it reads:

# %%
show_source(compiler.fusion.fuse.Groups.add)

# %% [markdown]
# Same rows and columns; elementwise, or a sum over a row; and no **circle**. Here the sum needs `exp` twice: directly,
# and by way of a product that no group can hold.


# %%
def circle(x, w):
    y = x.exp()
    return y * 2 + y @ w


around = capture(circle, small, small, backward=False)
print(Fusion().run(around.forward.graph))

# %% [markdown]
# ## 5 · Fusion: what it saves
# Inside a group nothing is read again, and what nobody outside reads is not written. The cost model counts that:

# %%
show_source(CostModel.saved)

# %% [markdown]
# Bias and GELU of the MLP, [256, 1024] in fp32. Two operators against one kernel, in **inference**: nobody else reads
# the sum.

# %%
guess_gelu = predict("Bytes of the two operators over those of the one kernel?", unit="x")
guess_gelu


# %%
def fused(backward: bool):
    passes = PassManager(compiler.fusing_passes())
    made = capture(layer, x, backward=backward, rewrites=passes.source)
    optimize(made, passes)
    return made


def bias_gelu_group(made):
    graph = made.forward.graph
    call = next(
        n
        for n in graph.nodes
        if n.target in kernels(graph) and n.target.members == ["add", "gelu"]
    )
    return call.target, g.nbytes(call) + sum(map(g.nbytes, call.all_input_nodes))


# %%
serving, training = fused(backward=False), fused(backward=True)
wide, bias = 256 * 1024 * 4, 1024 * 4
(pair, served), (_, trained) = bias_gelu_group(serving), bias_gelu_group(training)
alone = g.moved_bytes(pair.graph)
compare(
    Row("two operators", formula=4 * wide + bias, measured=alone, unit="B"),
    Row("one kernel, inference", formula=2 * wide + bias, measured=served, unit="B"),
    Row("ratio", yours=guess_gelu, formula=2, measured=alone / served, unit="x"),
    Row("one kernel, training", formula=2 * wide + bias, measured=trained, unit="B"),
)

# %%
show_change(steps[-1], "Fusion, backward graph: sums over rows join what makes them.", most=14)

# %% [markdown]
# In training the sum has a **second reader**, the backward pass. It is handed the **product** instead and adds the bias
# again, in registers, so the sum is never written. What did fusion save?

# %%
choices = {
    "as captured": [],
    "patterns and cleaning": compiler.default_passes(),
    "cleaning and fusion": [*compiler.default_passes()[2:], Fusion()],
    "all, no split bias": [*compiler.default_passes(), Fusion()],
    "all": [*compiler.default_passes(), compiler.SplitBias(), Fusion()],
}
programs = {}
for name, passes in choices.items():
    programs[name] = capture(layer, x, rewrites=PassManager(passes).source)
    optimize(programs[name], PassManager(passes))
moved = {
    name: [g.moved_bytes(graph) for graph in one.graphs.values()]
    for name, one in programs.items()
}

# %%
ran = {
    name: [run_graph(module) for module in (one.forward, one.backward)]
    for name, one in programs.items()
}
all_bytes = {name: sum(each) for name, each in moved.items()}
Table(
    {
        "passes": list(moved),
        "predicted": list(all_bytes.values()),
        "counted": [sum(each.moved for each in pair) for pair in ran.values()],
        "saved": [f"{1 - n / all_bytes['as captured']:.0%}" for n in all_bytes.values()],
    },
    kinds={"predicted": "modelled", "counted": "measured"},
    units=dict.fromkeys(("predicted", "counted"), "B"),
)

# %% [markdown]
# Counted from the tensors that each operator was given. Patterns save most; fusion alone finds half of that. Splitting
# the bias reads it once more, and saves what no count shows: `addmm` first spreads it over its result.

# %% [markdown]
# ## 6 · A kernel, generated
# A fused group becomes a loop over rows in C++, built by the system's compiler:

# %% tags=["timing"]
print(cpp(bias_gelu_group(training)[0]))

# %% [markdown]
# A row of the product and the bias are read and the GELU is written; between them everything stays in registers.
# Without a C++ compiler groups run torch's operators instead.

# %%
fast = compiler.compile(layer, x, passes=compiler.fusing_passes())
made = [kernel for graph in fast.program.graphs.values() for kernel in kernels(graph)]
refused = [why for _, one in fast.program.reports if one.name == "C++" for why in one.refused]
print(f"{len(made)} groups, all in C++: {all(kernel.code for kernel in made)}", *refused[:1])


# %%
(loss, gradient), (eager_loss, eager) = (loss_and_gradients(one, x) for one in (fast, layer))
within("loss, relative error", abs(loss / eager_loss - 1), below=1e-6)
worst = (gradient - eager).abs().max() / eager.abs().max()
within("every gradient, relative to the largest", worst.item(), below=1e-5)

# %% tags=["timing"]
product, row = torch.randn(256, 1024), torch.randn(1024)
ours = bias_gelu_group(fast.program)[0]
ratios = {}  # of times measured in pairs, so that other work on the machine slows both
for name, eagerly, compiled in (
    ("add, then GELU", lambda: F.gelu(product + row), lambda: ours(product, row)),
    ("a step", lambda: loss_and_gradients(layer, x), lambda: loss_and_gradients(fast, x)),
):
    pairs = [best_seconds(eagerly, 1) / best_seconds(compiled, 1) for _ in range(15)]
    ratios[name] = median(pairs)
Table(
    {"call": list(ratios), "eager over compiled": list(ratios.values())},
    kinds={"eager over compiled": "measured"},
    units={"eager over compiled": "x"},
    noisy=["eager over compiled"],
)

# %% [markdown]
# ## 7 · Memory: who is alive?
# A tensor lives from the node that makes it to the last that reads it or a view of it. Two that never meet may share
# their place.

# %%
guess_block = predict(
    "The backward graph makes 31 tensors, 8.4 MB in all. How large a block holds them?",
    unit="MB",
)
guess_block

# %%
tidy = programs["patterns and cleaning"]
plan = compiler.plan_memory(tidy.backward.graph)
peak = run_graph(tidy.backward).peak
show_plan(plan, peak, "Each box is a tensor, as long as it lives; gradients live to the end.")

# %%
compare(
    Row("without reuse", measured=plan.total / 1e6, unit="MB"),
    Row("block", yours=guess_block, formula=plan.block / 1e6, unit="MB"),
    Row("most alive at once", formula=plan.peak / 1e6, measured=peak / 1e6, unit="MB"),
)

# %% [markdown]
# No plan can do with less than what is alive at once, and here the plan needs no more. It was made from shapes, before
# anything ran, and the run agrees to the byte. A whole training step:

# %%
peaks = {}
for name, model in {"eager": layer, "compiled": fast}.items():
    layer.zero_grad()
    with peak_memory() as memory:
        model(x).square().sum().backward()
    peaks[name] = memory.peak / 1e6
compare(*(Row(f"peak, {name}", measured=peak, unit="MB") for name, peak in peaks.items()))

# %% [markdown]
# Part of that is the last pass of `compile`: a fused group may write over what it reads, if nobody reads that
# afterwards. Forget one reader, and the backward pass computes with other numbers.

# %% [markdown]
# ## 8 · Recompute, as a pass
# Between the two graphs 3.9 MB are kept. What a graph can compute again from its inputs, it need not keep. Which first?
# Greedily, what frees most bytes for an operation:

# %%
show_source(compiler.recompute)

# %%
kept = {}
for share in (1.0, 0.75, 0.5, 0.0):
    one = tidy.copy()
    kept[share] = compiler.recompute(one, int(share * one.saved_bytes))
same = loss_and_gradients(compiler.Compiled(one), x)[1]
worst = (same - eager).abs().max() / eager.abs().max()
within("every gradient, with nothing kept", worst.item(), below=1e-5)

# %%
from fmlab.compiler.memory.recompute import operations

forward = sum(operations(node) for node in tidy.forward.graph.nodes)
Table(
    {
        "budget": [f"{share:.0%}" for share in kept],
        "kept": [one.bytes_after for one in kept.values()],
        "computed again": [one.flops / forward for one in kept.values()],
    },
    kinds={"kept": "measured", "computed again": "measured"},
    units={"kept": "B", "computed again": "forward passes"},
)

# %% [markdown]
# The first quarter costs almost nothing: a GELU. Then products are done again, and attention. With nothing kept, the whole
# layer is, but for its last product: no gradient needs that. With dropout, its masks would have to stay.

# %% [markdown]
# ## 9 · Overlap, as a pass
# Two layers, each rank with its own rows: every gradient must be summed over ranks. A pass puts that in, as two nodes:
# a **start** and a **wait**.


# %%
two = torch.nn.Sequential(layer, given("GPT layer, written out")[0])
passes = PassManager([*compiler.default_passes(), compiler.InsertGradientSums("ranks")])
summed = capture(two, x, rewrites=passes.source)
optimize(summed, passes)


def backward_of(*more):
    made = summed.copy()
    optimize(made, PassManager(more))
    return made.backward.graph


assumed = dict(
    flops_rate=1e11, bandwidth=1e9, latency=200e-6
)  # a rank's FLOP/s, bytes/s, seconds a message
plain = compiler.overlap_timeline(backward_of(), **assumed)
print(plain)

# %% [markdown]
# Each wait stands right behind its start: nothing is hidden. A second pass moves starts up and waits down.

# %%
guess_exposed = predict(
    "How much of the communication is still exposed, if only nodes are moved?", unit="%"
)
guess_exposed

# %%
moved_only = compiler.overlap_timeline(backward_of(compiler.Overlap()), **assumed)
share = 100 * moved_only.exposed / moved_only.communication
compare("exposed", yours=guess_exposed, formula=share, unit="%", digits=2)

# %%
fig, ax = figure(x="time [ms]", y="stream", height=2.2)
for place, line in enumerate((plain, moved_only)):
    for span in line.spans:
        if span.stream != "exposed":
            y = 2 * place + (span.stream == "communication")
            look = {"color": "#0072B2"} if y % 2 == 0 else {"color": "#009E73", "hatch": "////"}
            ax.barh(
                y, 1e3 * span.seconds, left=1e3 * span.begin, edgecolor="white", lw=0.3, **look
            )
ax.set_yticks(range(4), ["as inserted: computes", "sends", "overlapped: computes", "sends"])
ax.invert_yaxis()
numbers = {"seconds [ms]": [1e3 * plain.seconds, 1e3 * moved_only.seconds]}
caption(fig, kind="modelled", text="The same nodes in another order.", numbers=numbers)

# %% [markdown]
# Thirty-two messages, each with its latency. Larger **buckets** are fewer messages, and the last one starts later:

# %%
show_source(compiler.Bucket._plan)

# %%
lines = {"a message each": moved_only}
for name, size in {"0.1 MB": 1e5, "1 MB": 1e6, "one for all": 1e9}.items():
    order = backward_of(compiler.Bucket(size), compiler.Overlap())
    lines[name] = compiler.overlap_timeline(order, **assumed)
times = ("communication", "exposed", "seconds")
Table(
    {"bucket": list(lines)}
    | {what: [1e3 * getattr(line, what) for line in lines.values()] for what in times},
    kinds=dict.fromkeys(times, "modelled"),
    units=dict.fromkeys(times, "ms"),
)

# %% [markdown]
# Times are modelled; that gradients stay right is measured. Two real ranks, one row each, against one process with
# both rows:

# %%
# %%ranks 2
import torch.distributed as dist
from fmlab import compiler
from fmlab.lab import within
from fmlab.lab.written import given, loss_and_gradients

layer, inputs = given("GPT layer, written out")
x = inputs["x"]
mine = x[rank : rank + 1]
sums = [compiler.InsertGradientSums(dist.group.WORLD), compiler.Bucket(1e6), compiler.Overlap()]
ours = compiler.compile(layer, mine, passes=[*compiler.default_passes(), *sums])
both, summed = loss_and_gradients(layer, x)[1], loss_and_gradients(ours, mine)[1]
if rank == 0:
    off = (summed - both).abs().max() / both.abs().max()
    within("every gradient, relative to the largest", off.item(), below=1e-5)

# %% [markdown]
# ## 10 · What production systems do
# - `torch.compile`: the same two graphs. Inductor scores pairs to fuse by kind, by **bytes saved**, by distance
#   (`torch/_inductor/choices.py`, `score_fusion`), and has patterns for attention (`fx_passes/fuse_attention.py`).

# %% [markdown]
# - XLA fuses too: chapter [[#1.11]] counts its groups. Its latency-hiding scheduler moves starts and waits.
# - torch's partitioner keeps what a minimum cut says. Ask it, for the layer as written:

# %%
cut = capture(layer, x, partition="min-cut")
names = ("default", "min-cut")
Table(
    {
        "partition": names,
        "kept": [program.saved_bytes, cut.saved_bytes],
        "backward graph": [g.counts(one.backward.graph).total() for one in (program, cut)],
    },
    kinds={"kept": "measured", "backward graph": "measured"},
    units={"kept": "B", "backward graph": "nodes"},
)

# %% [markdown]
# ## 11 · What breaks
# Two dropouts of one tensor look like the same thing twice. A careless pass joins what **reads** alike:


# %%
class Careless(GraphPass):
    name = "careless"

    def apply(self, graph, report):
        first = {}
        for node in list(graph.nodes):
            if node.op == "call_function":
                key = node.target, str(node.args), str(node.kwargs)
                if first.setdefault(key, node) is not node:
                    replace(node, first[key])


def noisy(x):
    return F.dropout(x, 0.5) + F.dropout(x, 0.5)


# %%
shares = {}
for one in (compiler.CommonSubexpressions(), Careless()):
    torch.manual_seed(0)
    twice = compiler.compile(noisy, torch.ones(1000, 1000), passes=[one], backward=False)
    out = twice(torch.ones(1000, 1000))
    shares[one.name] = [(out == value).float().mean().item() for value in (0, 2, 4)]
Table(
    {
        "result": ["0: both dropped", "2: one of them", "4: none"],
        "should be": [0.25, 0.5, 0.25],
        **shares,
    },
    kinds={"should be": "modelled", **dict.fromkeys(shares, "measured")},
    digits=2,
)

# %% [markdown]
# No error, the same shape, the same mean. The number that gives it away: **never** one of them alone, and so twice the
# variance. Ours asks `is_pure` first.

# %% [markdown]
# ## Exercises
# ### Exercise 1.13.1 (core): a fusion rule that knows when to stop
# `gelu(x + bias)` becomes one operator, `bias_gelu`, but not where that would be wrong, or no gain. Tools:
# `insert(before, target, *args, **keywords)` makes a node and `replace(old, new)` puts it in place of another;
# `node.users`, `g.shape(node)`, `graph.erase_node(node)`.

# %% tags=["setup"]
from torch.fx import Graph, Node

aten = torch.ops.aten  # and print(g.text(graph)) shows a graph


# %% exercise="1.13.1"
def fuse_bias_gelu(graph: Graph) -> int:
    """Replace each gelu(x + bias) by bias_gelu(x, bias, **keywords of the GELU); return how many.

    x [..., d], bias [d] on either side of the +, without a factor (keyword alpha). The nodes are
    aten.add.Tensor(a, b) and aten.gelu.default(sum). Leave a sum alone that anybody else reads.
    The old nodes go.
    """
    # BEGIN SOLUTION
    made = 0
    for gelu in list(graph.nodes):
        total = gelu.args[0] if gelu.target is aten.gelu.default else None
        if total is None or total.target is not aten.add.Tensor:
            continue
        if total.kwargs or len(total.users) > 1:
            continue
        for x, bias in (total.args, total.args[::-1]):
            nodes = isinstance(x, Node) and isinstance(bias, Node)
            if nodes and g.shape(bias) == g.shape(x)[-1:]:
                replace(gelu, insert(gelu, bias_gelu, x, bias, **gelu.kwargs))
                graph.erase_node(total)
                made += 1
                break
    return made
    # END SOLUTION


# %% check="1.13.1"
check("1.13.1", fuse_bias_gelu)

# %% [markdown]
# ### Exercise 1.13.2 (core): a block within a byte budget
# Section 7 without our planner. No two tensors that are alive at one step may overlap, and the block must be small.


# %% exercise="1.13.2"
def place(tensors: list[tuple[int, int, int]]) -> list[int]:
    """Return the offset of each tensor in one block, in bytes from 0, in the order given.

    tensors: (bytes, birth, death): alive at the steps from birth to death, both included. The
    budget of each program is what this reaches: largest first, each at the lowest offset where
    it fits beside those it meets.
    """
    # BEGIN SOLUTION
    offsets = {}
    for i in sorted(range(len(tensors)), key=lambda i: -tensors[i][0]):
        size, birth, death = tensors[i]
        meets = [j for j in offsets if tensors[j][1] <= death and birth <= tensors[j][2]]
        offset = 0
        for j in sorted(meets, key=offsets.get):
            if offset + size <= offsets[j]:
                break
            offset = max(offset, offsets[j] + tensors[j][0])
        offsets[i] = offset
    return [offsets[i] for i in range(len(tensors))]
    # END SOLUTION


# %% check="1.13.2"
check("1.13.2", place)

# %% [markdown]
# ### Exercise 1.13.3 (optional): start early, wait late
# Section 9's second pass, on a list.


# %% exercise="1.13.3"
def overlap(program: list[tuple[str, str, list[str]]]) -> list[str]:
    """Return the names in an order that hides each message behind the most computations.

    program: (name, kind, names that it reads), in a legal order. kind: "compute", "start" (sends
    what it reads, which are computations) or "wait" (reads its start). Everything stands behind
    what it reads; computations keep their order among themselves.
    """
    # BEGIN SOLUTION
    order = [name for name, kind, _ in program if kind == "compute"]
    reads = {name: needed for name, _, needed in program}
    for name, kind, _ in program:
        if kind == "wait":
            first = next((other for other in order if name in reads.get(other, ())), None)
            order.insert(len(order) if first is None else order.index(first), name)
    for name, kind, needed in program:
        if kind == "start":
            order.insert(max((order.index(one) + 1 for one in needed), default=0), name)
    return order
    # END SOLUTION


# %% check="1.13.3"
check("1.13.3", overlap)

# %% [markdown] tags=["reading"]
# ## Further reading
# - J. Ansel et al., *PyTorch 2*, ASPLOS 2024, section 4: Inductor's loop-level IR, fusion and code generation.
# - Y. Pisarchyk and J. Lee, *Efficient memory management for deep neural net inference*, 2020, arXiv:2001.03288,
#   section 5: plans of memory.
# - T. Chen et al., *Training deep nets with sublinear memory cost*, 2016, arXiv:1604.06174, section 4: recompute.
# - S. Li et al., *PyTorch Distributed*, VLDB 2020, arXiv:2006.15704, section 3.2: buckets and overlap.
# - T. Dao et al., *FlashAttention*, 2022, arXiv:2205.14135, section 3: why the pattern of section 2 is worth it.
