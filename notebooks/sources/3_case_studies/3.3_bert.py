# %% [markdown]
# **You will learn** what BERT, RoBERTa and DistilBERT changed, what each change buys here (some buy nothing you can
# measure), and what such a model asks of a chip.

# %% tags=["setup"]
import torch
from fmlab.lab import (
    Row,
    Table,
    caption,
    check,
    compare,
    encoders,
    figure,
    predict,
    show_source,
    within,
)

torch.set_num_threads(1)  # so small a model loses more to a second thread than it gains

# %% tags=["setup"]
from fmlab import train
from fmlab.models import BERT, DistilBERT, RoBERTa
from fmlab.train import encoder_case, roberta_ablations

kept = {row["model"]: row for row in encoder_case.kept()}

# %% [markdown]
# ## 1 · One encoder, three recipes
# BERT is a stack of the layers of [[1.4]], open in both directions, that finds hidden words. RoBERTa changes **how it is
# trained**, DistilBERT keeps every other layer.

# %%
guess_smaller = predict("Half of BERT-base's layers: how much smaller, in percent?", unit="%")
guess_smaller


# %%
def shape(family, preset: str, heads: str) -> tuple[int, int]:
    """(layers, parameters) of a published shape, counted without memory."""
    with torch.device("meta"):
        model = family.from_preset(preset, heads=heads)
    return model.config.num_layers, sum(p.numel() for p in model.parameters())


published = {
    "BERT-base": shape(BERT, "bert-base-uncased", "pooled"),
    "RoBERTa-base": shape(RoBERTa, "roberta-base", "pooled"),
    "DistilBERT": shape(DistilBERT, "distilbert-base-uncased", "encoder"),
}
for name, (layers, parameters) in published.items():
    print(f"{name:13} {layers:2} layers, {parameters:,} parameters")

# %%
big, small = published["BERT-base"][1], published["DistilBERT"][1]
compare(
    Row(
        "DistilBERT is smaller by",
        yours=guess_smaller,
        measured=100 * (1 - small / big),
        quoted=40,
        unit="%",
        source="Sanh et al. 2019, section 4",
    )
)

# %% [markdown]
# Not 50 %: the table of words stays, and so does the table of positions. RoBERTa's larger number is its larger vocabulary.

# %% [markdown]
# ## 2 · Words, pieces, bytes
# BERT's **WordPiece** cleans text and lower-cases it; what it cannot build becomes `[UNK]`. RoBERTa's **byte BPE** ([[1.4]]
# has both) starts from 256 bytes: nothing is unknown, nothing lost.

# %%
from fmlab.data import MaskedSampler, RoBERTaBPE, encode

corpus, wordpiece = encoders.manual()
bytewise = RoBERTaBPE.train_cached(corpus.documents, encoders.VOCABULARY)
text = "Naïve readlines(): 日本"
for tokenizer in (wordpiece, bytewise):
    ids = tokenizer.encode(text)
    print(f"{len(ids):2} tokens, back: {tokenizer.decode(ids)!r}")

# %% [markdown]
# A training row: some 15 % of the tokens are targets. Most are shown as `[MASK]`, a tenth as another word, a tenth as they
# are.

# %%
learn, held_out = corpus.split(0.05)
sampler = MaskedSampler(encode(learn, wordpiece), wordpiece, encoders.LENGTH, encoders.ROWS)
batch = sampler.batch(0)
shown, wanted = batch["input_ids"][3], batch["labels"][3]
print(wordpiece.decode(shown[:40].tolist()))
print("wanted:", [wordpiece.decode([int(i)]) for i in wanted[:40][wanted[:40] >= 0]])

# %%
share = (batch["labels"] >= 0).float().mean().item()
hidden = (batch["input_ids"] == wordpiece.mask)[batch["labels"] >= 0].float().mean().item()
within("share of targets", share, above=0.13, below=0.16)
within("of these shown as [MASK]", hidden, above=0.7, below=0.9)

# %% [markdown]
# ## 3 · Pre-training
# Two layers of width 64 on Python's manual. The loss of a uniform guess among 2,048 tokens is ln 2,048 = 7.6.

# %%
guess_loss = predict("The loss after 120 steps, on text it has not read?", unit="nats/token")
guess_loss

# %%
model = encoders.small_bert()
print(f"{model.num_parameters():,} parameters")
result = encoders.pretrain(model, corpus, wordpiece, steps=120)
model = result.model
compare(
    Row(
        "held-out text",
        yours=guess_loss,
        measured=result.validation[-1][1].loss,
        unit="nats/token",
        noisy=True,
    )
)

# %%
within("the last loss", result.validation[-1][1].loss, below=6.3, unit="nats/token")
fig, ax = figure(x="step [number]", y="loss [nats/token]")
ax.plot(range(1, 121), result.losses, label="training, each step")
steps, points = zip(*((step, found.loss) for step, found in result.validation))
ax.plot(steps, points, marker="o", label="held-out text")
ax.legend()
caption(fig, kind="measured", text="Seconds of one core.", noisy=True)

# %% [markdown]
# It has learned which words are frequent, little more. Beside it we show a **longer run**, made once, with its command.
# Phase one reads short rows, phase two long ones: attention costs l².

# %%
for name in ("bert", "bert-256"):
    row = kept[name]
    print(
        f"{row['command']}\n    seed {row['seed']}, {row['steps']} steps, weights {row['weights']}"
    )

# %%
fig, ax = figure(x="part of the run [%]", y="loss [nats/token]")
for name, label in (("bert", "phase one, rows of 64"), ("bert-256", "phase two, rows of 256")):
    curve = kept[name]["curve"]
    ax.plot([100 * (i + 0.5) / len(curve) for i in range(len(curve))], curve, label=label)
ax.legend()
caption(
    fig, kind="measured", text="The longer run, measured once. Training loss, means of steps."
)

# %% [markdown]
# Phase two starts high: positions 64 to 255 were never trained, and 330 steps do not make that good. BERT took 100,000 with
# rows of 512, after 900,000 of 128 (Devlin et al., appendix A.2).

# %%
Table(
    {
        "run": ["phase one", "phase two"],
        "held-out rows of 64": [kept[n]["held out"] for n in ("bert", "bert-256")],
    },
    kinds={"held-out rows of 64": "measured"},
    units={"held-out rows of 64": "nats/token"},
    title="Measured once",
)

# %% [markdown]
# ## 4 · What RoBERTa changed
# Masks drawn anew, full rows without sentence pairs, larger batches, bytes. We changed **one thing at a time**, with
# several seeds, every arm on the same number of tokens, judged on the same text.

# %%
guess_static = predict("Static masks, 5 epochs: how much worse?", unit="nats/token")
guess_static

# %%
show_source(roberta_ablations, region="compared")

# %%
runs = roberta_ablations.measured()
arms = list(roberta_ablations.ARMS)[1:-1]  # the recipe is the first, byte BPE the last
found = {arm: roberta_ablations.compared(runs, arm) for arm in arms}

# %%
Table(
    {
        "instead of the recipe": arms,
        "gain": [one.gain for one in found.values()],
        "noise": [one.noise for one in found.values()],
        "verdict": [one.verdict for one in found.values()],
    },
    kinds={"gain": "measured", "noise": "measured"},
    units={"gain": "nats/token", "noise": "nats/token"},
    title="Below 0: worse than RoBERTa's recipe. Measured once",
)

# %%
print(*roberta_ablations.provenance().values(), sep="; ")
compare(
    Row(
        "static masks, worse by",
        yours=guess_static,
        measured=-found["static masks"].gain,
        unit="nats/token",
    )
)

# %% [markdown]
# The noise is half a 95 % interval over the seeds. What lies inside is **no result**, however the paper decided. RoBERTa's
# own gain by dynamic masks was "comparable or slightly better" (section 4.1).

# %%
by = "per_character"  # tokens of another vocabulary are longer or shorter: compare characters
byte = roberta_ablations.compared(runs, "byte BPE", by)
print(
    f"byte BPE: gain {byte.gain:+.2f} ± {byte.noise:.2f} nats a hidden character: {byte.verdict}"
)

# %% [markdown]
# With 2,048 tokens, bytes cost loss: case and spaces must be spelled too. They buy that nothing is unknown, and for
# that RoBERTa kept them (section 4.4). Its gains came from **more data, longer** (section 5).

# %% [markdown]
# ## 5 · Packing without contamination
# Fine-tuning texts are short. Several in a row save padding, if none sees another: `document_ids`.

# %%
from fmlab.data import load, pack

texts = load("docstrings").documents[:48]
rows = [wordpiece.frame(wordpiece.encode(t, special=False), max_length=64)[0] for t in texts]
labels = [[i if place % 7 == 3 else -100 for place, i in enumerate(row)] for row in rows]
packed = pack(rows, 128, wordpiece.pad, labels)
print(packed)

# %%
guess_padding = predict("One text in a row of 64: what share is padding?", unit="%")
guess_padding

# %%
long = encoders.small_bert(max_positions=128).double().eval()
inputs = {name: t for name, t in packed.batch.items() if name != "position_ids"}
together = long(**inputs)["loss_sum"].item()
alone = sum(
    long(torch.tensor([row]), torch.tensor([aims]))["loss_sum"].item()
    for row, aims in zip(rows, labels)
)
mixed = long(inputs["input_ids"], inputs["labels"])["loss_sum"].item()
one_each = 1 - sum(map(len, rows)) / (64 * len(rows))
compare(
    Row("padding", yours=guess_padding, measured=100 * one_each, unit="%", noisy=True),
    Row("padding, packed", measured=100 * packed.waste, unit="%", noisy=True),
)

# %%
within("packed against alone", abs(together - alone) / alone, below=1e-10)
within("without document_ids", abs(mixed - alone) / alone, above=1e-4)

# %% [markdown]
# The same loss to the last digits, where the careless packing shifts it and says nothing. From the shell:
# `--pack-documents`.

# %% [markdown]
# ## 6 · Distillation
# The student starts as every other layer of its teacher:

# %%
show_source(train.distil, region="student")

# %%
from fmlab.objectives import Distillation, MaskedLM

student = train.distil.student_of(model)
objective = Distillation(MaskedLM(), model, temperature=2.0, hard=2.0, soft=5.0, hidden=1.0)


def three_losses() -> dict[str, float]:
    """The mean of each loss of the student on one batch."""
    terms = objective(student.eval(), sampler.batch(999))
    return {name: (term.sum / term.count).item() for name, term in terms.items()}


before = three_losses()
train.fine_tune(student, sampler, objective, steps=40, lr=2e-3)
after = three_losses()

# %%
Table(
    {"loss": list(before), "before": list(before.values()), "after": list(after.values())},
    kinds={"before": "measured", "after": "measured"},
    title="Three losses: the hidden word, the teacher's answers, the direction of its states",
    noisy=("before", "after"),
)

# %%
within("the states' distance, after / before", after["hidden"] / before["hidden"], below=0.9)

# %% [markdown]
# The paper's three claims: 40 % smaller, 60 % faster, 97 % of the quality. Yours first: what does half the layers do to the
# speed of the *encoder*?

# %%
guess_faster = predict("A pass of half the layers: faster by how many percent?", unit="%")
guess_faster

# %%
teacher_row, student_row, alone_row = (kept[n] for n in ("bert", "distilbert", "alone"))
tuned_rows = {n: kept[n]["accuracy"] for n in ("bert", "distilbert", "alone")}
score = {n: 100 * sum(found) / len(found) for n, found in tuned_rows.items()}
smaller = 100 * (1 - student_row["parameters"] / teacher_row["parameters"])
wide = dict(hidden_size=128, num_heads=4)  # the shape of the longer runs
deep, half = (encoders.small_bert(num_layers=layers, **wide) for layers in (4, 2))
faster = 100 * (encoder_case.faster(deep, half) - 1)
kept_share = 100 * score["distilbert"] / score["bert"]
claims = dict(unit="%", source="Sanh et al. 2019, section 4")
compare(
    Row("smaller", measured=smaller, quoted=40, **claims),
    Row("faster", guess_faster, 100, faster, quoted=60, noisy=True, **claims),
    Row("quality kept", measured=kept_share, quoted=97, **claims),
)

# %% [markdown]
# Ours: four layers to two, docstrings' classes, three seeds, 150 steps; speed is measured now. Words take a larger part of a
# small model. And **without a teacher**: same student, same steps, random weights:

# %%
compare(
    Row("distilled, accuracy", measured=score["distilbert"], unit="%"),
    Row("alone, accuracy", measured=score["alone"], unit="%"),
    Row("distilled, held-out loss", measured=student_row["held out"], unit="nats/token"),
    Row("alone, held-out loss", measured=alone_row["held out"], unit="nats/token"),
)

# %% [markdown]
# ## 7 · What is it good for?
# Which of ten modules is a docstring from? The baseline counts words: TF-IDF and logistic regression.

# %%
guess_wins = predict("Of 100 docstrings: how many does the counting get right?", unit="%")
guess_wins

# %%
counted = encoder_case.counted_words()
tuned = encoder_case.accuracy_after(model, wordpiece, steps=80, lr=2e-3)
compare(
    Row("TF-IDF + regression", yours=guess_wins, measured=100 * counted["accuracy"], unit="%"),
    Row("ours of section 3, tuned now", measured=100 * tuned, unit="%", noisy=True),
    Row("the longer run, tuned", measured=score["bert"], unit="%"),
)

# %%
within("tuned now, where chance is 10 %", 100 * tuned, above=12, unit="%")
within(
    "words are ahead of ours by", 100 * (counted["accuracy"] - tuned), above=0, unit="points"
)

# %% [markdown]
# **Counting words wins**, at no cost. A million words of pre-training and 1,700 examples are not what BERT needs: it read
# 3,300 million (Devlin et al., section 3.1). Always run this baseline first. Search tells the same:

# %%
found = encoder_case.search(model, wordpiece)
ranks = [counted["MRR, BM25"], counted["MRR, TF-IDF"], found.mrr, teacher_row["MRR"]]
Table(
    {
        "search": ["BM25", "TF-IDF", "ours, now", "the longer run"],
        "mean reciprocal rank": ranks,
    },
    kinds={"mean reciprocal rank": "measured"},
    title="Find the section of a title, among 166",
    digits=2,
    noisy=("mean reciprocal rank",),
)

# %%
within("BM25 is ahead by", counted["MRR, BM25"] - found.mrr, above=0.1)

# %% [markdown]
# States trained for hidden words are no search vectors: that takes contrastive training on pairs, as CLIP's in
# [[#1.5]].

# %% [markdown]
# ## 8 · LAMB: very large batches
# Fewer, larger steps need larger rates, and some layer diverges first. LAMB makes each matrix move by a **share of its own
# norm**:

# %%
show_source(train.lamb_step, region="trust")


# %%
def moved_by(optimizer) -> list[float]:
    """How far each matrix of a new model moves in one step, in percent of its norm."""
    probe = encoders.small_bert()
    start = {n: p.detach().clone() for n, p in probe.named_parameters() if p.dim() > 1}
    probe(**encoders.masked_batch(rows=32))["loss_sum"].backward()
    optimizer(0.02, weight_decay=0.0)(list(probe.named_parameters())).step()
    now = dict(probe.named_parameters())
    return [100 * ((now[n] - p).norm() / p.norm()).item() for n, p in start.items()]


shares = {"AdamW": moved_by(train.adamw), "LAMB": moved_by(train.lamb)}

# %%
Table(
    {
        "one step of rate 0.02": list(shares),
        "least": [min(moved) for moved in shares.values()],
        "most": [max(moved) for moved in shares.values()],
    },
    kinds={"least": "measured", "most": "measured"},
    units={"least": "%", "most": "%"},
    title="How far a matrix moves, as a share of its norm",
    digits=2,
    noisy=("least", "most"),
)

# %% [markdown]
# LAMB: 2 %, all of them. With it BERT took batches of up to 65,536 rows, and 76 minutes on a TPU v3 pod (You et al., section
# 4). At our size large batches cost loss (section 4 above).

# %% [markdown]
# ## 9 · Layouts that suit
# The norm of a whole matrix, when each rank holds a slice? The ledger adds the squares up. Two ranks, three layouts:

# %%
# %load_ext fmlab.lab
from fmlab.parallel import Layout

# %%
whole = encoders.lamb_weights(Layout())  # two steps on one device


def furthest(layout: Layout, place: int) -> float:
    """The largest difference of a weight, as a share of its norm; every rank calls it."""
    weights = encoders.lamb_weights(layout, [place])
    return max((weights[n] - p).norm().item() / p.norm().item() for n, p in whole.items())


# %%
# %%ranks 2 -o apart_by
apart = {}
for layout in (Layout(data=2, zero=1), Layout(data=2, fsdp=True), Layout(tensor=2)):
    apart[str(layout)] = furthest(layout, layout.data_rank(rank))
all(distance < 1e-3 for distance in apart.values())

# %%
print("both ranks, all three layouts, as on one device:", all(apart_by))

# %% [markdown]
# Any layout of [[2.2]] to [[2.8]] trains it. Does it *suit*? BERT-large fits one chip, so cutting matrices only adds
# messages. And not every degree is legal:

# %%
with torch.device("meta"):
    base = BERT.from_preset("bert-base-uncased")
for layout in (Layout(tensor=8), Layout(pipeline=16, micro_batches=16)):
    try:
        layout.validate(layout.world_size, model=base)
    except ValueError as refusal:
        print(refusal, "\n")

# %%
from fmlab.planner import plan
from fmlab.planner import runs as published_runs

SIZE = dict(chip="a100-80gb", global_batch=4096, seq_len=128)
layouts = {
    "data 8": Layout(data=8, micro_batches=2),
    "ZeRO-1, 8": Layout(data=8, zero=1, micro_batches=2),
    "tensor 8": Layout(tensor=8, sequence_parallel=True, micro_batches=16),
    "pipeline 8": Layout(pipeline=8, micro_batches=64),
}
planned = {
    n: plan("bert-large-uncased", layout=layout, **SIZE) for n, layout in layouts.items()
}

# %%
Table(
    {
        "BERT-large on 8 A100": list(planned),
        "rows a second": [one.samples_per_second for one in planned.values()],
        "peak": [one.peak_memory / 1e9 for one in planned.values()],
    },
    kinds={"rows a second": "modelled", "peak": "modelled"},
    units={"rows a second": "1/s", "peak": "GB"},
)

# %% [markdown]
# Data parallelism wins while the model fits. What ZeRO saves, a larger micro-batch can use.

# %% [markdown]
# ## 10 · The same step on each chip
# The program of [[3.2]], with an encoder. First the numbers:

# %%
from fmlab.backends import get_backend
from fmlab.sim import dry_run, simulate

FP32 = {"fp32": 275e12 / 6}  # our assumption for the TPU: an fp32 product is six bf16 ones
simulated = ("cpu", "sim:h100", "sim:trn2")
losses = {name: encoders.step_losses(get_backend(name)) for name in simulated}
simulate("tpu-v4", assumed_flops=FP32)
losses["sim:tpu-v4"] = encoders.step_losses(get_backend("sim:tpu-v4"))
apart = max(abs(a - b) for found in losses.values() for a, b in zip(found, losses["cpu"]))
within("furthest from the CPU [nats/token]", apart, below=2e-2)

# %% [markdown]
# Then a step of BERT-large, 32 rows of 128, on shapes alone. No source gives the TPU's rate for fp32, which one product of
# the output bias needs, hence the assumption.

# %%
STEP = dict(global_batch=32, seq_len=128, precision="bf16")
assumed = {"tpu-v4": dict(assumed_flops=FP32)}
steps = {
    one: dry_run("bert-large-uncased", chip=one, **STEP, **assumed.get(one, {}))
    for one in ("h100", "tpu-v4", "trn2-core")
}

# %%
Table(
    {
        "chip": list(steps),
        "step": [1e3 * run.seconds for run in steps.values()],
        "utilisation": [100 * run.utilisation() for run in steps.values()],
        "memory": [run.peak_memory / 1e9 for run in steps.values()],
    },
    kinds={"step": "modelled", "utilisation": "modelled", "memory": "modelled"},
    units={"step": "ms", "utilisation": "%", "memory": "GB"},
    title="At the peak rates of the data sheets",
)

# %%
for one, run in steps.items():
    print(
        one,
        *(f"{op.name}: {100 * op.seconds / run.seconds:.0f} %" for op in run.top_operations(3)),
    )

# %%
from fmlab.lab.timeline import memory_view

memory_view(steps["h100"])

# %% [markdown]
# **Shapes.** A compiler for static shapes makes a program for each length. RoBERTa on TPUs once compiled 429 programs in
# 493 steps (pytorch/xla#3356). Our docstrings, in batches of 16:

# %%
from fmlab.data import choose_buckets, signatures

guess_programs = predict(
    "2,200 docstrings, longest-row padding: how many programs?", unit="programs"
)
guess_programs

# %%
encoded = wordpiece.encode_batch(load("docstrings").documents)
lengths = [min(128, len(ids) + 2) for ids in encoded]
ways = {
    "longest row": None,
    "4 buckets": choose_buckets(lengths, 4),
    "one length": choose_buckets(lengths, 1),
}
programs = {name: len(signatures(lengths, 16, way, last="pad")) for name, way in ways.items()}

# %%
compare(
    Row(
        "longest row",
        yours=guess_programs,
        measured=programs["longest row"],
        unit="programs",
        noisy=True,
    ),
    Row("4 buckets, at most", formula=4, measured=programs["4 buckets"], unit="programs"),
    Row("one length", formula=1, measured=programs["one length"], unit="programs"),
)

# %%
within("padding, one length", ways["one length"].waste(lengths), above=0.3)
within("padding, 4 buckets", ways["4 buckets"].waste(lengths), below=0.25)

# %% [markdown]
# **Pre-flight.** Our head picks the rows that have a label, which saves 85 % of its work where shapes may depend on data.
# Trainium would not have it:

# %%
from fmlab.backends.preflight import preflight

report = preflight(encoders.small_bert(), [encoders.masked_batch()] * 3, chip="trn2")
for finding in report.findings:
    if finding.severity != "note":
        print(finding.severity, "·", finding.check, "·", finding.where)

# %% [markdown]
# A compiled program takes all rows instead, and the loss ignores those without a label (`labelled_rows`). That is in the
# code, where you would put it for your model.

# %% [markdown]
# ## 11 · The full run: days and dollars
# BERT-large as NVIDIA trained it, by LAMB in two phases ([[3.1]] explains each line).

# %%
guess_days = predict("Both phases on one host of 8 H100: how many days?", unit="days")
guess_days

# %%
PHASES = [(7038, 65_536, 128), (1563, 32_768, 512)]  # steps, rows of a step, tokens of a row
CHIPS = {
    "8 A100": ("a100-80gb", 8, (256, 32), "p4de.24xlarge", 8),
    "8 H100": ("h100", 8, (256, 32), "p5.48xlarge", 8),
    "64 TPU v4": ("tpu-v4", 64, (128, 16), "tpu-v4-host", 64),
    "16 Trainium": ("trn1-core", 32, (16, 4), "trn1.32xlarge", 16),
    "16 Trainium2": ("trn2-core", 128, (32, 8), "trn2.48xlarge", 16),
}


# %%
def whole_run(chip: str, ranks: int, rows: tuple, host: str, chips: int):
    """(days, dollars) of both phases; dollars None where no price is known."""
    days = 0.0
    for (steps, batch, length), at_once in zip(PHASES, rows):
        layout = Layout(data=ranks, micro_batches=batch // (ranks * at_once))
        one = plan(
            "bert-large-uncased", chip=chip, layout=layout, global_batch=batch, seq_len=length
        )
        days += steps * one.step_seconds / 86_400
    price = encoders.hourly(host, chips)
    return days, None if price is None else 24 * days * price


# %%
reckoned = {name: whole_run(*how) for name, how in CHIPS.items()}
Table(
    {
        "machine": list(reckoned),
        "both phases": [days for days, _ in reckoned.values()],
        "run": ["no price known" if usd is None else usd for _, usd in reckoned.values()],
    },
    kinds={"both phases": "modelled", "run": "modelled"},
    units={"both phases": "days", "run": "USD"},
    title="On-demand or list prices, dated in fmlab.chips",
)

# %%
known = {run.id: run for run in published_runs()}
rates = [known[f"nvbert-a100-1nodes-{n}-mp"].sequences_second for n in (128, 512)]
days = sum(s * b / rate for (s, b, _), rate in zip(PHASES, rates)) / 86_400
compare(
    Row(
        "8 A100",
        formula=reckoned["8 A100"][0],
        quoted=days,
        unit="days",
        source="NVIDIA, BERT README",
    ),
    Row("8 H100", yours=guess_days, formula=reckoned["8 H100"][0], unit="days"),
)

# %% [markdown]
# Close, and partly by luck: the plan has fused attention, which 2020 had not, and rows of full length, which NVIDIA's were
# not. [[3.1]] takes that apart.

# %% [markdown]
# ## 12 · What breaks
# A ported encoder keeps the framework's epsilon (BERT 1e-12, PyTorch's default 1e-5). Where activations are small, that is
# not small:

# %%
tiny_values = torch.tensor([1e-3, -1e-3])
for eps in (1e-12, 1e-5):
    normed = torch.nn.functional.layer_norm(tiny_values, (2,), eps=eps)
    print(f"eps {eps:g}: {normed[0].item():.4f}")
for kind in ("none", "tanh"):
    print(
        f"gelu(1), {kind}: {torch.nn.functional.gelu(torch.ones(1), approximate=kind).item():.6f}"
    )

# %% [markdown]
# A padding mask laid over the **queries** hides nothing: padding is still read. Change one padded token, and watch a real
# one:

# %%
within(
    "the mask over keys, moved by", encoders.leak(long.float(), mask_of_rows=False), below=1e-6
)
within(
    "the mask over queries, moved by",
    encoders.leak(long.float(), mask_of_rows=True),
    above=1e-3,
)

# %% [markdown]
# Also met in the wild: a classifier in pure bf16 (F1 0.84 to 0.02, aws-neuron-sdk#667); a last batch of another size that
# compiles anew; weights with another vocabulary, which `--init` refuses.

# %% [markdown]
# ## 13 · From the shell
# All of it, resumable, with TensorBoard; `out/model` loads in transformers and runs in its pipelines:
#
# ```
# fmlab train bert-tiny --objective masked --seq-len 64 --out runs/bert --tensorboard
# fmlab train bert-tiny --init runs/bert/model --objective masked --seq-len 256 --out runs/bert-256
# fmlab train distilbert-tiny --teacher runs/bert/model --out runs/distilbert
# fmlab train bert-tiny --init runs/bert-256/model --objective classes --corpus docstrings --out runs/classes
# ```

# %% [markdown]
# ## Exercises
# ### Exercise 3.3.1 (core): who sees whom
# A packed row holds several documents, and padding.


# %% exercise="3.3.1"
def packed_mask(documents: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Return bool [b, l, l]: may query i (dim 1) see key j (dim 2)?

    documents: int64 [b, l], equal for the tokens of one document. real: bool [b, l], False for padding.
    A query sees the real tokens of its own document, before and behind it.
    """
    # BEGIN SOLUTION
    return (documents[:, :, None] == documents[:, None, :]) & real[:, None, :]
    # END SOLUTION


# %% check="3.3.1"
check("3.3.1", packed_mask)

# %% [markdown]
# ### Exercise 3.3.2 (core): the teacher's answers
# Soft cross-entropy with a temperature, as a divergence, so that it is 0 where the student agrees.


# %% exercise="3.3.2"
def distil_loss(
    student: torch.Tensor, teacher: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Return the mean over rows of temperature² · KL(teacher || student), both softened.

    student, teacher: logits [n, v]. Softened: divided by the temperature before the softmax.
    """
    # BEGIN SOLUTION
    log_p = (teacher / temperature).log_softmax(-1)
    log_q = (student / temperature).log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1).mean() * temperature**2
    # END SOLUTION


# %% check="3.3.2"
check("3.3.2", distil_loss)

# %% [markdown]
# ### Exercise 3.3.3 (optional): a share of the norm
# One step of LAMB on one matrix, after Adam's part.


# %% exercise="3.3.3"
def lamb_step(
    weight: torch.Tensor, update: torch.Tensor, lr: float, decay: float
) -> torch.Tensor:
    """Return the new weight. The step is update + decay · weight; it is scaled to lr · ‖weight‖.

    Where the norm of the weight or of the step is 0, the step is lr · step as it is.
    """
    # BEGIN SOLUTION
    step = update + decay * weight
    share = weight.norm() / step.norm()
    if weight.norm() == 0 or step.norm() == 0:
        share = 1.0
    return weight - lr * share * step
    # END SOLUTION


# %% check="3.3.3"
check("3.3.3", lamb_step)

# %% [markdown] tags=["reading"]
# ## Further reading
# - Devlin et al. 2019, *BERT*, arXiv:1810.04805: section 3.1 and appendix A.2.
# - Liu et al. 2019, *RoBERTa*, arXiv:1907.11692: section 4, the ablations; section 5, more data.
# - Sanh et al. 2019, *DistilBERT*, arXiv:1910.01108: sections 3 and 4.
# - You et al. 2019, *Large Batch Optimization for Deep Learning*, arXiv:1904.00962: algorithm 2, section 4.
# - Krell et al. 2021, *Efficient Sequence Packing without Cross-contamination*, arXiv:2107.02027: section 3.
