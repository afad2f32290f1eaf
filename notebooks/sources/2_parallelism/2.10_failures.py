# Hangs are ended by short time limits (`-t 3`); what a hung rank is doing then differs from run to run, so that
# those cells are tagged `timing`, and what they say is compared where the flight recorder is read.

# %% [markdown]
# **You will learn** to name the rank, the call and the cause when training stops, or goes on and learns nonsense.

# %% tags=["setup"]
import math
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp

import torch
import torch.distributed as dist
from fmlab import RankError, Ranks
from fmlab.data import LengthBuckets
from fmlab.lab import Row, Table, caption, check, compare, failures, figure, predict
from fmlab.lab.hangs import verdict_of
from fmlab.lab.source import show_source
from fmlab.planner import goodput_at, optimal_interval
from fmlab.planner.goodput import LLAMA3
from fmlab.train import TrainConfig, checkpoints

# %load_ext fmlab.lab

# %% [markdown]
# ## 1 · What people saw
# Ten ways in which training failed for somebody, with where it is told: repository and number of the thread.

# %%
names, symptoms, places = zip(*failures.SEEN, strict=True)
Table(
    {"failure": names, "what was seen": symptoms, "seen at": places},
    kinds={"what was seen": "quoted"},
    source="the threads named",
)

# %% [markdown]
# We break training in each of these ways, on real ranks or a simulated chip. The question is always the same: what
# do you see, what tells you more, what is the fix?

# %% [markdown]
# ## 2 · Swapped sends
# Ranks 0 and 1 exchange tensors, and so do 2 and 3. Both send first:


# %%
def swapped_sends():
    partner = dist.get_rank() ^ 1  # 1, 0, 3, 2
    mine, theirs = torch.ones(1000), torch.empty(1000)
    dist.send(mine, partner)
    dist.recv(theirs, partner)


# %% tags=["raises-exception", "timing"]
# %%ranks 4 -t 3
swapped_sends()

# %% [markdown]
# A send waits until the other side receives, and that never comes. On a cluster you see nothing for ten minutes, NCCL's
# time limit. Here `-t 3` ends the wait after 3 seconds, and each rank is asked where it is.

# %% [markdown]
# **The fix**: hand over both at once, and let the library order them.

# %%
# %%ranks 4
partner = rank ^ 1
mine, theirs = torch.full((1000,), float(rank)), torch.empty(1000)
both = [dist.P2POp(dist.irecv, theirs, partner), dist.P2POp(dist.isend, mine, partner)]
for one in dist.batch_isend_irecv(both):
    one.wait()
int(theirs.unique())

# %% [markdown]
# ## 3 · A rank that skips a collective, or adds one
# Every rank of a group must enter the same collectives in the same order, and saving calls some, too. "Only rank 0 needs
# to save", somebody thought:


# %%
def saved_by_one():
    for step in range(3):
        dist.all_reduce(torch.ones(4))
        if dist.get_rank() == 0 and step == 1:
            dist.barrier()  # part of saving


# %% tags=["raises-exception", "timing"]
# %%ranks 4 -t 3
saved_by_one()

# %% [markdown]
# Four ranks wait, and all look equally guilty. The one that does what no other does is to blame. **The fix**: all ranks
# call `save`; one of them writes.

# %% [markdown]
# ## 4 · Uneven batches
# 50 rows on 4 ranks; each takes every fourth row, in batches of 2. A step has an all-reduce.


# %%
def uneven_batches():
    mine = range(dist.get_rank(), 50, 4)
    for _ in range(0, len(mine), 2):
        dist.all_reduce(torch.ones(4))


# %%
guess_step = predict("In which step does it hang?", unit="1")
guess_step

# %% [markdown]
# ## 5 · The flight recorder
# Each rank keeps its last calls, with lines of code: a **flight recorder**. Every open call waits for ranks. Follow them:
# you come to one that waits for nobody, or you go in a circle.

# %%
# %ranks close

# %%
with Ranks(4) as ranks:
    hangs = {
        hang.__name__: verdict_of(hang, ranks)
        for hang in (swapped_sends, saved_by_one, uneven_batches)
    }
for name, found in hangs.items():
    print(f"{name}: {found.kind}, ranks {found.ranks}\n   {found.headline}\n")

# %%
number = int(hangs["uneven_batches"].headline.split("#")[1].split()[0])
compare(
    "hangs in step",
    yours=guess_step,
    formula=50 // 4 // 2 + 1,
    measured=number - 1,  # the ranks met in one collective before
    unit="1",
)

# %% [markdown]
# Ranks 0 and 1 have one row more than the others, which makes a batch. **The fix**: the same number for all, filled up
# (exercise 2.10.2). Under torchrun, `fmlab train` writes such a verdict after `--collective-timeout`.

# %% [markdown]
# ## 6 · A seed for each rank
# Now failures that nobody hears. Each rank shuffles 1,000 rows and reads every fourth of its own order. Seeds should
# differ between ranks, somebody thought:

# %%
guess_unread = predict("How many of the 1,000 rows does nobody read?", unit="rows")
guess_unread


# %%
# %%ranks 4 -o read
def reads(seed):
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(seed))
    times = torch.zeros(1000)
    times[order[rank::4]] += 1
    dist.all_reduce(times)
    return int((times == 0).sum()), int((times > 1).sum())


reads(seed=rank), reads(seed=0)

# %%
own, one = read[0]
compare(
    Row("read by nobody", guess_unread, formula=1000 * 0.75**4, measured=own[0], unit="rows"),
    Row("read twice or more", formula=1000 * 67 / 256, measured=own[1], unit="rows"),
    Row("read by nobody, one seed", formula=0, measured=one[0], unit="rows"),
)

# %% [markdown]
# A third of the data is lost, and the loss falls all the same. **The tool** is the sum above: count how often each row is
# read. **The fix**: an order that is a function of seed and epoch alone.

# %% [markdown]
# ## 7 · Out of memory, by logits
# The head of a vocabulary of 248,320, trained on 12 rows of 4,096 tokens, on one H100 with 80 GiB. Its weights take 4 GB.

# %%
guess_logits = predict("How large are the logits in fp32?", unit="GB")
guess_logits

# %%
from fmlab.sim import simulate

head = dict(rows=12 * 4096, vocab=248_320, width=4096)
(chip,) = simulate("h100", dry=True)  # shapes only: no numbers
try:
    failures.loss_of_logits(chip.device, **head, whole=True)
except torch.OutOfMemoryError as error:
    wanted, report = error.wanted, str(error)
print(report.replace(": ", ":\n", 1).split(". Largest")[0])

# %% [markdown]
# The error names the operator and the largest tensors. **The fix**: a loss that never holds the logits, a few rows at a
# time. Or fewer rows in a micro-batch, or a vocabulary that is divided ([[#2.5]]).

# %%
chip.memory.reset_peak()
failures.loss_of_logits(chip.device, **head, whole=False)
logits = 4 * head["rows"] * head["vocab"] / 1e9
weights = 4 * (head["rows"] + head["vocab"]) * head["width"] / 1e9
compare(
    Row("logits", guess_logits, formula=logits, measured=wanted / 1e9, unit="GB"),
    Row("peak, rows by rows", formula=2 * weights, measured=chip.memory.peak / 1e9, unit="GB"),
)

# %% [markdown]
# ## 8 · Out of memory, by fragmentation
# Memory comes from an **allocator**, which keeps what the chip gave. A small model of PyTorch's:

# %%
show_source(failures, "allocator")

# %% [markdown]
# Sums do not matter to it: a tensor needs *one* piece. The first step makes the logits (40 GiB) and frees them. Then
# AdamW makes its moments. Where do they go?


# %%
def first_step(moments_first: bool) -> failures.Allocator:
    memory = failures.Allocator(80)
    memory.allocate("weights", 10)
    memory.allocate("gradients", 10)
    if moments_first:
        memory.allocate("moments", 20)
    memory.allocate("logits", 40)
    memory.free("logits")
    if not moments_first:
        memory.allocate("moments", 20)
    return memory


# %%
guess_free = predict("The second step asks for 40 GiB again. How many are free?", unit="GiB")
guess_free

# %%
memory = first_step(moments_first=False)
try:
    memory.allocate("logits", 40)
except torch.OutOfMemoryError as error:
    print(error)
compare(
    Row("free", guess_free, formula=sum(memory.pieces), unit="GiB"),
    Row("largest free piece", formula=max(memory.pieces), unit="GiB"),
)

# %%
fixed = first_step(moments_first=True)
fixed.allocate("logits", 40)
fig, ax = figure(x="memory of the chip [GiB]", y="run [number]", title="The second step")
failures.draw_memory(ax, {"as it comes": memory, "moments first": fixed})
numbers = {"pieces": str(memory.pieces), "moments first": str(fixed.pieces)}
text = "The moments took half of the piece where the logits had been. Made first, they do not."
caption(fig, kind="modelled", text=text, numbers=numbers)

# %% [markdown]
# **The sign**: an error that says *reserved but unallocated*. **The fix**: what stays is made before what goes; equal
# lengths; or segments that grow, `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`.

# %% [markdown]
# ## 9 · NaN in fp16
# In T5 some activations grow to 66,246 (section 1). Our GPT has one such MLP. fp16 ends at 65,504; bf16 has fp32's
# range and fewer digits.

# %%
batch = failures.rows(4, 32)
trained = {}
for name in (None, "fp16-scaled", "bf16-autocast"):
    result = failures.hot_engine(name).step([batch])
    trained[name or "fp32"] = (round(result.loss, 2), not result.skipped)

# %%
losses, updates = zip(*trained.values(), strict=True)
largest = failures.largest_output(failures.hot_engine(), batch)
print(f"the MLP's largest output in fp32: about {round(largest, -3):,.0f}")
Table(
    {"numbers": list(trained), "loss": losses, "updated": updates},
    kinds={"loss": "measured", "updated": "measured"},
)

# %% [markdown]
# No error. fp16 comes with a **loss scale**; a step that overflows is skipped and halves it. **The sign** is a scale that
# only falls. **The tool** runs the step again, and watches each module:

# %%
from fmlab.train import not_finite

show_source(not_finite._watched)

# %%
engine = failures.hot_engine("fp16-scaled")
scales = []
for _ in range(4):
    engine.step([batch])
    scales.append(int(engine.scaler.scale))
print("scales:", scales)
print(not_finite.first_not_finite(engine, [batch]))

# %% [markdown]
# `fmlab train --on-bad-step stop` ends with that sentence. **The fix**: bf16. A smaller loss scale would not help: it is
# the *forward* pass that overflows.

# %% [markdown]
# ## 10 · A new shape a step
# A compiler of static shapes makes a program for each shape ([[#1.11]]). Sixteen batches, each as long as its longest row,
# on a simulated Trainium:

# %%
lengths = [17, 23, 31, 42, 23, 55, 26, 33, 51, 29, 19, 38, 42, 45, 49, 36]
guess_programs = predict("How many programs does it compile?", unit="programs")
guess_programs

# %%
buckets = LengthBuckets((32, 48, 64))
compare(
    Row(
        "as they come",
        guess_programs,
        formula=len(set(lengths)),
        measured=failures.programs(lengths),
        unit="programs",
    ),
    Row(
        "in 3 buckets", formula=3, measured=failures.programs(lengths, buckets), unit="programs"
    ),
)

# %% [markdown]
# **The sign**: steps that take minutes, again and again, on idle chips. **The tool**: `fmlab preflight`, which counts
# shapes before the run. **The fix**: buckets, and no short last batch.

# %% [markdown]
# ## 11 · A torn checkpoint
# The disk is full, the power goes, a bit flips. First, what `torch.save` and `torch.load` make of it:

# %%
home = Path(mkdtemp(prefix="fmlab-"))
weights = failures.small_gpt().state_dict()

torch.save(weights, home / "model.pt")
failures.damage_file(home / "model.pt")  # one bit
loaded = torch.load(home / "model.pt")
print("loaded; differ:", [name for name in weights if not loaded[name].equal(weights[name])])

whole = (home / "model.pt").read_bytes()
(home / "model.pt").write_bytes(whole[: len(whole) // 2])
try:
    torch.load(home / "model.pt")
except RuntimeError as error:
    print(str(error).split(".")[0])

# %% [markdown]
# Half a file is refused with words that help nobody. A flipped bit is **loaded without a word**. Now a run of ours, with a
# checkpoint every three steps, and the last one damaged:

# %%
short = dict(steps=8, batch_size=8, seq_len=32, eval_every=0, log_every=0)
config = TrainConfig(**short, save_every=3, keep=9, out=str(home / "run"))
alone, _ = failures.losses_of(config)
failures.damage_file(home / "run" / "steps" / "000008" / "model.safetensors")
for found in checkpoints.find(config.out):
    print(f"step {found.step}: {found.damage.replace(config.out, 'run') or 'whole'}")

# %%
guess_from = predict("After `--resume`, which step is made first?", unit="1")
guess_from

# %%
again, said = failures.losses_of(replace(config, resume=True))
print(said[0])
print("losses of all steps are bitwise the same:", again == alone)
went_on_at = checkpoints.find(config.out)[1].step + 1
compare("first step", yours=guess_from, formula=7, measured=went_on_at, unit="1")

# %% [markdown]
# Every file has its size and SHA-256 in a manifest, and is written beside its place, then moved there. `fmlab checkpoints
# FOLDER` is the command.

# %% [markdown]
# ## 12 · A dead host
# Ranks 2 and 3 are a host. It loses its power after step 5:

# %%
guess_lost = predict("Saved every three steps: how many steps are made twice?", unit="steps")
guess_lost

# %%
config = replace(config, out=str(home / "two hosts"))
with Ranks(4, timeout=120) as ranks:
    dead = failures.HostDies(pids=ranks.pids[2:], after=5)
    try:
        ranks.run(failures.losses_of, config, callbacks=[dead])
    except RankError as error:
        print(error.report()[0])
saved = checkpoints.find(config.out)[-1].step

# %% [markdown]
# Nobody waits for the dead. Two ranks are left; the checkpoint does not depend on how many there are:

# %%
with Ranks(2, timeout=120) as ranks:
    after, said = ranks.run(failures.losses_of, replace(config, resume=True))[0]
print("warned:", said[0].split(" (")[0])
off = max(abs(a - b) for a, b in zip(after, alone, strict=True))
print(f"{len(after)} losses, all within 1e-4 of those of one rank alone: {off < 1e-4}")
compare("made twice", yours=guess_lost, formula=5 % 3, measured=5 - saved, unit="steps")

# %% [markdown]
# **In earnest** nobody restarts by hand: under `torchrun --nnodes 1:4 --max-restarts 20`, `fmlab train` goes on by itself on
# the hosts that are left, and says what that took (`docs/failures.md`).

# %% [markdown]
# ## 13 · A bit flips, and nobody notices
# A chip computes wrong, once. Llama 3 met six such in 54 days. We flip each of the 32 bits of one weight of about 0.02:

# %%
guess_loud = predict(
    "Of the 32 flips, how many change the loss by more than 1 %?", unit="flips"
)
guess_loud

# %%
model = failures.small_gpt()
weight = model.blocks[2].mlp.up.weight
index = int((weight.detach().abs() - 0.02).abs().argmin())


@torch.no_grad()
def loss():
    return model(**batch)["loss_sum"].item() / batch["labels"].numel()


# %%
right, loud = loss(), []
for bit in range(32):
    failures.flip_bit(weight, index, bit)
    changed = loss()
    if not abs(changed - right) < 0.01 * right:
        loud.append(f"bit {bit}: loss {changed}")
    failures.flip_bit(weight, index, bit)
print(loud)
compare("loud flips", yours=guess_loud, measured=len(loud), unit="flips")

# %% [markdown]
# Bit 30, the top of the exponent, makes 0.02 a number of 37 digits. The other 31 train on in silence. But **replicas must
# be equal, bit by bit**, and of three or more the odd one out is wrong:

# %%
# %%ranks 4
from fmlab.objectives import CausalLM
from fmlab.parallel import Layout, parallelize
from fmlab.train import adamw
from fmlab.train.replicas import differences

engine = parallelize(failures.small_gpt(), Layout(data=4), CausalLM(), adamw(1e-3))
if rank == 2:
    failures.flip_bit(engine.model.blocks[2].mlp.up.weight, 77, bit=3)
[(str(one), one.suspects) for one in differences(engine)]

# %%
from fmlab.train import replicas

show_source(replicas.differences)

# %% [markdown]
# A digest of each tensor, one message: `fmlab train --compare-replicas 100` does it every 100 steps and before each
# checkpoint, and ends the run with the suspects' names.

# %% [markdown]
# ## 14 · Goodput
# **Goodput** is the share of time in which new training is done. Llama 3's chips failed once in 50,677 hours each, quoted: 5.8
# years. There were 16,384.

# %%
guess_hours = predict("How many hours lie between two failures of the run?", unit="hours")
guess_hours

# %%
guess_goodput = predict(
    "A checkpoint stops it for 60 s, a restart takes 10 minutes. Its goodput, at best?",
    unit="%",
)
guess_goodput

# %%
show_source(failures, "replayed")

# %%
mean = LLAMA3.mean_seconds(16_384)
best = optimal_interval(60, mean)  # Daly 2006
year = 365 * 86_400
compare(
    Row("between failures", guess_hours, formula=mean / 3600, unit="hours", digits=2),
    Row("best interval", formula=best / 60, unit="minutes", digits=2),
    Row(
        "goodput",
        guess_goodput,
        formula=100 * goodput_at(best, 60, mean, restart=600).share,
        measured=100 * failures.replayed(10 * year, best, 60, 600, mean),
        unit="%",
        digits=2,
    ),
)

# %% [markdown]
# *Measured* is ten years of failures drawn at random: Daly's formula foresees them. What pays? A faster restart, or a
# checkpoint that stops the run less (written beside the next steps, `--async-save`):

# %%
stops, restarts = (60, 10, 1), (600, 180, 60)
table = {"the run stops for": [f"{stop} s" for stop in stops]}
for restart in restarts:
    shares = [goodput_at(optimal_interval(s, mean), s, mean, restart).share for s in stops]
    table[f"restart in {restart} s"] = [100 * share for share in shares]
Table(
    table,
    kinds=dict.fromkeys(list(table)[1:], "modelled"),
    units=dict.fromkeys(list(table)[1:], "%"),
)

# %% [markdown]
# Llama 3 reports "higher than 90 %" (quoted, section 3.3.4): both must be short. More intervals, and smaller runs, are
# in [[#3.1]].

# %% [markdown]
# ## 15 · What production does
# What interrupted Llama 3, 419 times in 54 days. (The paper prints 30.1 % for the first line; 148 of 419 are 35.3 %.)

# %%
causes, times = zip(*failures.LLAMA3_CAUSES, strict=True)
Table(
    {"cause": causes, "times": times, "share": [100 * n / 419 for n in times]},
    kinds={"times": "quoted", "share": "modelled"},
    units={"share": "%"},
    source="Llama 3, table 5",
)

# %% [markdown]
# | Failure | First sign | What names it | In production |
# |---|---|---|---|
# | hang | no step for minutes | last calls of each rank | NCCL's flight recorder, `torchfrtrace` |
# | other data, other seeds | none | compare what ranks read | a sampler of (seed, epoch) |
# | out of memory | an error | the allocator's pieces | `torch.cuda.memory._snapshot()` |
# | NaN | the loss | the first module | Megatron's `rerun_state_machine.py` |
# | new shapes | slow steps | a count of programs | TPU and Neuron caches |
# | torn file | at the restart | a checksum | safetensors with a manifest |
# | dead host | an error, or a hang | its missing heartbeat | `torchrun --nnodes 3:4 --max-restarts 9` |
# | flipped bit | none | replicas compared | the step made twice: Megatron again |

# %% [markdown]
# ## Exercises
# ### Exercise 2.10.1 (core): name the culprit
# You have the last calls of every rank, as a flight recorder keeps them. Who is to blame?


# %% exercise="2.10.1"
def culprits(calls: list[list[str]]) -> list[int]:
    """Return the ranks to blame for a hang, in ascending order; [] if all made the same calls.

    calls[r]: the collectives that rank r has entered, in order. Look at the first place where not
    all ranks did the same; a rank whose list has ended did nothing there. What most of them did
    is right, and the others are to blame. On a tie a call is right rather than nothing, and of
    two calls that of the lower rank.
    """
    # BEGIN SOLUTION
    for place in range(max(map(len, calls))):
        did = [mine[place] if place < len(mine) else "" for mine in calls]
        if len(set(did)) > 1:
            right = max(set(did), key=lambda one: (did.count(one), one != "", -did.index(one)))
            return [rank for rank, one in enumerate(did) if one != right]
    return []
    # END SOLUTION


# %% check="2.10.1"
check("2.10.1", culprits)

# %% [markdown]
# ### Exercise 2.10.2 (core): the last batches
# Make section 4 safe, lose no row, read none twice, and keep one shape.


# %% exercise="2.10.2"
def batches_of(rows: int, ranks: int, size: int, rank: int) -> list[list[int]]:
    """Return the batches of row numbers (0 to rows - 1) of this rank.

    Every batch has `size` entries. Every rank has the same number of batches, as few as possible.
    Over all ranks each row comes once. Where rows are missing, -1 stands for one without targets.
    """
    # BEGIN SOLUTION
    steps = -(-rows // (ranks * size))
    firsts = [(step * ranks + rank) * size for step in range(steps)]
    return [[i if i < rows else -1 for i in range(first, first + size)] for first in firsts]
    # END SOLUTION


# %% check="2.10.2"
check("2.10.2", batches_of)

# %% [markdown]
# ### Exercise 2.10.3 (optional): the checkpoint interval
# A small run has told you how often chips fail. Plan a larger one.


# %% exercise="2.10.3"
def steps_between(
    failures: int, hours: float, chips: int, planned: int, stop: float, step: float
) -> int:
    """Return after how many steps (at least 1) a run on `planned` chips should save.

    failures: of a run on `chips` chips that took `hours`. stop: seconds for which training stands
    still while it saves. step: seconds of a step of the planned run. Take Young's interval, the
    square root of 2 x stop x (seconds between failures of the planned run), to the nearest step.
    """
    # BEGIN SOLUTION
    between = hours * 3600 / failures * chips / planned
    return max(1, round(math.sqrt(2 * stop * between) / step))
    # END SOLUTION


# %% check="2.10.3"
check("2.10.3", steps_between)

# %% [markdown] tags=["reading"]
# ## Further reading
# - Llama team 2024, *The Llama 3 Herd of Models*, arXiv:2407.21783, section 3.3.4: failures of 16,384 chips.
# - Jiang et al. 2024, *MegaScale*, arXiv:2402.15627, section 4: heartbeats, diagnosis, stragglers.
# - Dixit et al. 2021, *Silent Data Corruptions at Scale*, arXiv:2102.11245: how a processor computes wrong.
# - Young 1974, *A first order approximation to the optimum checkpoint interval*, CACM 17(9); Daly 2006, *A higher order
#   estimate*, Future Generation Computer Systems 22.
# - Micikevicius et al. 2017, *Mixed Precision Training*, arXiv:1710.03740, section 3: loss scaling.
