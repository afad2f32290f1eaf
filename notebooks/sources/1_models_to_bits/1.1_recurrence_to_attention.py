# %% [markdown]
# **You will learn** what attention gives that recurrence and convolution do not, by measuring all three on the same task.

# %% tags=["setup"]
import torch
from fmlab.lab import (
    Row,
    Table,
    caption,
    check,
    compare,
    figure,
    predict,
    progress,
    show_source,
    within,
)
from torch import nn

LETTERS = 16  # of the texts to be copied

# %% tags=["setup"]
import fmlab.models.recurrent
from fmlab import meter
from fmlab.data.published import model_growth, moores_law
from fmlab.models import GPT, CausalConvLM, RecurrentLM
from fmlab.models.recurrent import Recurrent

torch.set_num_threads(1)  # so small a model loses more to a second thread than it gains

# %% tags=["setup"]
FAMILIES = {
    "RNN": "rnn-tiny",
    "LSTM": "lstm-tiny",
    "convolution": "conv-tiny",
    "attention": "gpt2-tiny",
}
CLASSES = {"rnn": RecurrentLM, "lstm": RecurrentLM, "conv": CausalConvLM, "gpt2": GPT}


def build(family: str, **overrides):
    """A small model of a family, with the same random weights at each call."""
    torch.manual_seed(0)
    preset = FAMILIES[family]
    return CLASSES[preset.split("-")[0]].from_preset(preset, **overrides)


# %% [markdown]
# ## 1 · A network that reads one token at a time
# A **recurrent** network carries a memory along the text. Each step reads a token and the memory, and writes the
# memory. (Letters behind a name are its shape: `x_bli` has b rows of l tokens, i numbers each.)

# %%
show_source(fmlab.models.recurrent, region="unroll")

# %% [markdown]
# The LSTM guards its memory: a gate `f` near 1 keeps the old value, and its gradient, almost unchanged.

# %%
show_source(fmlab.models.recurrent, region="lstm")

# %% [markdown]
# Ours is PyTorch's, number for number: we copy the weights over and compare.

# %%
torch.manual_seed(0)
ours, theirs = Recurrent("lstm", 5, 7), nn.LSTM(5, 7, batch_first=True)
with torch.no_grad():
    for name, weight in ours.cells[0][0].named_parameters():
        theirs.get_parameter(f"{name}_l0").copy_(weight)
x = torch.randn(3, 9, 5)
within("largest difference", (ours(x)[0] - theirs(x)[0]).abs().max().item(), below=1e-6)

# %% [markdown]
# ## 2 · Who must wait?
# A chip works fast when it may do many things at once. What counts is the **longest chain** of operations of which each
# needs the one before.

# %%
guess_depth = predict(
    "A text grows from 32 to 128 tokens. How many times longer is the LSTM's chain?", unit="x"
)
guess_depth

# %%
lengths = [16, 32, 64, 128]
depth = {}
for family in FAMILIES:
    model = build(family, vocab_size=64)
    depth[family] = [
        meter.graph_depth(model(torch.zeros(1, n, dtype=torch.long)).logits) for n in lengths
    ]
Table({"operations in a chain": depth, **{f"{n} tokens": [d[i] for d in depth.values()] for i, n in enumerate(lengths)}},
      kinds={f"{n} tokens": "measured" for n in lengths})  # fmt: skip

# %%
compare(
    Row("LSTM", yours=guess_depth, formula=128 / 32, measured=depth["LSTM"][3] / depth["LSTM"][1], unit="x", digits=2),
    Row("attention", formula=1, measured=depth["attention"][3] / depth["attention"][1], unit="x"),
)  # fmt: skip

# %% [markdown]
# The recurrent chain grows with the text; no second processor shortens it. Convolution and attention treat all positions at
# once: their chain is as long as the network is deep.

# %% [markdown]
# ## 3 · Who reaches how far?
# The output at the last token depends on the first one only if something carries it there. How strongly? We measure the
# **gradient** of the last output with respect to each input, in fresh networks.


# %% tags=["setup"]
def reach(model, length: int = 128) -> list[float]:
    """Gradient norm of the last output by each input vector, the last one first, relative to that one."""
    ids = torch.randint(64, (4, length), generator=torch.Generator().manual_seed(1))
    state = model.blocks[0](model.prepare(ids))
    inputs = state.hidden.detach().requires_grad_()
    state = state.updated(hidden=inputs)
    for block in model.blocks[1:-1]:
        state = block(state)
    noise = torch.randn(state.hidden[:, -1].shape, generator=torch.Generator().manual_seed(2))
    (gradient,) = torch.autograd.grad((state.hidden[:, -1] * noise).sum(), inputs)
    norms = gradient.norm(dim=(0, 2)).flip(0)
    return (norms / norms[0]).tolist()


# %%
reached = {family: reach(build(family, vocab_size=64)) for family in FAMILIES}
Table(
    {
        "gradient from 100 tokens back": reached,
        "is": ["below 1e-9" if n[100] < 1e-9 else "above 1e-3" for n in reached.values()],
    },
    kinds={"is": "measured"},
)

# %%
fig, ax = figure(x="distance [tokens]", y="gradient [x that at distance 0]")
for family, norms in reached.items():
    ax.plot([norm if norm > 1e-12 else float("nan") for norm in norms], label=family)
ax.set_yscale("log")
ax.legend()
text = (
    "Recurrent networks forget at a constant rate; attention reaches all tokens alike. "
    "A line ends where the gradient is 0 or below 1e-12."
)
caption(fig, kind="measured", text=text, numbers={"tokens": len(norms)})

# %% [markdown]
# In attention every token is **one step** away. In a convolution it is some layers away, up to its receptive field. In a
# recurrent network it is as many steps away as there are tokens between.

# %%
conv = build("convolution", vocab_size=64).config
seen = sum(norm > 0 for norm in reach(build("convolution", vocab_size=64), length=300))
compare(
    "the convolution sees",
    formula=1 + 2 * (2**conv.num_layers - 1),
    measured=seen,
    unit="tokens",
)

# %% [markdown]
# ## 4 · The same task for all
# Sixteen random letters, a mark, then the same letters again: the second half can be known exactly. All networks get
# 0.1 million weights, the same batches, the same optimizer.


# %% tags=["setup"]
SMALL = {
    "RNN": dict(hidden_size=156),
    "LSTM": dict(hidden_size=80),
    "convolution": dict(hidden_size=60, num_layers=4),
    "attention": dict(hidden_size=64, num_layers=2, max_positions=128, init_std=0.1),
}


# %% tags=["setup"]
def copying(letters: int, rows: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Letters 2..19, mark 1, the letters again; only the repetition has labels."""
    text = torch.randint(2, 20, (rows, letters), generator=generator)
    whole = torch.cat([text, torch.ones(rows, 1, dtype=torch.long), text], 1)
    labels = whole[:, 1:].clone()
    labels[:, :letters] = -100
    return {"input_ids": whole[:, :-1], "labels": labels}


# %% tags=["setup"]
def learn(family: str, letters: int, steps: int = 80) -> tuple[torch.nn.Module, list[float]]:
    """Train a small network of a family on copying; the model and its losses."""
    model = build(family, vocab_size=20, **SMALL[family])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator, losses = torch.Generator().manual_seed(3), []
    for _ in progress(range(steps), family):
        batch = copying(letters, 32, generator)
        loss = model(**batch).loss_sum / (batch["labels"] != -100).sum()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return model, losses


# %% tags=["setup"]
@torch.no_grad()
def accuracy(model, letters: int) -> float:
    """Share of repeated letters that are right, on texts not seen before, in percent."""
    batch = copying(letters, 256, torch.Generator().manual_seed(4))
    asked = batch["labels"] != -100
    return (
        100
        * (model(batch["input_ids"]).logits.argmax(-1) == batch["labels"])[asked]
        .float()
        .mean()
        .item()
    )


def grade(percent: float) -> str:
    """A share as a bound that every machine agrees on."""
    return "over 99 %" if percent > 99 else "under 25 %" if percent < 25 else "between"


# %%
guess_lstm = predict("How many of the letters has the LSTM right after 80 steps?", unit="%")
guess_lstm

# %%
runs = {family: learn(family, letters=LETTERS) for family in FAMILIES}
right = {family: accuracy(model, LETTERS) for family, (model, _) in runs.items()}
Table(
    {
        "network": right,
        "weights": [model.num_parameters() for model, _ in runs.values()],
        "right": [grade(p) for p in right.values()],
    },
    kinds={"weights": "measured", "right": "measured"},
)

# %%
fig, ax = figure(x="step [number]", y="loss [nats/letter]")
for family, (_, losses) in runs.items():
    ax.plot(losses, label=family)
ax.axhline(torch.tensor(18.0).log().item(), color="gray", linestyle=":", label="guessing")
ax.legend()
learned = {f"{f}, last loss below 0.1": losses[-1] < 0.1 for f, (_, losses) in runs.items()}
text = "Attention and convolution soon copy; recurrent networks are still guessing."
caption(fig, kind="measured", text=text, numbers=learned)

# %%
compare(
    Row("LSTM", yours=guess_lstm, formula=100 / 18, measured=right["LSTM"], unit="%", digits=1, noisy=True),
    Row("attention", formula=100, measured=right["attention"], unit="%", digits=2),
)  # fmt: skip

# %% [markdown]
# A recurrent network writes everything into one memory vector; attention keeps all tokens and **looks them up**. These are
# 80 steps: they show who learns it fast, not what can never be learned.

# %% [markdown]
# ## 5 · Out of sight
# Our convolution has 4 layers: it sees 31 tokens. Now 40 letters: what it must copy stands 41 tokens back.

# %%
far = {
    family: accuracy(learn(family, letters=40)[0], 40)
    for family in ("convolution", "attention")
}
Table(
    {
        "40 letters": far,
        "right": [grade(p) for p in far.values()],
        "by theory": ["1 in 18: 6 %", "all"],
    },
    kinds={"right": "measured", "by theory": "modelled"},
)

# %% [markdown]
# No training helps a network that cannot see. Deeper or wider taps would; attention needs neither, and pays for it:
# every token meets every other. Chapter [[#1.2]] measures that price.

# %% [markdown]
# ## 6 · Real text, equal data
# Does it matter for language? 1.3 million weights each, the same 28 batches of Python's manual.

# %% tags=["timing"]
from fmlab.train import TrainConfig, train

settings = TrainConfig(steps=28, batch_size=16, seq_len=64, eval_every=28, log_every=0, lr=8e-3)
trained = {family: train(settings, model=build(family)) for family in progress(FAMILIES)}
losses = {family: run.validation[-1][1].loss for family, run in trained.items()}
columns = {
    "tokens a second": [round(run.tokens_per_second, -2) for run in trained.values()],
    "validation loss [nats/token]": [round(loss, 2) for loss in losses.values()],
}
Table({"network": trained, **columns}, kinds=dict.fromkeys(columns, "measured"))

# %%
guessing = torch.tensor(4096.0).log().item()
print(f"guessing is ln 4,096 = {guessing:.2f} nats")
within(
    "the worst is better than that by", guessing - max(losses.values()), above=1, unit="nats"
)
within(
    "best and worst differ by",
    max(losses.values()) - min(losses.values()),
    below=1,
    unit="nats",
)

# %% [markdown]
# **An honest result**: so small, all four are close, and attention need be neither best nor fastest: on two cores a chain of 64
# short steps costs little. A chip with thousands of units is what section 2 leaves waiting.

# %% [markdown]
# ## 7 · What happened then
# How models grew from BERT-large to PaLM, 2018 to 2022. A tutorial on training such models (KDD 2023) named these two
# ends, in the abstract on its site; ACM's version names others.

# %%
guess_growth = predict("How many times larger is PaLM (540B) than BERT-large (334M)?", unit="x")
guess_growth

# %%
TUTORIAL = "Training Large-scale Foundation Models on Emerging AI Chips, KDD 2023, abstract on its site"
models = model_growth()
compare(
    Row("models grew", yours=guess_growth, quoted=540e9 / 334e6, source=TUTORIAL, unit="x", digits=4),
    Row("chips grew, Moore's law", formula=moores_law(4), unit="x"),
)  # fmt: skip

# %%
fig, ax = figure(x="published [year]", y="size [parameters]")
years, sizes = [m.years for m in models], [m.parameters for m in models]
ax.plot(years, sizes, marker="o", label="largest language models")
moore = [sizes[0] * moores_law(year - years[0]) for year in years]
ax.plot(years, moore, linestyle="--", label="Moore's law from 2018")
places = {"Megatron-LM": (6, -12, "left"), "PaLM": (0, -14, "center")}
for m in models:
    right, up, side = places.get(m.name, (-4, 5, "right"))
    at = dict(xytext=(right, up), textcoords="offset points", ha=side, fontsize=8)
    ax.annotate(m.name, (m.years, m.parameters), **at)
ax.set(yscale="log", ylim=(1e8, 3e12))
ax.set_xticks(range(2018, 2023), [str(year) for year in range(2018, 2023)])
ax.legend()
text = "The gap between the lines is why one chip is not enough."
caption(fig, kind="quoted", source="the papers in the table", text=text, digits=6)

# %%
Table(
    {"model": [m.name for m in models], "month": [m.month for m in models],
     "parameters": [f"{m.parameters / 1e9:g}B" for m in models], "where": [m.source for m in models]},
    kinds={"parameters": "quoted"}, source="see the last column",
)  # fmt: skip

# %% [markdown]
# Numbers like these are copied with errors. BERT-large is 340M in its paper, 334M in the tutorial's abstract, 355M in GPT-3's
# table D.1. What is it?

# %%
from fmlab.models import BERT

with torch.device("meta"):
    count = BERT.from_preset("bert-large-uncased").num_parameters()
printed = {
    "Devlin et al. 2018, section 3": 340e6,
    "the tutorial's abstract, on its site": 334e6,
    "Brown et al. 2020, table D.1": 355e6,
}
rows = [
    Row(source, quoted=n, source=source, measured=count, unit="parameters")
    for source, n in printed.items()
]
compare(*rows)

# %% [markdown]
# None of them: 336,226,108 with the two heads of its training, 335,141,888 without. Counting is cheap; quote only what you
# counted.

# %% [markdown]
# ## 8 · What breaks: padding read as text
# Texts differ in length, so batches are padded. PyTorch's LSTM reads the padding too, unless told; the last state is then
# not that of the text.

# %%
torch.manual_seed(0)
both, plain = (
    Recurrent("lstm", 5, 7, bidirectional=True),
    nn.LSTM(5, 7, batch_first=True, bidirectional=True),
)
with torch.no_grad():
    for way, suffix in enumerate(("_l0", "_l0_reverse")):
        for name, weight in both.cells[0][way].named_parameters():
            plain.get_parameter(name + suffix).copy_(weight)

# %%
padded = torch.zeros(1, 6, 5)
padded[:, :3] = torch.randn(1, 3, 5)
real = torch.tensor([[1, 1, 1, 0, 0, 0]]).bool()
alone, masked, naive = both(padded[:, :3])[0], both(padded, real)[0], plain(padded)[0]
within(
    "with the mask, off from the text alone by",
    (masked[:, :3] - alone).abs().max().item(),
    below=1e-6,
)
within("without it, off by", (naive[:, :3] - alone).abs().max().item(), above=0.01)

# %% [markdown]
# Nothing failed and no number looks strange. The backward direction starts in the padding and is wrong everywhere. Test
# for it: a padded row must equal the row alone.

# %% [markdown]
# ## Exercises
# ### Exercise 1.1.1 (core): one step of a GRU
# Its equations stand in the docstring.


# %% exercise="1.1.1"
def gru_step(x, h, w_x, w_h, b_x, b_h):
    """The next memory [b,h] of a GRU from input x [b,i] and memory h [b,h].

    w_x [3h,i], w_h [3h,h] and the biases [3h] hold the gates r, z and the candidate n, in this order:
    r = sigmoid(W x + U h), z = sigmoid(W x + U h), n = tanh(W x + r * (U h)), next = z * h + (1 - z) * n,
    each product with its own bias.
    """
    # BEGIN SOLUTION
    x_r, x_z, x_n = (x @ w_x.T + b_x).chunk(3, -1)
    h_r, h_z, h_n = (h @ w_h.T + b_h).chunk(3, -1)
    r, z = torch.sigmoid(x_r + h_r), torch.sigmoid(x_z + h_z)
    n = torch.tanh(x_n + r * h_n)
    return z * h + (1 - z) * n
    # END SOLUTION


# %% check="1.1.1"
check("1.1.1", gru_step)

# %% [markdown]
# ### Exercise 1.1.2 (core): the last state of each direction
# A classifier on top of a bidirectional network needs the last state of each direction.


# %% exercise="1.1.2"
def last_states(outputs, lengths):
    """[b,2h]: where each direction has read the whole text, side by side, forward first.

    outputs [b,l,2h] of a bidirectional network, forward half first; lengths [b], whole numbers: row i is text
    up to lengths[i] and padding after it.
    """
    # BEGIN SOLUTION
    rows, half = torch.arange(len(outputs)), outputs.shape[-1] // 2
    return torch.cat([outputs[rows, lengths - 1, :half], outputs[:, 0, half:]], -1)
    # END SOLUTION


# %% check="1.1.2"
check("1.1.2", last_states)

# %% [markdown]
# ### Exercise 1.1.3 (optional): how deep must a convolution be?


# %% exercise="1.1.3"
def layers_needed(distance: int, kernel: int) -> int:
    """The fewest layers with taps 1, 2, 4, … apart whose output sees the token `distance` positions back."""
    # BEGIN SOLUTION
    layers = 0
    while (kernel - 1) * (2**layers - 1) < distance:
        layers += 1
    return layers
    # END SOLUTION


# %% check="1.1.3"
check("1.1.3", layers_needed)

# %% [markdown] tags=["reading"]
# ## Further reading
# - Hochreiter and Schmidhuber 1997, *Long short-term memory*, sections 3 and 4: why gradients vanish, and what keeps them.
# - Bengio, Simard and Frasconi 1994, *Learning long-term dependencies with gradient descent is difficult*.
# - Bai, Kolter and Koltun 2018, arXiv:1803.01271: convolutions against recurrence on copying and on text.
# - Vaswani et al. 2017, arXiv:1706.03762, section 4 and table 1: path lengths and sequential operations.
# - Jelassi et al. 2024, arXiv:2402.01032: attention copies, fixed-size memories do not.
# - Moore 1975, *Progress in digital integrated electronics*: the doubling every two years.
