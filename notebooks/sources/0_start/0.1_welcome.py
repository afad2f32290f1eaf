# %% [markdown]
# **You will learn** to train a small GPT on real English text, on this computer: in one process, then on four ranks.

# %% tags=["setup"]
import math

import torch
from fmlab.data import ByteBPE, load
from fmlab.lab import LiveCurve, Panel, Table, check, compare, figure, predict
from fmlab.lab.panels import choices
from fmlab.models import GPT
from fmlab.train import TrainConfig, train

# %load_ext fmlab.lab

# %% [markdown]
# ## 1 · Real text
# Python brings its own manual along: technical English, written by people. It is all we need; nothing is downloaded.
# (Run the cells from the top, one by one: Shift + Enter.)

# %%
corpus = load("python-docs")
characters, sections = corpus.num_characters, len(corpus.documents)
print(
    f"over 0.4 million characters: {characters > 4e5}, in over 100 sections: {sections > 100}"
)
print(next(text for text in corpus.documents if "assert" in text[:40])[:132])

# %% [markdown]
# ## 2 · Text becomes numbers
# A tokenizer cuts text into **pieces**, also called tokens, from a vocabulary. Ours is learned from the manual: it
# starts with the 256 bytes and merges frequent neighbours, as GPT-2's does.

# %% [markdown]
# Say a number before you see one: type it into the box that the next cell shows. A guess will do, and nothing depends
# on it.

# %%
guess_pieces = predict(
    "Vocabulary of 4,096 pieces: how many characters does a piece hold on average?",
    unit="characters",
)
guess_pieces

# %%
training_part, _ = corpus.split()  # a twentieth is kept apart: the model must never see it
tokenizer = ByteBPE.train(training_part.documents, vocab_size=4096)
tokens = tokenizer.encode_batch(corpus.documents)
per_piece = corpus.num_characters / sum(map(len, tokens))
print(" | ".join(tokenizer.pieces("The statement raises an exception.")))
compare(
    "characters a piece", yours=guess_pieces, measured=per_piece, unit="characters", digits=1
)

# %% [markdown]
# Every number says what it is: **measured** here, **modelled** by a formula, **quoted** from a source, or **given** by
# us. What differs from run to run has a ≈.

# %% [markdown]
# ## 3 · A model that knows nothing
# A GPT gives each of the $V$ pieces of its vocabulary a probability to come next: before training, about $1/V$. The
# **loss** is minus the natural logarithm of the probability of the piece that really came, in *nats*.

# %%
guess_loss = predict("V = 4,096. What is the loss before training?", unit="nats/token")
guess_loss

# %%
torch.manual_seed(0)
model = GPT.from_preset("gpt2-tiny")  # 4 layers, 128 wide, 4,096 pieces
rows = torch.randint(4096, (8, 129))
state = model(rows[:, :-1], labels=rows[:, 1:])  # the label of a piece is the piece after it
loss = state.loss_sum.item() / rows[:, 1:].numel()
compare(
    "loss before training",
    yours=guess_loss,
    formula=math.log(4096),
    measured=loss,
    unit="nats/token",
    digits=2,
)

# %% [markdown]
# Measured is a little above $\ln V$: random weights are not *quite* undecided, and where they lean they are wrong.

# %% [markdown]
# ## 4 · Train it
# A step reads 8 rows of 128 pieces, measures the loss, finds out how each weight should change (its **gradient**), and
# changes all of them a little. Watch the loss fall.

# %% tags=["timing"]
config = TrainConfig(
    model="gpt2-tiny", steps=200, batch_size=8, seq_len=128, eval_every=50, log_every=0
)
with LiveCurve("The model learns the manual's English.", y="loss [nats/token]") as curve:
    result = train(config, model=model, tokenizer=tokenizer, corpus=corpus, callbacks=[curve])

# %%
first, last = result.losses[0], result.validation[-1][1].loss
print(
    f"started near ln V = 8.3: {abs(first - 8.3) < 0.5}; now below 6 on text it never saw: {last < 6}"
)
print(
    f"choosing among more than 3,000 pieces before: {math.exp(first) > 3000}; fewer than 400 now: {math.exp(last) < 400}"
)

# %% [markdown]
# `exp(loss)` is the **perplexity**: among how many equally likely pieces the model still hesitates.
#
# Now it writes. It has read one manual not quite twice, so expect its style, not its sense.

# %% tags=["timing"]
prompt = "The return statement"
print(prompt + result.generate(prompt, max_new_tokens=60, temperature=0.7, top_k=40))

# %% [markdown]
# ## 5 · Who decides the next piece?
# The model gives each piece a score, its **logit**; *softmax* turns scores into probabilities. Dividing scores by a
# **temperature** first makes the model safer (below 1) or bolder (above 1). Move the slider.

# %%
prompt = torch.tensor([tokenizer.encode("If the")])
with torch.no_grad():
    logits = model.eval()(prompt).logits[0, -1]


def draw(temperature: float) -> tuple:
    chance = (logits / temperature).softmax(-1)
    top = chance.topk(8)
    fig, ax = figure(x="probability [1]", y='piece after "If the"')
    ax.barh([repr(tokenizer.decode([int(i)])) for i in top.indices], top.values)
    ax.invert_yaxis()
    ax.set_xlim(0, 1)
    return (
        fig,
        f"temperature {temperature:.1f}: the 8 likeliest of 4,096 pieces share {top.values.sum():.0%}",
    )


# %% tags=["timing"]
Panel(
    "How does temperature change the choice?",
    draw,
    kind="measured",
    temperature=choices(1.0, (0.2, 0.5, 0.7, 1.0, 1.5, 3.0), "temperature"),
)

# %% [markdown]
# ## 6 · Four ranks
# Large models are trained by many processes, called **ranks**. `%%ranks 4` runs a cell on four real ones. They stay alive
# between cells and can talk to each other.

# %%
# %%ranks 4
mine = torch.tensor([float(rank)])
dist.all_reduce(mine)  # adds up the tensor of all ranks, everywhere
print(f"rank {rank} of {world_size}: the sum of all ranks is {mine.item():.0f}")

# %% [markdown]
# The same training, shared: each rank takes 2 of the 8 rows and computes its gradients; the ranks add them up before
# every update.

# %%
short = TrainConfig(
    model="gpt2-tiny", steps=5, warmup=2, batch_size=8, seq_len=128, eval_every=0, log_every=0
)
one = train(short, corpus=corpus)

# %% tags=["timing"]
# %%ranks 4 -o shared
run = train(short, corpus=corpus)
[round(loss, 2) for loss in run.losses]

# %%
differ = max(abs(a - b) for losses in shared for a, b in zip(one.losses, losses, strict=True))
print(f"every rank reports what one process reports, within a hundredth: {differ < 0.01}")

# %% tags=["timing"]
Table(
    {"step": [1, 3, 5], "one process": one.losses[::2], "four ranks": shared[0][::2]},
    kinds={"step": "given", "one process": "measured", "four ranks": "measured"},
    units={"one process": "nats/token", "four ranks": "nats/token"},
)

# %% [markdown]
# Losses can agree by luck. `parity` compares **every gradient** and every updated weight with one process, and asks for
# agreement down to rounding. `Layout(data=4)`: four ranks share the rows.

# %%
# %%ranks 4
from functools import partial

from fmlab.parallel import Layout, parity

report = parity(partial(GPT.from_preset, "gpt2-tiny"), Layout(data=4))
print(f"{len(report.rows)} weights and their gradients compared, all equal: {report.ok}")

# %% [markdown]
# Were four ranks faster?

# %% tags=["timing"]
# %%ranks 4
if rank == 0:
    print(f"one process: {one.tokens_per_second:,.0f} tokens/s")
    print(f"four ranks:  {run.tokens_per_second:,.0f} tokens/s")

# %% [markdown]
# Four processes share your few cores. On four chips each would do its quarter of the work at the same time. What you can
# trust here are bytes, memory and equality.

# %% [markdown]
# ## 7 · What breaks: the perfect student
# A common bug: the labels are not moved by one, so that the model is asked for the piece it has just read. Nothing
# crashes. Read the loss.

# %%
torch.manual_seed(0)
pieces = [piece for document in tokens for piece in document][: 8 * 128]
rows = torch.tensor(pieces).view(8, 128)
copier = GPT.from_preset("gpt2-tiny")
optimizer = torch.optim.AdamW(copier.parameters(), lr=3e-3)
for _ in range(40):
    optimizer.zero_grad()
    mean = copier(rows, labels=rows).loss_sum / rows.numel()  # the bug: labels=rows
    mean.backward()
    optimizer.step()
print(f"below 0.5 nats/token after 40 steps: {mean.item() < 0.5}")

# %% [markdown]
# Our honest model was still above 5 on new text after 200 steps. A loss that is too good is a bug until shown
# otherwise: here the model only learned to copy.

# %% [markdown]
# ## What production systems do
# The same, larger. GPT-3 175B read 300 billion tokens (Brown et al. 2020, table 2.1). The gradients of data-parallel
# ranks are added up by the all-reduce you just ran, on thousands of chips too.

# %% [markdown]
# ## Exercises
# Run the check after each try: it tests your function on inputs you cannot see, and gives hints.
#
# ### Exercise 0.1.1 (core): what comes next?


# %% exercise="0.1.1"
def next_pieces(ids: list[int]) -> list[int]:
    """Return the labels for `ids`: at each place the piece that follows it; -100 where nothing follows."""
    # BEGIN SOLUTION
    return [*ids[1:], -100] if ids else []
    # END SOLUTION


# %% check="0.1.1"
check("0.1.1", next_pieces)

# %% [markdown]
# ### Exercise 0.1.2 (core): share the batch
# Every row must be read exactly once a step, and no rank may have two rows more than another.


# %% exercise="0.1.2"
def rows_of_rank(rows: int, rank: int, ranks: int) -> list[int]:
    """Return which of the rows 0 … rows-1 this rank reads; `rows` need not be a multiple of `ranks`."""
    # BEGIN SOLUTION
    return list(range(rank, rows, ranks))
    # END SOLUTION


# %% check="0.1.2"
check("0.1.2", rows_of_rank)

# %% [markdown]
# ### Exercise 0.1.3 (optional): the k likeliest
# `generate(top_k=40)` draws from the 40 likeliest pieces only. Write the probabilities it draws with.


# %% exercise="0.1.3"
def top_k_probabilities(logits: torch.Tensor, k: int, temperature: float) -> torch.Tensor:
    """logits [v] -> probabilities [v]: softmax of logits / temperature over the k largest, 0 elsewhere."""
    # BEGIN SOLUTION
    top = (logits / temperature).topk(k)
    return torch.zeros_like(logits).scatter(0, top.indices, top.values.softmax(0))
    # END SOLUTION


# %% check="0.1.3"
check("0.1.3", top_k_probabilities)

# %% [markdown]
# ## What next
# [[0.2]] teaches you to check such claims yourself. After it [[0.3]] shows what all the other chapters are about; if
# you have one hour, go on with [[2.2]].

# %% [markdown] tags=["reading"]
# ## Further reading
# - Radford et al. 2019, *Language Models are Unsupervised Multitask Learners* (GPT-2), section 2: the model and its
#   byte-level vocabulary.
# - Sennrich et al. 2016, *Neural Machine Translation of Rare Words with Subword Units*, section 3: byte-pair encoding.
# - Holtzman et al. 2020, *The Curious Case of Neural Text Degeneration*, sections 3 and 5: why sampling needs a cut.
# - Li et al. 2020, *PyTorch Distributed*, section 3: how gradients are added up.
