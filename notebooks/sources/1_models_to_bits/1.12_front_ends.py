# Five front ends on one block. TensorFlow, JAX and torch_xla run in processes of their own environments where those are
# there (make lab-frontends, make lab-xla); elsewhere their committed captures stand in.

# %% [markdown]
# **You will learn** what a framework sees of your model before anything runs, and how each says "two devices".

# %% tags=["setup"]
import logging
from contextlib import redirect_stderr
from io import StringIO

import torch
from fmlab.frontends import in_jax, in_tensorflow, in_torch, in_xla
from fmlab.lab import Row, Table, check, compare, front_ends, predict, show_source, within
from torch import fx

# %load_ext fmlab.lab
logging.disable(logging.WARNING)  # what torch.export notes on its way to an error

# %% [markdown]
# ## 1 · One block
# One GPT layer, written out, small: 4 rows, 8 tokens, 32 wide. Everything below sees these few lines, or the same in its
# own words.

# %%
show_source(in_torch, region="block")

# %% [markdown]
# ## 2 · Run it with a stand-in
# `torch.fx` calls forward once with a **proxy**. Each call on the proxy becomes a node, and the nodes become code again:

# %%
show_source(in_torch, region="fx")

# %%
traced = in_torch.by_fx()
print(traced.code.strip())

# %% [markdown]
# A proxy has no numbers and no sizes. So a question that Python must answer now cannot be asked:


# %%
def long_only(x):
    return x * 2 if x.shape[0] > 4 else x


def positive_only(x):
    return x * 2 if x.sum() > 0 else x


def first_line(error):
    return str(error).strip().splitlines()[0][:95]


for function in (long_only, positive_only):
    try:
        fx.symbolic_trace(function)
    except fx.proxy.TraceError as error:
        print(f"{function.__name__}: {first_line(error)}")

# %% [markdown]
# ## 3 · Run it with shapes
# `torch.export` runs forward on tensors that have shapes and no data. Nodes are operators of ATen, PyTorch's own
# library.

# %%
show_source(in_torch, region="export")


# %%
class Module(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.forward = function


for function in (long_only, positive_only):
    try:
        with redirect_stderr(StringIO()):  # where torch prints the graph as far as it came
            kept = torch.export.export(Module(function), (torch.ones(8, 3),))
        print(f"{function.__name__}: exported, {len(kept.graph.nodes)} nodes")
    except Exception as error:
        print(f"{function.__name__}: {type(error).__name__}")

# %% [markdown]
# The first question is answered by the shape, once: the program is now **for 8 rows**, and says so when it is given
# others. The second needs data: that is an error, at capture.

# %%
try:
    torch.export.export(Module(long_only), (torch.ones(8, 3),)).module()(torch.ones(2, 3))
except Exception as error:
    print(first_line(error))

# %% [markdown]
# ## 4 · Run it and only take notes
# torch_xla notes operations down until a result is asked for (chapter [[#1.11]]). TensorFlow and JAX trace a function of
# their own. Their blocks:

# %%
show_source(in_jax, region="block")

# %%
show_source(in_tensorflow, region="block")

# %%
guess = predict("The same block: how many operations will JAX note down?", unit="operations")
guess

# %% [markdown]
# torch_xla, TensorFlow and JAX run in environments of their own (`make lab-xla`, `make lab-frontends`). Where one is
# missing, its stored answer is taken; the list below says which.

# %%
seen = front_ends.see()

# %% tags=["timing"]
for one in seen.values():
    versions = ", ".join(f"{name} {version}" for name, version in one.versions.items())
    print(f"{one.name}: {versions}; {one.source}")

# %%
columns = {"operations": [sum(one.graph.counts.values()) for one in seen.values()]}
for kind in (*front_ends.KINDS, "element by element"):
    columns[kind] = [front_ends.kinds(one.graph)[kind] for one in seen.values()]
shapes = [f"{one.graph.known_shapes:.0%}" for one in seen.values()]
Table(
    {"front end": list(seen), "shapes known": shapes, **columns},
    kinds=dict.fromkeys(columns, "measured"),
)

# %%
worst = max(one.output_error for one in seen.values())
within("largest difference of an output", worst, below=3e-6)
noted = sum(seen["jax"].graph.counts.values())
compare(Row("JAX", yours=guess, measured=noted, unit="operations"))

# %% [markdown]
# All have **six matrix products**. What differs is how small the other operations are: one `layer_norm`, or a mean, a
# variance, a root and their broadcasts. A compiler (chapter [[#1.13]]) must put them together again.

# %%
front_ends.draw(seen)
# %%
print("\n".join(seen["jax"].text.splitlines()[-12:-4]))
print("...")
print("\n".join(seen["tensorflow"].text.splitlines()[15:19]))

# %% [markdown]
# ## 5 · Two devices, five ways to say it
# One step on half the rows each. **Wrapping** (DDP): your module goes into another one. **Placement** (DTensor): tensors
# say where they lie, operators follow.

# %%
show_source(in_torch, region="step")

# %% [markdown]
# JAX: the program is the one for **one** device; arrays are placed, and the compiler (GSPMD) inserts what is sent.
# torch_xla marks tensors in the same way.

# %%
show_source(in_jax, region="step")

# %%
show_source(in_xla, region="step")

# %% [markdown]
# TensorFlow: variables made in a strategy's scope are mirrored, and its `run` calls your function on each device.

# %%
show_source(in_tensorflow, region="step")

# %%
guess_messages = predict(
    "Twelve weights have gradients. How many all-reduces does JAX's compiled step contain?",
    unit="all-reduces",
)
guess_messages

# %%
# %%ranks 2
for how in ("wrap", "place"):
    error = front_ends.error_of_step(in_torch.data_parallel_step(how))
    if rank == 0:
        within(f"{how}: error of a weight, as a share of its change", error, below=1e-4)

# %%
for name, one in seen.items():
    if one.step_error is not None:
        within(f"{name}: the same", one.step_error, below=1e-4)
compare(
    Row("JAX", yours=guess_messages, measured=seen["jax"].collectives, unit="all-reduces"),
    Row("torch_xla", measured=seen["xla"].collectives, unit="all-reduces"),
    Row(
        "TensorFlow, on each device",
        measured=seen["tensorflow"].collectives // 2,
        unit="all-reduces",
    ),
)

# %% [markdown]
# Five statements, one result. JAX's compiler and TensorFlow's strategy put the twelve gradients into one message;
# torch_xla, told here to compile quickly, sends each alone; DDP fills buckets (chapter [[#2.2]]).

# %% [markdown]
# ## 6 · What breaks
# Write the step with DTensor and torch's own `F.mse_loss`, the obvious way. The loss is right:

# %%
# %%ranks 2 -o placed
from fmlab.lab.front_ends import placed_loss

[[round(value, 5) for value in placed_loss(own)] for own in (True, False)]

# %%
(loss, gradient), (torch_loss, torch_gradient) = placed[0]
compare(
    Row("loss, torch's over ours", formula=1, measured=torch_loss / loss, unit="x", digits=3),
    Row(
        "gradient, torch's over ours",
        formula=1,
        measured=torch_gradient / gradient,
        unit="x",
        digits=3,
    ),
)

# %% [markdown]
# **Twice too large, without a word** (torch 2.13): the backward pass of `mse_loss` divides by the elements of a rank, not
# of the whole. A parity check sees it at once; a loss curve does not.

# %% [markdown]
# ## 7 · Exercises
# ### Exercise 1.12.1 (core): propagate a placement
# GSPMD and DTensor are built on rules like this one, for x [n,k] @ w [k,m].


# %% exercise="1.12.1"
def propagate(x: str, w: str) -> str:
    """Return how the result of x @ w lies on the devices if each multiplies what it holds.

    Placements of a matrix: "rows", "columns" (divided along that dim), "whole" (on every
    device), and of a result also "partial": each device holds a summand. Return "must move"
    where devices do not hold matching parts, so that something must be sent before.
    """
    # BEGIN SOLUTION
    rules = {
        ("whole", "whole"): "whole",
        ("rows", "whole"): "rows",
        ("whole", "columns"): "columns",
        ("columns", "rows"): "partial",
    }
    return rules.get((x, w), "must move")
    # END SOLUTION


# %% check="1.12.1"
check("1.12.1", propagate)

# %% [markdown]
# ### Exercise 1.12.2 (core): a branch that can be captured
# Write it so that every front end captures it, for any data. Mind the gradient at 0 and below.


# %% exercise="1.12.2"
def safe_root(x: torch.Tensor) -> torch.Tensor:
    """Return the square root of each element above 0 and 0 for the others, in the shape of x.

    No Python branch on data and no shape that depends on data. The gradient is 1 / (2 sqrt(x))
    above 0 and 0 elsewhere, never NaN or infinite.
    """
    # BEGIN SOLUTION
    positive = x > 0
    return torch.where(positive, torch.where(positive, x, 1.0).sqrt(), 0.0)
    # END SOLUTION


# %% check="1.12.2"
check("1.12.2", safe_root)

# %% [markdown]
# ### Exercise 1.12.3 (optional): a mean over unequal devices
# The last batch is seldom full. What must a strategy do with the devices' mean losses?


# %% exercise="1.12.3"
def whole_mean(means: list[float], rows: list[int]) -> float:
    """Return the mean over all rows, from each device's own mean and its number of rows.

    A device without rows has NaN for a mean. With no rows at all the result is 0.
    """
    # BEGIN SOLUTION
    pairs = [(mean, count) for mean, count in zip(means, rows, strict=True) if count]
    total = sum(count for _, count in pairs)
    return sum(mean * count for mean, count in pairs) / total if total else 0.0
    # END SOLUTION


# %% check="1.12.3"
check("1.12.3", whole_mean)

# %% [markdown] tags=["reading"]
# ## Further reading
# - J. Reed et al., *torch.fx*, 2021, arXiv:2112.08429, sections 3-5: symbolic tracing, its IR and its limits.
# - R. Frostig, M. Johnson, C. Leary, *Compiling machine learning programs via high-level tracing*, SysML 2018: JAX.
# - M. Abadi et al., *TensorFlow: A System for Large-Scale Machine Learning*, OSDI 2016, section 3: the graph.
# - A. Suhan et al., *LazyTensor*, 2021, arXiv:2102.13267, section 3: notes instead of results.
# - Y. Xu et al., *GSPMD*, 2021, arXiv:2105.04663, section 3: annotate some tensors, propagate the rest.
