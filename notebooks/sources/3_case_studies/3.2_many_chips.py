# One program on many devices, in the main kernel: torch_xla runs in a process of .venv-xla where that is there, and its
# committed losses stand in elsewhere. Results for TPUs are committed (fmlab/backends/tpu_aot/results.csv).

# %% [markdown]
# **You will learn** what of a training program changes with the chip, and how to find it before you have one.

# %% tags=["setup"]
import torch
import torch.nn.functional as F
from fmlab.backends import get_backend
from fmlab.backends.preflight import preflight, signatures
from fmlab.backends.tpu_aot import results
from fmlab.lab import Row, Table, check, compare, porting, predict, show_source, within
from fmlab.models.attention import core
from torch import nn

# %load_ext fmlab.lab

# %% [markdown]
# ## 1 · One program
# Here is a whole training program. The chip appears in **one** place: the name given to `get_backend`.

# %%
show_source(porting, region="program")

# %% [markdown]
# A chip of 2023 would have changed most of these lines: `xm.xla_device`, `mark_step`, `xm.optimizer_step`, a sampler of
# its own. The backend keeps what is left: where a step ends, and how tensors move.

# %%
guess_loss = predict(
    "The same weights and batches on four devices. How far apart are the losses?",
    unit="nats/token",
)
guess_loss

# %%
losses, modelled, execution = {"cpu": porting.training_losses("cpu")}, {}, {}
for name in ("sim:h100", "sim:trn2", "sim:tpu-v5e"):
    losses[name] = porting.training_losses(name)
    modelled[name] = get_backend(name).chip.seconds / 3 * 1e6
    execution[name] = "compiled" if get_backend(name).chip.compiled else "eager"
apart = max(abs(a - b) for found in losses.values() for a, b in zip(found, losses["cpu"]))
within("largest difference from the CPU [nats/token]", apart, below=5e-3)
compare(Row("furthest apart", yours=guess_loss, measured=apart, unit="nats/token", noisy=True))

# %% [markdown]
# The simulated chips compute on this CPU: in fp32 its numbers, bit for bit (section 9). Here, in bf16, **our** attention
# takes a path in fp32 on CPUs alone while it learns, so the last bits differ:

# %%
show_source(core._better_in_fp32)

# %% [markdown]
# What is the chip's own is **time**, and that is modelled, each chip as its software works by default: CUDA operator by
# operator, the others as compiled programs.

# %%
Table(
    {"chip": list(modelled), "execution": list(execution.values())}
    | {"a step": list(modelled.values())},
    kinds={"a step": "modelled"},
    units={"a step": "µs"},
    digits=2,
)

# %% [markdown]
# Two rows of 64 tokens are far too little to fill any of them, and eager is not compiled. Do not rank chips by this;
# chapter [[#1.9]] shows how.

# %% [markdown]
# ## 2 · A lazy device
# On `torch_xla` the very same function notes operations down, and `backend.step()` runs them. It needs PyTorch 2.9, so it
# runs in an environment of its own, as another process.

# %% tags=["timing"]
lazy, made = porting.xla_losses()
print(made)

# %%
apart = max(abs(a - b) for a, b in zip(lazy, losses["cpu"]))
within("torch_xla against the CPU [nats/token]", apart, below=2e-2)

# %% [markdown]
# ## 3 · A TPU that is not here
# Google publishes the TPU's compiler. It compiles our step, forward to AdamW, without a TPU, and says how much of the
# chip's memory the program takes. We ran it; the results are committed, with their command.

# %%
guess_state = predict(
    "gpt2-tiny has 1,350,400 weights. MiB of weights and AdamW state?", unit="MiB"
)
guess_state

# %%
rows = [row for row in results() if row["outcome"] == "compiled"]
columns = {"state": "arguments", "between": "temporaries", "code": "code", "all": "hbm_bytes"}
Table(
    {"step": [f"{row['model']}, {row['batch']} x {row['seq_len']}" for row in rows]}
    | {"for": [row["target"].split(":")[0] for row in rows]}
    | {"device": [row["device"] for row in rows]}
    | {name: [int(row[key]) / 2**20 for row in rows] for name, key in columns.items()},
    kinds={name: "quoted" for name in columns},
    units={name: "MiB" for name in columns},
    source="our own run of Google's compiler, libtpu 0.0.52, by fmlab aot",
    digits=4,
)

# %% [markdown]
# The parts sum to "all", up to 3 kB. v5e, v5p, v6e are to the compiler "TPU v5 lite", "TPU v5", "TPU v6 lite". "Quoted"
# is what it said to us; nothing was run on a TPU.

# %%
tiny = next(row for row in rows if row["model"] == "gpt2-tiny")
compare(
    Row(
        "weights and AdamW",
        yours=guess_state,
        formula=12 * 1_350_400 / 2**20,
        quoted=int(tiny["arguments"]) / 2**20,
        source=f"our run of the compiler: {tiny['versions']}",
        unit="MiB",
    )
)

# %% [markdown]
# Three fp32 numbers a weight: 12 bytes. The gradient lives only inside the step. Too large a batch is refused before it
# ever runs, by the compiler's own out-of-memory:

# %%
refused = next(row for row in results() if row["outcome"] != "compiled")
print(refused["model"], refused["batch"], "x", refused["seq_len"], "on", refused["target"])
print(refused["outcome"])
print(refused["command"])

# %% [markdown]
# ## 4 · What native stacks changed
#
# | | torch_xla (2019-2025) | TorchNeuron | TorchTPU |
# |---|---|---|---|
# | package read | torch_xla 2.9 | torch-neuronx 2.13.3, 2.14.3 (SDK: Neuron 2.33) | torch-tpu 0.2 |
# | device | `xla` | `neuron` | `tpu` |
# | eager | no, lazy | yes | yes |
# | end of a step | `torch_xla.sync()` | nothing | nothing |
# | compile | always | `backend="neuron"` | backend left out |
# | dynamic shapes | no | refused | off by default |
# | memory counters | few | after `synchronize` | none public |
# | process group | `xla`, or SPMD | `neuron` | `tpu_dist` |
# | chips | TPU, Trn1 | Trn2, Trn3 | TPU v4-v7 |

# %% [markdown]
# Read from the vendors' documentation and packages; **none of it was run on such hardware here**. One thing stays: each
# new shape is a new program, compiled before it runs.

# %% [markdown]
# ## 5 · Shapes
# A data set of 8,551 sentences, in batches of 8, each padded to 512 tokens.

# %%
guess_programs = predict("How many input shapes does an epoch have?", unit="shapes")
guess_programs


# %%
def epoch(examples, size, drop_last=False):
    for start in range(0, examples, size):
        rows = min(size, examples - start)
        if rows == size or not drop_last:
            yield {"input_ids": torch.empty(rows, 512, dtype=torch.long, device="meta")}


# %%
counted, dropped = signatures(epoch(8551, 8)), signatures(epoch(8551, 8, drop_last=True))
compare(
    Row(
        "shapes", yours=guess_programs, formula=2, measured=counted.compilations, unit="shapes"
    ),
    Row(
        "index of the first short batch",
        formula=8551 // 8,
        measured=max(counted.first.values()),
        unit="batch",
    ),
    Row("with drop_last", formula=1, measured=dropped.compilations, unit="shapes"),
)

# %% [markdown]
# The second compilation waits at the **end** of the epoch, when nobody looks. What one costs, from the results of section
# 3, on two CPU cores:

# %%
full = next(row for row in rows if row["model"] == "gpt2")
shape = f"{full['batch']} x {full['seq_len']}"
print(f"{full['model']}, {shape}, for {full['target']}: compiled in {full['seconds']} s")

# %% [markdown]
# ## 6 · Pre-flight
# This model trains eagerly without a complaint. It has four faults for a static-shape chip, and its data a fifth. Find
# them before you run the next cell.

# %%
show_source(porting, region="faulty")

# %%
guess_faults = predict("How many of the five do you see?", unit="faults")
guess_faults

# %%
batches = porting.ragged_batches([48, 64, 80, 96, 112])
report = preflight(porting.Faulty(), batches, chip="trn2", precision="fp32")
for finding in report.findings:
    if finding.severity != "note":
        print(f"{finding.severity:8} {finding.check:21} {finding.where}")

# %% [markdown]
# Six lines, five faults: `hidden[kept]` and `labels[kept]` are one, a choice that labels make.

# %%
faults = {
    "changing program": "the count of steps is a Python number",
    "host read": "a branch on a tensor",
    "data-dependent shape": "labels choose how many rows there are",
    "dtype": "the loss of bf16 logits",
    "shapes": "in the data: each batch has another length",
}
places = [", ".join(found.where for found in report.of(check)) for check in faults]
Table({"check": list(faults), "fault": list(faults.values()), "lines": places})

# %%
seen = {finding.check for finding in report.findings if finding.severity != "note"}
compare(
    Row("faults", yours=guess_faults, formula=len(faults), measured=len(seen), unit="faults")
)

# %% [markdown]
# The pre-flight watched three steps, operator by operator, on this machine. Each finding has its line and a remedy:

# %%
print(report.of("host read")[0])
print(report.of("changing program")[0].remedy)


# %% [markdown]
# ## 7 · Mended
# The number becomes a tensor, the branch `torch.where`, the selection an ignored label, the loss fp32, the rows one
# length.


# %%
class Mended(porting.Faulty):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, ids, labels):
        self.count += 1
        hidden = self.body(self.embed(ids)) * (1 + 0.1 / self.count)
        hidden = torch.where(hidden.norm() > 100, hidden / 2, hidden)
        logits = self.head(hidden).float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


# %%
same_length = porting.ragged_batches([128] * 5)
mended = preflight(Mended(), same_length, chip="trn2", precision="fp32")
torch.manual_seed(0)
old = porting.Faulty()
torch.manual_seed(0)
new = Mended()
batch = same_length[0]
apart = abs(old(**batch) - new(**batch)).item()
print("errors and warnings:", sum(finding.severity != "note" for finding in mended.findings))
within("difference of the losses, of bf16 logits", apart, below=0.05)

# %% [markdown]
# ## 8 · What breaks: two weights that were one
# A plain `module.to(device)` on a device from outside makes a new parameter for every place that holds one. Here input and
# output share a table.


# %%
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight


def parameters_after(move):
    torch.manual_seed(0)
    return len(list(move(Tied()).parameters()))


# %%
chip = get_backend("sim:trn2")
compare(
    Row(
        "parameters, model.to(device)",
        measured=parameters_after(lambda m: m.to(chip.device)),
        unit="1",
    ),
    Row(
        "parameters, to_device", formula=1, measured=parameters_after(chip.to_device), unit="1"
    ),
)

# %% [markdown]
# Two parameters where there was one. Nothing fails: each gets a part of the gradient, and they drift apart. The
# pre-flight sees it without a device:


# %%
def tied_loss(model, ids):
    return model.head(model.embed(ids)).sum()


found = preflight(Tied(), [torch.arange(16)], tied_loss, chip="trn2")
print(found.of("ties")[0].what)
print(found.of("ties")[0].remedy)

# %% [markdown]
# ## 9 · Every gradient
# A loss is one number and hides much. A step on each device, before the optimizer: 52 gradients against the CPU's, each
# difference as a share of its gradient's norm.


# %%
def furthest(chip: str, precision: str) -> tuple[int, float]:
    here, there = (porting.gradients(name, precision) for name in ("cpu", chip))
    off = [(there[name] - g).norm().item() / g.norm().item() for name, g in here.items()]
    return off.count(0), max(off)


# %%
equal, _ = furthest("sim:trn2", "fp32")
compare(
    Row("gradients", formula=52, measured=len(porting.gradients("cpu", "fp32")), unit="1"),
    Row("without any difference, fp32", formula=52, measured=equal, unit="1"),
)

# %%
_, off = furthest("sim:trn2", "bf16")
within("bf16, the largest share of a gradient's norm", off, below=3e-2)

# %% [markdown]
# In fp32 every bit is the CPU's; a real chip is not so kind. In bf16 all differ by under a hundredth or so: where one
# stands far above the others, look there.

# %% [markdown]
# ## The porting checklist
# 1. One name for the device; `to_device`; then the optimizer.
# 2. Count an epoch's shapes; pad, bucket, drop the last.
# 3. Pre-flight; no host read in the step.
# 4. Compare three losses, then every **gradient**: a loss forgives much.

# %% [markdown]
# ## Exercises
# ### Exercise 3.2.1 (core): which gradients differ?
# A key's bias has a gradient of zero, since softmax ignores what it adds; what is computed is rounding, and has another
# direction on each device. So norms below a millionth of the **global** norm count as that.


# %% exercise="3.2.1"
def differing(
    cpu: dict[str, torch.Tensor], chip: dict[str, torch.Tensor], tolerance: float
) -> list[str]:
    """Return the names of the parameters whose gradient on the chip is not the CPU's.

    It differs where ‖chip - cpu‖ is more than tolerance times ‖cpu‖. Where ‖cpu‖ is under 1e-6 of the norm of
    all the CPU's gradients together, that floor takes its place. A gradient with a NaN differs.
    """
    # BEGIN SOLUTION
    floor = 1e-6 * torch.stack([gradient.norm() for gradient in cpu.values()]).norm()
    found = []
    for name, gradient in cpu.items():
        off = (chip[name] - gradient).norm() / torch.maximum(gradient.norm(), floor)
        if not off <= tolerance:  # NaN is neither more nor less
            found.append(name)
    return found
    # END SOLUTION


# %% check="3.2.1"
check("3.2.1", differing)

# %% [markdown]
# The tie of section 8, seen from here:


# %% uses="3.2.1"
def gradients_after(move, device):
    torch.manual_seed(0)
    model = move(Tied())
    tied_loss(model, torch.arange(16).to(device)).backward()
    return {name: weight.grad.cpu() for name, weight in model.named_parameters()}


here = gradients_after(lambda m: m, "cpu")
for move in (lambda m: m.to(chip.device), chip.to_device):
    print(differing(here, gradients_after(move, chip.device), 1e-3))

# %% [markdown]
# ### Exercise 3.2.2 (core): clip without asking the host
# The gradients' common norm is brought down to `limit` where it is larger; smaller gradients stay. `if norm > limit` asks
# the host at every step.


# %% exercise="3.2.2"
def clip(gradients: list[torch.Tensor], limit: float) -> list[torch.Tensor]:
    """Return the gradients, scaled so that their common norm is at most limit. No host read."""
    # BEGIN SOLUTION
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    scale = torch.clamp(limit / (norm + 1e-6), max=1.0)
    return [gradient * scale for gradient in gradients]
    # END SOLUTION


# %% check="3.2.2"
check("3.2.2", clip)

# %% [markdown]
# ### Exercise 3.2.3 (optional): which fault is it?
# After a port, each parameter has a line: (norm on the CPU, norm on the chip, cosine between the two gradients). The table
# of a tied model is called `embed`.


# %% exercise="3.2.3"
def diagnose(report: dict[str, tuple[float, float, float]]) -> str:
    """Return "sound", "untied", "scaled" or "rounding".

    sound: all alike to 1e-4. scaled: all norms off by one factor, all cosines 1. untied: only embed differs.
    rounding: cosines a little below 1 (above 0.98), norms within 2 %, in more than one parameter.
    """
    # BEGIN SOLUTION
    off = {
        n: (b / a, c)
        for n, (a, b, c) in report.items()
        if abs(b / a - 1) > 1e-4 or c < 1 - 1e-4
    }
    if not off:
        return "sound"
    if set(off) == {"embed"}:
        return "untied"
    return "scaled" if all(cosine > 1 - 1e-4 for _, cosine in off.values()) else "rounding"
    # END SOLUTION


# %% check="3.2.3"
check("3.2.3", diagnose)

# %% [markdown] tags=["reading"]
# ## Further reading
# - Suhan et al. 2021, *LazyTensor*, arXiv:2102.13267: sections 3 and 4, how PyTorch became lazy.
# - Jouppi et al. 2021, *Ten Lessons From Three Generations Shaped Google's TPUv4i*, ISCA: sections III and IV.
# - AWS Neuron documentation, *What is TorchNeuron?* and *torch.compile backend reference*.
# - `docs/backends.md` here: every call of each backend, and what was run on hardware.
