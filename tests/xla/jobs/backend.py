"""What the backend does on one device; prints what test_backend.py looks at."""

import json
from functools import partial
from typing import Any

from fmlab.backends.xla_environment import configure

configure("CPU", fast_compile=True, capture=True)

import torch  # noqa: E402
from torch import nn  # noqa: E402

from fmlab.backends import get_backend  # noqa: E402
from fmlab.backends.xla_counters import counted, graph_size, host_reads  # noqa: E402
from fmlab.backends.xla_program import capture, hlo, ir  # noqa: E402
from fmlab.data.buckets import LengthBuckets  # noqa: E402
from fmlab.models import GPT  # noqa: E402
from fmlab.objectives import CausalLM  # noqa: E402
from fmlab.parallel import Layout, parallelize  # noqa: E402
from fmlab.train import adamw  # noqa: E402
from fmlab.train.decode import evaluating, open_stream  # noqa: E402
from fmlab.train.evaluate import evaluate  # noqa: E402

xla, cpu = get_backend("xla"), get_backend("cpu")
found: dict[str, Any] = {"describe": xla.describe(), "memory": sorted(xla.memory_stats())}


def small(layers: int = 1) -> GPT:
    torch.manual_seed(0)
    return GPT.from_preset("gpt2-tiny", num_layers=layers, hidden_size=32, num_heads=2, vocab_size=61)


torch.manual_seed(7)
tokens = torch.randint(61, (8, 17))
batch = {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def parts(count: int) -> list[dict[str, torch.Tensor]]:
    size = 8 // count
    return [{k: v[i * size : (i + 1) * size] for k, v in batch.items()} for i in range(count)]


# decoding: programs after the prompt and after each of four tokens, and how far the logits are off
found["decoding"] = {}
for static in (False, True):
    streams = []
    for backend in (xla, cpu):
        model = backend.to_device(small())
        with evaluating(model):
            streams.append(open_stream(model, [[5, 6, 7], [9, 3]], 4, static))
    programs, off = [], []
    with evaluating(*(stream.model for stream in streams)):
        for token in range(5):
            said = []
            with counted() as done:
                for stream in streams:
                    call = stream.start if token == 0 else partial(stream.step, torch.tensor([token, 9]))
                    said.append(call().cpu())
            programs.append(done.compiles)
            off.append((said[0] - said[1]).abs().max().item())
    found["decoding"][str(static)] = {"programs": programs, "off": max(off)}

# steps: programs, reads and the size of the graph, for one and for many micro-batches
found["steps"] = {}
for count in (1, 4, 8):
    engines = {
        backend.name: parallelize(
            small(), Layout(micro_batches=count), CausalLM(), adamw(1e-3), backend=backend, max_grad_norm=1.0
        )
        for backend in (xla, cpu)
    }
    rows = []
    for lr in (1e-3, 2e-3, 0.0):
        for engine in engines.values():
            engine.set_lr(lr)
        with counted() as done:
            loss = engines["xla"].step(parts(count)).loss
        rows.append(
            [done.compiles, done.runs, done.reads, abs(loss - engines["cpu"].step(parts(count)).loss)]
        )
    weights = {name: engine.full_params() for name, engine in engines.items()}
    worst = max(
        float((value.cpu() - weights["cpu"][name]).abs().max()) for name, value in weights["xla"].items()
    )
    found["steps"][count] = {"rows": rows, "weights": worst}
found["donated"] = done.donated

# the same without barriers: the graph grows
model = xla.to_device(small())
found["tied"] = model.get_parameter("blocks.0.tokens.weight") is model.get_parameter("blocks.2.tokens.weight")
sizes = []
for _ in range(3):
    (CausalLM()(model, xla.to_device(batch))["causal"].sum / 128).backward()
    sizes.append(graph_size([p.grad for p in model.parameters() if p.grad is not None]))
found["growing"] = sizes
xla.synchronize()

# a number read in the middle of a step, found with its line
with host_reads() as reads, counted() as done, xla.step():
    loss = CausalLM()(model, xla.to_device(batch))["causal"].sum
    if loss.item() > 0:  # HERE
        (loss / 128).backward()
found["read"] = {"count": len(reads), "text": str(reads), "compiles": done.compiles}

# a loss over padded rows is the loss over the rows
model = xla.to_device(small().eval())
short = {name: rows[:, :11] for name, rows in batch.items()}
padded = LengthBuckets((8, 16)).pad(short)
padded.pop("attention_mask", None)
with torch.no_grad():
    losses = [float(CausalLM()(model, xla.to_device(b))["causal"].sum) for b in (short, padded)]
    losses.append(float(CausalLM()(small().eval(), short)["causal"].sum))
found["padded"] = losses
with counted() as done, torch.no_grad():
    for length in (9, 10, 11, 12, 13, 14, 15, 16):
        one = LengthBuckets((12, 16)).pad(
            {name: rows[:, :length].contiguous() for name, rows in batch.items()}
        )
        one.pop("attention_mask", None)
        with xla.step():
            kept = CausalLM()(model, xla.to_device(one))["causal"].sum
found["bucketed compiles"] = done.compiles

with counted() as done:
    loss = evaluate(model, [batch] * 5, CausalLM(), xla).loss
host = evaluate(small(), [batch] * 5, CausalLM(), cpu).loss
found["evaluation"] = {"compiles": done.compiles, "runs": done.runs, "error": abs(loss - host)}

# programs
torch.manual_seed(0)
x = xla.to_device(torch.randn(8, 8))
with capture() as program:
    y = torch.nn.functional.gelu(x @ x) * 2 + 1
    found["ir"] = ir(y)
    found["hlo"] = hlo(y).size
    found["relu grows"] = [graph_size([y]), graph_size([y.relu()])]
try:
    with capture():
        xla.synchronize()
except ValueError as error:
    found["nothing compiled"] = str(error)
after = program.after[0]
found["program"] = {
    "before": program.before[0].size,
    "fusions before": sum(program.before[0].fusions.values()),
    "fusions": dict(after.fusions),
    "dots": after.operations["dot"],
    "kernels": after.kernels,
}

# quirks behind one interface
lin = xla.to_device(nn.Linear(8, 8))
plain = torch.autograd.grad(torch.sigmoid(lin(x)).sum(), lin.weight)[0].cpu()
lin.zero_grad()
xla.checkpoint(lambda t: torch.sigmoid(lin(t)), x.requires_grad_()).sum().backward()
assert lin.weight.grad is not None
found["checkpoint"] = torch.allclose(plain, lin.weight.grad.cpu(), atol=1e-6)
draws = []
for _ in range(2):
    xla.seed(3)
    draws.append(torch.rand(4, device=xla.device).cpu())
found["seed"] = torch.equal(*draws)
with xla.autocast("bf16"):
    found["autocast"] = str((x @ x).dtype)
double = xla.compile(lambda t: t * 2 + 1, fullgraph=True)
found["compiled"] = double(torch.ones(2, device=xla.device)).cpu().tolist()
reading = xla.compile(lambda t: t if t.sum().item() > 0 else -t, fullgraph=True)
found["host"] = str(xla.to_host({"a": x})["a"].device)
errors = {}
for name, call in {
    "read in compiled": lambda: reading(torch.ones(2, device=xla.device)),
    "dynamic": lambda: xla.compile(torch.sin, dynamic=True),
    "options": lambda: xla.compile(torch.sin, options={"a": 1}),
    "late": lambda: configure(devices=8),
    "ranks": lambda: xla.distributed_options(),
    "fp16": lambda: xla.autocast("fp16"),
    "mesh": lambda: __import__("fmlab.backends.xla_spmd", fromlist=["mesh"]).mesh(data=3),
}.items():
    try:
        call()
    except (ValueError, RuntimeError) as error:
        errors[name] = f"{type(error).__name__}: {error}"
found["errors"] = errors
print(json.dumps(found))
