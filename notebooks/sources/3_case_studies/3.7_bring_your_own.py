# The last chapter: choose a chip by figures, then bring a model to it, each step with a check that can fail. Everything
# runs on this machine: chips are simulated or planned, ranks are real. A project is written to a temporary folder.

# %% [markdown]
# **You will learn** to choose a chip by figures, to evaluate without recompiling, and to bring a model of your own, with
# a check behind each step.

# %% tags=["setup"]
from fmlab import Ranks
from fmlab.backends.tpu_aot import results
from fmlab.chips import host
from fmlab.data import LengthBuckets
from fmlab.lab import Row, Table, bring, check, compare, predict, show_source, within
from fmlab.models.attention import FixedKVCache
from fmlab.parallel import Layout
from fmlab.planner import plan, run_cost, runs, search
from fmlab.project import Target

# %load_ext fmlab.lab

# %% [markdown]
# ## 1 · What would you buy?
# The job: Llama 2 7B, 10¹² tokens, batches of 1,024 rows of 4,096. The money: at most 520 dollars an hour, hosts in
# powers of two. The planner finds each offer's best layout.

# %%
guess_ratio = predict(
    "How many times as much as the cheapest offer does the dearest cost?", unit="x"
)
guess_ratio

# %%
JOB = dict(global_batch=1024, seq_len=4096)
OFFERS = {
    "p4de.24xlarge": "a100-80gb",
    "p5.48xlarge": "h100",
    "p6-b200.48xlarge": "b200",
    "tpu-v5p-host": "tpu-v5p",
    "tpu-v6e-host": "tpu-v6e",
    "trn1.32xlarge": "trn1-core",
}


# %%
def offer(name, chip, budget=520):
    """The best plan on as many hosts as the budget of an hour buys, a power of two, and its cost."""
    one = host(name)
    price = one.prices[0].usd_per_hour * (one.chips if one.prices[0].per == "chip" else 1)
    hosts = 1 << int(budget / price).bit_length() - 1
    best = search("llama2-7b", chip=chip, host=name, hosts=hosts, keep=1, **JOB).best
    chips = hosts * one.chips  # two ranks each, if Trainium
    return best, run_cost(best.step_seconds, best.tokens_per_step, 1e12, chips, host=name)


found = {name: offer(name, chip) for name, chip in OFFERS.items()}

# %%
usable = [run.chip for run in runs() if not run.cannot]
evidence = [usable.count(chip) for chip in OFFERS.values()]
Table(
    {"host": list(found), "ranks": [best.chips for best, _ in found.values()]}
    | {"days": [cost.days for _, cost in found.values()]}
    | {"dollars": [cost.usd / 1e3 for _, cost in found.values()]}
    | {"utilisation": [100 * best.mfu for best, _ in found.values()]}
    | {"published runs": evidence},
    kinds={"days": "modelled", "dollars": "modelled", "utilisation": "modelled"}
    | {"ranks": "given", "published runs": "quoted"},
    units={"days": "days", "dollars": "1000 USD", "utilisation": "%"},
    source="prices of fmlab.chips, dated; the published record in data/published",
    digits=3,
)

# %%
dollars = [cost.usd for _, cost in found.values()]
compare(
    Row("dearest over cheapest", guess_ratio, formula=max(dollars) / min(dollars), unit="x")
)

# %% [markdown]
# A plan knows prices and what published runs reached, not **your** software. Where the last column is small, ask somebody
# who ran there. Llama 3 70B on 16 hosts of Trainium, by a vendor's log:

# %%
theirs = next(run for run in runs() if run.id == "trn1-llama3-70B-nxdt")
shape = dict(tensor=32, pipeline=8, data=2, zero=1, sequence_parallel=True)
layout = Layout(**shape, micro_batches=512, recompute="selective")
there = dict(chip="trn1-core", host="trn1.32xlarge", chips=512)
ours = plan("llama3.1-70b", **there, layout=layout, global_batch=1024, seq_len=8192)
compare(
    Row(
        "a step of Llama 3 70B",
        formula=ours.step_seconds,
        quoted=theirs.step_seconds(),
        unit="s",
        source="AWS, neuronx-distributed-training, Llama 3 70B tutorial: the first four steps",
    )
)

# %% [markdown]
# Half as long again. So: shortlist by the plan, then buy **one hour** of each and measure one step.

# %% [markdown]
# ## 2 · Which chip, when?
#
# | You have | Look first at | Because |
# |---|---|---|
# | operators of your own, shapes that change | GPU | kernels by hand, eager without a penalty |
# | a plain transformer, one cloud, a price | Trainium, TPU | static shapes are no loss to it |
# | a thousand chips and more | TPU slices, GPU pods | links beyond the host: chapter [[1.10]] |
# | fp32 or fp64 | GPU | many matrix units know 16 bits alone: [[1.9]] |
# | sentences to score, each of another length | GPU, or buckets first | the next section |
# | a model you cannot change | what it was written for | porting costs weeks, not hours |

# %% [markdown]
# ## 3 · Evaluate without recompiling
# Whoever only *evaluates* meets static shapes first: every sentence has its own length. 24 sentences of Python's
# manual, scored one by one on a simulated Trainium2, which compiles each new graph.

# %%
show_source(bring, region="scored")

# %%
guess_programs = predict("How many programs for 24 sentences?", unit="programs")
guess_programs

# %%
guess_three = predict("And padded to three lengths?", unit="programs")
guess_three

# %%
rows = bring.sentences(24)
lengths = [len(row) - 1 for row in rows]
buckets = LengthBuckets((32, 55, 68))
loss, programs = bring.scored(rows)
same, few = bring.scored(rows, buckets)
within("difference of the two losses [nats/token]", abs(loss - same), below=1e-5)
print(f"{buckets.waste(lengths):.0%} of the positions are padding")
compare(
    Row("bare", guess_programs, len(set(lengths)), programs, unit="programs"),
    Row("three buckets", guess_three, 3, few, unit="programs"),
)

# %% [markdown]
# The loss is the same: padding has no label. Writing text is worse: a cache that grows by a token has a new shape at
# **each** token.

# %%
guess_written = predict("Programs for 24 tokens, with a cache that grows?", unit="programs")
guess_written

# %%
text, growing = bring.written(24, static_shapes=False)
again, fixed = bring.written(24, static_shapes=True)
assert text == again
compare(
    Row("a cache that grows", guess_written, 24, growing, unit="programs"),
    Row("a cache of fixed shapes", None, 2, fixed, unit="programs"),
)

# %% [markdown]
# One program reads the prompt, one writes every token: all keys are there from the start, the empty ones hidden, and the
# next one's place is a tensor, not a constant. So torch_xla counts too.

# %%
show_source(FixedKVCache.extend)

# %%
full = next(row for row in results() if row["model"] == "gpt2" and row["outcome"] == "compiled")
print(f"One program of {full['model']} for {full['target']}: {full['seconds']} s of compiling.")

# %% [markdown]
# ## 4 · A project of your own
# `fmlab new owl --chip trn2 --chips 64 --form slurm` writes it. The launch files are made by the project's own plan: if
# its model did not build or fit, there would be no project.

# %%
project = bring.write_project(Target("trn2", 64, form="slurm"))
for path in sorted(project.rglob("*.*")):
    if path.is_file() and "__pycache__" not in path.parts:
        print(path.relative_to(project))

# %%
print((project / "launch" / "run.toml").read_text())

# %% [markdown]
# Its model is a small decoder, to be replaced by yours. What the planner has to know of it:

# %%
owl = bring.import_project(project)
show_source(owl.plan.shape)

# %% [markdown]
# ## 5 · Five faults, five checks
# Now somebody changes the model. Five mistakes, one at a time. (`preflight` watches a few steps for what a chip of
# static shapes cannot do: [[#3.2]].)

# %%
show_source(bring, region="faults")

# %%
guess_loss = predict("Of the five, how many does a falling loss find?", unit="faults")
guess_loss

# %%
guess_best = predict("And the best single check?", unit="faults")
guess_best

# %%
show_source(bring, region="checks")

# %%
said = {}
with Ranks(2) as ranks:
    for fault in (None, *bring.FAULTS):
        package = bring.import_project(project, fault)
        said[fault or "none"] = bring.found_by(package, ranks)

# %%
Table(
    {"fault": list(said)}
    | {name: ["found" if said[fault][name] else "" for fault in said] for name in bring.CHECKS}
)

# %%
finds = {name: sum(bool(said[fault][name]) for fault in bring.FAULTS) for name in bring.CHECKS}
compare(
    Row("a falling loss", guess_loss, measured=finds["loss falls"], unit="faults"),
    Row("the best check", guess_best, measured=max(finds.values()), unit="faults"),
    Row(
        "all five checks",
        measured=sum(any(said[f].values()) for f in bring.FAULTS),
        unit="faults",
    ),
)

# %% [markdown]
# All five models train, and the loss falls. No check finds more than two; together they find all. What two of them say:

# %%
print(said["heads of the config"]["parity"].splitlines()[1])
print(said["layer too many"]["shape"])

# %% [markdown]
# ## 6 · Launch
# The project's README leads through the steps. What starts the run:

# %%
print((project / "launch" / "job.sbatch").read_text().split("pipefail\n")[1])

# %% [markdown]
# ## The checklist
# 1. `pytest` in the project.
# 2. `fmlab preflight` with your **real** loader.
# 3. A step on `sim:` the chip; the plan fits.
# 4. On the chip: ten losses against the CPU's, a step against the plan, kill and resume.

# %% [markdown]
# ## 7 · 2023 and today
# In 2023 a port meant PyTorch/XLA: `xla_device`, `mark_step`, another launcher. AWS ended XLA training with Neuron 2.30;
# torch_xla's last release is 2.9. TorchNeuron and TorchTPU are eager devices ([[3.2]]).

# %% [markdown]
# What stayed: static shapes, compile caches, precision, layouts, proof. TorchNeuron runs on Trn2 and Trn3 alone: Trn1,
# cheap as it looks in section 1, keeps the old software. **No plan shows that.**

# %% [markdown]
# ## Exercises
# ### Exercise 3.7.1 (core): accept the port, or say why not
# First steps on the chip came back. Decide as a reviewer would.


# %% exercise="3.7.1"
def refuse(
    cpu: list[float], chip: list[float], seconds: list[float], planned: float
) -> list[str]:
    """Return the reasons to refuse a port, in this order; an empty list accepts it.

    "losses":    any of the chip's losses is more than 1 % off the CPU's, is no number, or is missing.
    "slow":      the median of the steps after the first three (they compile) is above 1.3 x planned.
    "recompile": a step after the first three takes more than 5 x that median.

    cpu, chip: losses of the same steps. seconds: of each step on the chip, at least five. planned: of a step.
    """
    # BEGIN SOLUTION
    reasons = []
    pairs = list(zip(cpu, chip))
    if len(chip) < len(cpu) or not all(abs(b - a) <= 0.01 * abs(a) for a, b in pairs):
        reasons.append("losses")
    steady = sorted(seconds[3:])
    half = len(steady) // 2
    median = steady[half] if len(steady) % 2 else (steady[half - 1] + steady[half]) / 2
    if median > 1.3 * planned:
        reasons.append("slow")
    if steady[-1] > 5 * median:
        reasons.append("recompile")
    return reasons
    # END SOLUTION


# %% check="3.7.1"
check("3.7.1", refuse)

# %% [markdown]
# ### Exercise 3.7.2 (core): at what utilisation does another chip pay?
# You know what a step costs on your chips. The others have a peak and a price; only their utilisation is unknown.


# %% exercise="3.7.2"
def break_even(
    step_seconds: float, usd_per_hour: float, flops: float, peak: float, price: float
) -> float:
    """Return the utilisation at which a step costs the same on the other chips.

    step_seconds, usd_per_hour: of a step on all of your chips together, and their price.
    flops: of the step. peak [FLOP/s], price [USD/hour]: of all of the other chips together.

    Above 1 means that they can never pay.
    """
    # BEGIN SOLUTION
    return flops * price / (peak * step_seconds * usd_per_hour)
    # END SOLUTION


# %% check="3.7.2"
check("3.7.2", break_even)

# %% [markdown]
# The job of section 1, planned on H100s, against Trainium:

# %% uses="3.7.2"
mine, cost = found["p5.48xlarge"]
other, their_cost = found["trn1.32xlarge"]
hourly = [one.usd / (one.seconds / 3600) for one in (cost, their_cost)]
flops = mine.mfu * mine.step_seconds * mine.chips * mine.machine.chip.peak_flops("bf16")
peak = other.chips * other.machine.chip.peak_flops("bf16")
needed = break_even(mine.step_seconds, hourly[0], flops, peak, hourly[1])
print(f"Trainium pays from a utilisation of {needed:.0%}; planned are {other.mfu:.0%}")

# %% [markdown]
# Close, and by section 1 the run that was published was half as long again as its plan: measure before you buy.

# %% [markdown]
# ### Exercise 3.7.3 (optional): when is the port paid?
# Porting takes weeks of somebody's time, and each run is then cheaper, or not.


# %% exercise="3.7.3"
def runs_until_paid(
    porting: float, here: float, there: float, failed: float = 0.0
) -> int | None:
    """Return after how many runs the port has paid for itself: the least whole number, None for never.

    porting: dollars once. here, there: dollars of a run. failed: the share of the runs there that must be
    done again, and fail no second time. A port that costs nothing is paid after 0 runs.
    """
    # BEGIN SOLUTION
    saved = here - there * (1 + failed)
    if porting <= 0:
        return 0
    if saved <= 0:
        return None
    count = int(porting // saved)
    return count if count * saved >= porting else count + 1
    # END SOLUTION


# %% check="3.7.3"
check("3.7.3", runs_until_paid)

# %% [markdown]
# ## What next
# `fmlab new` on a model of yours, with `docs/bring-your-own-model.md`; two ports as projects in `examples/`; and the
# chapters that a shorter path left out.

# %% [markdown] tags=["reading"]
# ## Further reading
# - Solanki et al. 2024, *Distributed Training of Large Language Models on AWS Trainium*, SoCC: the abstract's claims.
# - Pope et al. 2022, *Efficiently Scaling Transformer Inference*, arXiv:2211.05102: section 3.
# - Jouppi et al. 2023, *TPU v4*, arXiv:2304.01433: sections 2 and 7.
# - AWS Neuron documentation, *What is TorchNeuron?* and the notes of release 2.30; PyTorch/XLA, releases: section 7, quoted.
# - `docs/bring-your-own-model.md` here: what each layout asks of a model.
