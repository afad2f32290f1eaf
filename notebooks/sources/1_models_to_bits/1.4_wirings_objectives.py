# %% [markdown]
# **You will learn** what an encoder, a decoder and an encoder-decoder may see, what each is asked, and what seconds of
# training teach it.

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

STEPS = 80  # of each training

# %% tags=["setup"]
import random
import re
import textwrap
from collections import Counter

import numpy as np
from fmlab import data, meter
from fmlab.models import BERT, GPT, T5
from fmlab.models.attention import sdpa_core
from fmlab.models.t5_blocks import T5DecoderLayer
from torch.nn.utils.rnn import pad_sequence

# %% tags=["setup"]
passage = """A generator is a function that returns an iterator. It looks like an ordinary function,
but its body contains yield expressions. Each call of next runs the body up to the next yield;
the local names are kept, so that the function goes on where it left off."""

# %% [markdown]
# ## 1 · One sentence, three tokenizers
# Each family brings its own way to cut text. We train all three on the same text: the topics of Python's manual, but
# for every tenth, which we keep for an exam.

# %%
manual = data.load("python-docs")
lessons = [text for n, text in enumerate(manual.documents) if n % 10]
exam_texts = manual.documents[::10]
KINDS = {"GPT": data.ByteBPE, "BERT": data.WordPiece, "T5": data.Unigram}
tokenizers = {name: kind.train_cached(lessons, 2048) for name, kind in KINDS.items()}
sentence = "Generators yield values lazily, one at a time."

# %% tags=["timing"]
for name, tokenizer in tokenizers.items():
    print(f"{name:4}", " ".join(tokenizer.pieces(sentence)))
    print("     back:", tokenizer.decode(tokenizer.encode(sentence)))

# %% [markdown]
# GPT's bytes and T5's pieces give the text back; a space belongs to the piece after it (`Ġ` is shown as a space). BERT
# lower-cases, forgets spaces and marks pieces **inside** a word with `##`.

# %% [markdown]
# A family also puts its own marks around a text, the **frame**: `[CLS]` and `[SEP]` for BERT, `</s>` at the end for T5.
# T5's *sentinels* will stand for hidden text (section 3).

# %%
frames = {name: t.frame(t.encode("yield")) for name, t in tokenizers.items()}
for name, (ids, _) in frames.items():
    print(f"{name:4}", tokenizers[name].decode(ids))
print("T5's sentinels:", tokenizers["T5"].decode(tokenizers["T5"].sentinels[:3]), "…")

# %% [markdown]
# ## 2 · Three wirings: who may look at whom?
# What differs is the mask, a table of queries and keys, and in T5's decoder a second attention. We let real models tell
# us theirs.

# %%
guess_pairs = predict(
    "Pairs (query, key) that T5 allows for 8 pieces in and 4 out, all masks?", unit="pairs"
)
guess_pairs

# %%
seen = []


def watching(query, key, value, mask, dropout=0.0, **more):
    seen.append(mask.allowed(query.device)[0, 0])
    return sdpa_core(query, key, value, mask, dropout, **more)


# %%
seen.clear()
text, reply = torch.ones(1, 8, dtype=torch.long), torch.ones(1, 4, dtype=torch.long)
bert = BERT(BERT.from_preset("bert-tiny", num_layers=1).config, attention_core=watching)
gpt = GPT(GPT.from_preset("gpt2-tiny", num_layers=1).config, attention_core=watching)
t5 = T5(T5.from_preset("t5-tiny", num_layers=1).config, attention_core=watching)
bert(text), gpt(text), t5(text, decoder_input_ids=reply)
masks = dict(zip(["BERT", "GPT", "T5 encoder", "T5 decoder", "T5 cross"], seen, strict=True))

# %%
layers = [bert.blocks[1], gpt.blocks[1], t5.blocks[1]]
layers.append(next(block for block in t5.blocks if isinstance(block, T5DecoderLayer)))


def matrices(layer, part):
    """Weights in the matrices of this part of a layer, in units of d² = 128²."""
    own = dict(layer.named_parameters())
    return (
        sum(w.numel() for n, w in own.items() if n.startswith(part) and w.dim() == 2) // 128**2
    )


parts = {"attention": "attention.", "cross-attention": "cross.", "feed-forward": "mlp."}
columns = {name: [matrices(layer, part) for layer in layers] for name, part in parts.items()}
Table(
    {"layer of": ["BERT", "GPT", "T5's encoder", "T5's decoder"], **columns},
    kinds=dict.fromkeys(parts, "measured"),
    units=dict.fromkeys(parts, "d² weights"),
)

# %% [markdown]
# The same layer for all: 12 d² weights. So the masks are what makes an encoder or a decoder:

# %%
fig, axes = figure(
    x="key [position]", y="query [position]", title=list(masks), width=9, height=2.4
)
for ax, mask in zip(axes, masks.values(), strict=True):
    ax.imshow(mask, cmap="Blues", vmin=0, vmax=1.3)
    ax.grid(False)
pairs = {name: int(mask.sum()) for name, mask in masks.items()}
caption(fig, kind="measured", text="Blue: the query may look at the key.", numbers=pairs)

# %%
of_t5 = sum(count for name, count in pairs.items() if "T5" in name)
n, t = 8, 4
compare(
    Row("BERT, n²", formula=n * n, measured=pairs["BERT"], unit="pairs"),
    Row("GPT, n(n+1)/2", formula=n * (n + 1) // 2, measured=pairs["GPT"], unit="pairs"),
    Row(
        "T5, n² + t(t+1)/2 + nt",
        yours=guess_pairs,
        formula=n * n + t * (t + 1) // 2 + n * t,
        measured=of_t5,
        unit="pairs",
    ),
)

# %% [markdown]
# An encoder sees everything: "predict the next piece" would be copying. A decoder sees only what came before. So does
# T5's, which also looks at the **whole** input through cross-attention:

# %%
show_source(T5DecoderLayer.forward)

# %% [markdown]
# ## 3 · Three objectives
# The mask decides what can be asked. **Causal**: every piece predicts the next one. The labels are the text, moved by
# one.

# %% tags=["timing"]
bpe = tokenizers["GPT"]
ids = bpe.encode(sentence)
Table(
    {
        "it has seen": [bpe.decode(ids[:n])[-22:] for n in range(1, 7)],
        "it must say": [bpe.decode([ids[n]]) for n in range(1, 7)],
    },
    kinds={"it has seen": "given", "it must say": "given"},
)

# %% [markdown]
# **Masked** (BERT): 15 % of the pieces are targets. Most are shown as `[MASK]`; some as a random piece or as they are,
# because in real use there is no `[MASK]`.

# %%
wordpiece = tokenizers["BERT"]
row = np.array(wordpiece.frame(wordpiece.encode(passage))[0])
masking = data.Masking(wordpiece)

# %% tags=["timing"]
shown, targets = masking(row, np.random.default_rng(0))
print(textwrap.fill(wordpiece.decode(shown), 90), "\n")
print("to find:", ", ".join(wordpiece.decode([i]) for i in targets if i >= 0))

# %%
rng = np.random.default_rng(1)
chosen = masked = kept = special = 0
for _ in range(10_000):
    shown, targets = masking(row, rng)
    at = targets >= 0
    chosen += at.sum()
    masked += (shown[at] == wordpiece.mask).sum()
    kept += (shown[at] == row[at]).sum()
    special += np.isin(row[at], list(wordpiece.special_ids)).sum()
eligible = 10_000 * (len(row) - 2)

# %%
compare(
    Row("targets", formula=15, measured=round(100 * chosen / eligible), unit="%"),
    Row("shown as [MASK]", formula=80, measured=round(100 * masked / chosen), unit="%"),
    Row("shown as they are", formula=10, measured=round(100 * kept / chosen), unit="%"),
    Row("[CLS] or [SEP] chosen", formula=0, measured=int(special), unit="times"),
)

# %% [markdown]
# **Span corruption** (T5): whole spans vanish behind *sentinels*; the decoder writes each sentinel and what was there.

# %%
unigram = tokenizers["T5"]
ids = np.array(unigram.encode(passage))

# %% tags=["timing"]
hidden = data.span_mask(len(ids), np.random.default_rng(4))
inputs, target = data.corrupt(ids, hidden, unigram.sentinels, unigram.eos)
print(textwrap.fill("in:  " + unigram.decode(inputs), 90), "\n")
print(textwrap.fill("out: " + unigram.decode(target), 90))

# %% [markdown]
# Of n pieces, h = 0.15·n are hidden in h/3 spans. In: n - h pieces, a sentinel a span, `</s>`. Out: h pieces, the
# sentinels, `</s>`. T5's encoder takes 512 pieces.

# %%
guess_text = predict("How many pieces of text fit into T5's 512 with span corruption?")
guess_text

# %%
n = 568
h = round(0.15 * n)
spans = round(h / 3)
fits, out = data.span_lengths(512)
compare(
    Row("in, n - h + spans + 1", formula=n - h + spans + 1, measured=512, unit="pieces"),
    Row("text, n", yours=guess_text, formula=n, measured=fits, unit="pieces"),
    Row("out, h + spans + 1", formula=h + spans + 1, measured=out, unit="pieces"),
)

# %% [markdown]
# ## 4 · How much does a text teach?
# Rows of 126 pieces of text, for each family in its own frame. The loss is an average over **targets**: who has more of
# them?

# %%
guess_share = predict("Targets per 100 pieces of text with T5's objective?", unit="targets")
guess_share

# %%
texts = data.Corpus("lessons", lessons, "")
tokens = {name: data.encode(texts, tokenizer) for name, tokenizer in tokenizers.items()}
samplers = {
    "GPT": data.TokenSampler(tokens["GPT"], seq_len=126, batch_size=8),
    "BERT": data.MaskedSampler(tokens["BERT"], wordpiece, seq_len=128, batch_size=8),
    "T5": data.SpanSampler(tokens["T5"], unigram, seq_len=114, batch_size=8),
}
targets = {
    name: sum((sampler.batch(i)["labels"] >= 0).sum().item() for i in range(STEPS))
    for name, sampler in samplers.items()
}
share = {name: 100 * count / (STEPS * 8 * 126) for name, count in targets.items()}

# %%
compare(
    Row("GPT, all", formula=100, measured=share["GPT"], unit="per 100", digits=2),
    Row("BERT, 15 %", formula=15, measured=share["BERT"], unit="per 100", digits=2),
    Row(
        "T5, (h + spans + 1) / n",
        yours=guess_share,
        formula=100 * (19 + 6 + 1) / 126,
        measured=share["T5"],
        unit="per 100",
        digits=3,
    ),
)

# %% [markdown]
# ## 5 · What does each wiring cost?
# Scores and mixing take 4·q·k·d FLOPs a layer for q queries and k keys. Causal or not, kernels are usually counted
# with the full table.

# %%
V = 2048
models = {}
for name, family, preset in (("GPT", GPT, "gpt2"), ("BERT", BERT, "bert"), ("T5", T5, "t5")):
    torch.manual_seed(0)
    models[name] = family.from_preset(f"{preset}-tiny", vocab_size=V)
measured = {}
for name, model in models.items():
    batch = {k: x[:1] for k, x in samplers[name].batch(0).items()}
    with torch.no_grad(), meter.flops() as work:
        model(**batch)
    measured[name] = sum(count for op, count in work.by_op.items() if "attention" in op)

# %%
d = 128
t5_pairs = 2 * 114 * 114 + 2 * (26 * 26 + 26 * 114)  # two layers in each stack
for_t5 = {"formula": 4 * t5_pairs * d, "measured": measured["T5"]}
compare(
    Row("GPT", formula=4 * 4 * 126**2 * d, measured=measured["GPT"], unit="FLOPs"),
    Row("BERT", formula=4 * 4 * 128**2 * d, measured=measured["BERT"], unit="FLOPs"),
    Row("T5, 114 in and 26 out", **for_t5, unit="FLOPs"),
)

# %% [markdown]
# Two short texts cost less than one long one, and T5 splits its layers between two streams. The price: each of its
# decoder layers has a second attention.

# %% [markdown]
# ## 6 · Train all three
# The same text, 80 steps of 8 rows, the same optimizer and learning rate. These are seconds, where published models
# took weeks.


# %%
def train(name, model, steps=STEPS, moved=lambda batch: batch):
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), fused=True)
    losses = []
    for step in progress(range(steps), name):
        rising, falling = 6 * (step + 1) / steps, 3 * (steps - step) / steps
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1, rising, falling)
        batch = moved(samplers[name].batch(step))
        loss = model(**batch).loss_sum / (batch["labels"] >= 0).sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# %% [markdown]
# The losses are **not** comparable: other pieces, other targets. So we also set an exam: one word is cut out of unseen
# text, and the model chooses among ten.


# %%
def is_one_piece(word):
    spelled = {"GPT": " " + word, "BERT": word, "T5": word}
    return all(len(tokenizers[name].encode(text)) == 1 for name, text in spelled.items())


words = [word for text in exam_texts for word in text.split()]
rng, blanks = random.Random(0), []
while len(blanks) < 200:
    at = rng.randrange(24, len(words) - 25)
    if re.fullmatch("[a-z]{2,}", words[at]) and is_one_piece(words[at]):
        left, right = words[at - 24 : at], words[at + 1 : at + 25]
        blanks.append((" ".join(left), words[at], " ".join(right)))

# %%
answers = [word for _, word, _ in blanks]
choices = []  # the true word first, then nine others, frequent ones more often
for word in answers:
    drawn = dict.fromkeys(rng.sample(answers, len(answers)))
    choices.append([word, *[other for other in drawn if other != word][:9]])


# %% [markdown]
# Each model gets the question in the form it was trained on. GPT sees the left side only; the others see both.


# %%
def ask(name, left, right):
    """The row that the model reads, with the blank as it knows blanks."""
    t = tokenizers[name]
    if name == "GPT":
        return t.encode(left)
    if name == "BERT":
        return t.frame([*t.encode(left), t.mask, *t.encode(right)])[0]
    return [*t.encode(left), t.sentinels[0], *t.encode(right), t.eos]


# %%
def answer(name, model):
    rows = [torch.tensor(ask(name, left, right)) for left, _, right in blanks]
    ids = pad_sequence(rows, batch_first=True, padding_value=tokenizers[name].pad)
    real = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    more = {} if name == "GPT" else {"attention_mask": real}
    if name == "T5":
        begun = torch.tensor([[0, unigram.sentinels[0]]]).expand(len(rows), 2)
        return model(ids, decoder_input_ids=begun, **more).logits[:, -1]
    at = real.sum(1) - 1 if name == "GPT" else (ids == wordpiece.mask).int().argmax(1)
    return model(ids, **more).logits[torch.arange(len(rows)), at]


# %%
@torch.no_grad()
def exam(name, model):
    """Share of the blanks [%] for which the true word is the likeliest of the ten."""
    model.eval()
    space = " " if name == "GPT" else ""
    ids = [[tokenizers[name].encode(space + w)[0] for w in ten] for ten in choices]
    right = answer(name, model).gather(1, torch.tensor(ids)).argmax(1) == 0
    model.train()
    return 100 * right.float().mean().item()


counts = Counter(word for text in lessons for word in text.split())
common = [max(ten, key=lambda word: counts[word]) == ten[0] for ten in choices]
most_frequent = 100 * sum(common) / len(common)
within("choosing the most frequent of the ten", most_frequent, below=20, unit="% right")

# %%
curves = {name: train(name, model) for name, model in models.items()}
few = round(targets["BERT"] / (8 * 126))  # steps that give GPT as many targets as BERT had
torch.manual_seed(0)
brief = GPT.from_preset("gpt2-tiny", vocab_size=V)
train("GPT", brief, steps=few)
print(f"GPT has BERT's number of targets after {few} of {STEPS} steps")

# %% tags=["timing"]
fig, ax = figure(x="step [steps]", y="loss [nats/target]")
for name, losses in curves.items():
    ax.plot(losses, label=name)
ax.legend()
caption(
    fig,
    kind="measured",
    text="They begin a little above guessing, ln 2048 = 7.6, and fall.",
    noisy=True,
)

# %% [markdown]
# BERT's line is the roughest: it averages about 150 targets a step, GPT's 1,008. And after some twenty steps it lies
# nearly flat: it knows which pieces are frequent, and not yet how to look around.

# %% tags=["timing"]
scores = {name: exam(name, model) for name, model in models.items()}
scores["GPT, few targets"] = exam("GPT", brief)
compare(
    Row(
        "most frequent of the ten", measured=most_frequent, unit="% right", digits=2, noisy=True
    ),
    *[
        Row(name, measured=score, unit="% right", digits=2, noisy=True)
        for name, score in scores.items()
    ],
)

# %%
others = max(score for name, score in scores.items() if name != "GPT")
within("GPT over the most frequent word", scores["GPT"] - most_frequent, above=4, unit="points")
within(
    "GPT over the best of those with fewer targets",
    scores["GPT"] - others,
    above=3,
    unit="points",
)

# %% [markdown]
# In these seconds BERT and T5 learn little more than which words are frequent; GPT learns more, from one side only. It
# had seven times BERT's targets. With as many, in 12 steps, it knew no more.

# %% [markdown]
# Whether seeing both sides pays later we cannot show in seconds: BERT's paper (quoted, appendix A.2) took a million steps of
# 128,000 pieces. **Which goes with which?**
#
# | wiring | objective | good for |
# |---|---|---|
# | encoder | masked | a vector or a label for a text |
# | decoder | causal | writing on; anything that can be put as text |
# | encoder-decoder | spans | text to text: translation, summaries |

# %% [markdown]
# ## 7 · What breaks
# **Labels that are not moved**, as in [[#0.1]]: the piece to predict is the piece it reads. The loss looks wonderful,
# the exam does not.


# %%
def not_moved(batch):
    return {"input_ids": batch["input_ids"], "labels": batch["input_ids"]}


torch.manual_seed(0)
cheat = GPT.from_preset("gpt2-tiny", vocab_size=V)
losses = train("GPT", cheat, steps=30, moved=not_moved)
within("loss after 30 steps", losses[-1], below=1, unit="nats/target")
within(
    "its exam, over the most frequent word",
    exam("GPT", cheat) - most_frequent,
    below=3,
    unit="points",
)

# %% [markdown]
# No text is that predictable. **A loss too good to be true is a leak.** To find one, change the last piece only: what
# comes before must not notice. Fresh weights do for that:

# %%
torch.manual_seed(0)
fresh = {
    name: family.from_preset(f"{preset}-tiny", vocab_size=V).eval()
    for name, family, preset in (("BERT", BERT, "bert"), ("GPT", GPT, "gpt2"))
}
ids = samplers["GPT"].batch(0)["input_ids"][:1, :12]
changed = ids.clone()
changed[0, -1] = 5  # only the last piece
for name, model in fresh.items():
    with torch.no_grad():
        moved = (model(ids).logits - model(changed).logits)[0, :-1].abs().max().item()
    bound = dict(above=0.01) if name == "BERT" else dict(below=1e-4)
    within(f"{name}: logits before it move by up to", moved, **bound)

# %% [markdown]
# **T5's head without its factor.** T5 ties its head to embeddings of variance 1, and multiplies by d^-0.5 before. Left
# out, it starts far worse than guessing.

# %%
guess_first = predict("T5-small's first loss, 32,128 pieces, with the factor?", unit="nats")
guess_first

# %%
torch.manual_seed(0)
small = T5.from_preset("t5-small")
into, out_of = torch.randint(32128, (2, 32)), torch.randint(32128, (2, 24))
first = {}
for name, scale in (("with", 512**-0.5), ("without", 1.0)):
    small.head.scale = scale
    with torch.no_grad():
        first[name] = small(into, labels=out_of).loss_sum.item() / out_of.numel()

# %%
uniform = float(np.log(32128))
right, wrong = first["with"], first["without"]
compare(
    Row("with", yours=guess_first, formula=uniform, measured=right, unit="nats", noisy=True),
    Row("without", measured=wrong, unit="nats", noisy=True),
)

# %%
within("with the factor, off from guessing by", abs(right - uniform), below=1, unit="nats")
within("without it", wrong, above=100, unit="nats")

# %% [markdown]
# ## What production systems do
# Today's large models are decoders: every piece is a target, one stack serves every task, and keys and values can be
# cached. Encoders still make most search vectors; T5's encoder reads the prompts of image generators.

# %% [markdown]
# ## Exercises
# ### Exercise 1.4.1 (core): what T5's decoder reads


# %% exercise="1.4.1"
def decoder_inputs(labels: torch.Tensor, start: int = 0) -> torch.Tensor:
    """labels [b, t], -100 where there is no target -> what the decoder reads to predict them, [b, t].

    It reads the start token, then every label but the last. A label of -100 is read as the start token.
    """
    # BEGIN SOLUTION
    moved = torch.full_like(labels, start)
    moved[:, 1:] = labels[:, :-1]
    return moved.masked_fill(moved == -100, start)
    # END SOLUTION


# %% check="1.4.1"
check("1.4.1", decoder_inputs)

# %% [markdown]
# ### Exercise 1.4.2 (core): hide the spans


# %% exercise="1.4.2"
def corrupt(tokens: list[str], spans: list[tuple[int, int]]) -> tuple[list[str], list[str]]:
    """Return T5's input and target for a text whose spans tokens[first:stop] are hidden.

    Spans are in order and do not touch. Span i is shown as the sentinel "<i>", and the target has that sentinel
    and then what it hides. Both end with "</s>".
    """
    # BEGIN SOLUTION
    shown, target, at = [], [], 0
    for i, (first, stop) in enumerate(spans):
        shown += [*tokens[at:first], f"<{i}>"]
        target += [f"<{i}>", *tokens[first:stop]]
        at = stop
    return [*shown, *tokens[at:], "</s>"], [*target, "</s>"]
    # END SOLUTION


# %% check="1.4.2"
check("1.4.2", corrupt)

# %% [markdown]
# ### Exercise 1.4.3 (optional): a fourth wiring
# A *prefix LM* is one stack: the question is read both ways, the answer is written causally.


# %% exercise="1.4.3"
def prefix_mask(length: int, prefix: int) -> torch.Tensor:
    """Bool [length, length], True where the query (row) may look at the key (column).

    The first `prefix` pieces see each other; every other piece sees what stands before it, and itself.
    """
    # BEGIN SOLUTION
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    mask[:prefix, :prefix] = True
    return mask
    # END SOLUTION


# %% check="1.4.3"
check("1.4.3", prefix_mask)

# %% [markdown] tags=["reading"]
# ## Further reading
# - Devlin et al. 2019, *BERT*, section 3.1: masking, 80/10/10.
# - Raffel et al. 2020, *Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer*, sections 3.1
#   to 3.3: spans, sentinels, and all wirings compared.
# - Clark et al. 2020, *ELECTRA*, section 3: what it costs to learn from 15 % of the pieces.
# - Wang et al. 2022, *What Language Model Architecture and Pretraining Objective Work Best for Zero-Shot
#   Generalization?*: the same question at 5 billion parameters.
# - Tay et al. 2023, *UL2*: mixing the objectives.
