"""GPT-2 124M training step, batch 4 x 256: ours, transformers' and a minimal hand-written model side by side.

All three use the same fused AdamW and the same allocator and see the same tokens; they are timed alternately
in one process. Peak memory is that of one process per model. The matmul roofline is the time that the step's
matrix products alone take, measured in the same run on tensors of the step's own shapes.
"""

import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmlab.bench import Result, interleaved
from fmlab.bench.peak import peak_memory_mb
from fmlab.extras import require
from fmlab.models import GPT, GPTConfig

BATCH, LENGTH = 4, 256
FASTER = {"fp32": ">= 1.15", "bf16": ">= 1.3"}  # than transformers

REFERENCE_IMPORTS = ("transformers.models.gpt2.modeling_gpt2",)  # not counted as memory of a step

Step = Callable[[], None]


class MinimalLayer(nn.Module):
    """What a careful user would write in an afternoon: nn.Linear, SDPA, tanh-GELU."""

    def __init__(self, d: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        b, length, d = x.shape
        q, k, v = (
            self.qkv(self.norm1(x)).view(b, length, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, length, d))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class MinimalGPT(nn.Module):
    """The hand-written peer: full logits and torch's cross-entropy."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        d = config.hidden_size
        self.tokens, self.positions = (
            nn.Embedding(config.vocab_size, d),
            nn.Embedding(config.max_positions, d),
        )
        self.layers = nn.ModuleList(MinimalLayer(d, config.num_heads) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(d)
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def build(side: str) -> tuple[nn.Module, Callable[[Tensor, Tensor], Tensor]]:
    """A side's model and its mean loss of (input_ids, labels already shifted)."""
    torch.manual_seed(0)
    with torch.device("meta"):
        config = GPT.from_preset("gpt2").config
    if side == "fmlab":
        model = GPT(config)
        return model, lambda ids, labels: model(ids, labels=labels).loss_sum / (labels != -100).sum()
    if side == "minimal":
        peer = MinimalGPT(config)
        return peer, peer
    transformers = require("hf", "transformers")
    transformers.logging.set_verbosity_error()
    hf_config = transformers.GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
    reference = transformers.GPT2LMHeadModel(hf_config)
    return reference, lambda ids, labels: reference(input_ids=ids, labels=ids).loss  # it shifts them itself


def make_step(side: str, precision: str) -> Step:
    """One training step of a side: forward, backward, fused AdamW."""
    model, loss_of = build(side)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(0, 50257, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    labels = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], 1)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = loss_of(ids, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def roofline_seconds(precision: str, repeats: int) -> tuple[float, float]:
    """(seconds, operations) of the step's matrix products alone, timed on tensors of their shapes.

    Operations: forward plus twice that backward, full (not causal) attention left out, one multiply-add = 2.
    """
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    n, d, v = BATCH * LENGTH, 768, 50257
    seconds = operations = 0.0
    for inputs, outputs, count in ((d, 3 * d, 12), (d, d, 12), (d, 4 * d, 12), (4 * d, d, 12), (d, v, 1)):
        x, dy, w = (torch.randn(s, dtype=dtype) for s in ((n, inputs), (n, outputs), (outputs, inputs)))
        y, dx, dw = torch.empty_like(dy), torch.empty_like(x), torch.empty_like(w)

        def products(x=x, dy=dy, w=w, y=y, dx=dx, dw=dw) -> None:  # type: ignore[no-untyped-def]
            torch.mm(x, w.T, out=y)
            torch.mm(dy, w, out=dx)
            torch.mm(dy.T, x, out=dw)

        products()
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            products()
            times.append(time.perf_counter() - start)
        seconds += count * min(times)
        operations += count * 3 * 2 * n * inputs * outputs
    return seconds, operations


def breakdown(step: Step) -> list[tuple[str, float]]:
    """Share of a step's operator time by kind, from torch's profiler."""
    kinds = {
        "matrix products": ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm"),
        "attention": ("scaled_dot_product",),
        "optimizer": ("fused_adamw", "AdamW"),
        "copies and casts": ("aten::copy_", "aten::cat", "_to_copy"),
        "GELU": ("gelu",),
        "softmax of the loss": ("softmax", "aten::amax"),
        "layer norm": ("layer_norm",),
        "sums and adds": ("aten::add", "aten::add_", "aten::sum", "aten::mul", "aten::mul_"),
        "fills": ("aten::fill_", "aten::zero_"),
    }
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    totals = dict.fromkeys([*kinds, "the rest"], 0.0)
    for row in profile.key_averages():
        exact = [kind for kind, names in kinds.items() if row.key in names]
        within = [kind for kind, names in kinds.items() if any(name in row.key for name in names)]
        totals[(exact or within or ["the rest"])[0]] += row.self_cpu_time_total
    whole = sum(totals.values())
    return sorted(((kind, t / whole) for kind, t in totals.items()), key=lambda item: -item[1])


def run(quick: bool) -> Iterator[Result]:
    """Speed in fp32 and bf16, peak memory, share of the roofline, and where the time goes."""
    pairs = 4 if quick else 12
    peers = {"transformers": FASTER, "minimal": {"fp32": ">= 1.0", "bf16": ">= 1.0"}}
    for precision in ("fp32", "bf16"):
        ours = make_step("fmlab", precision)
        seconds = 0.0
        for side, target in peers.items():
            ratio = interleaved(ours, make_step(side, precision), pairs=pairs)
            seconds = ratio.seconds_a
            name = f"GPT-2 124M step, {precision}: speed against {side}"
            yield Result(name, ratio.median, "x", target[precision], detail=str(ratio))
        yield from _roofline(precision, seconds, repeats=3 if quick else 7)
        for kind, share in breakdown(ours):
            yield Result(f"GPT-2 124M step, {precision}: {kind}", 100 * share, "%", detail="of operator time")
        del ours
        yield from _memory(precision)


def _roofline(precision: str, seconds: float, repeats: int) -> list[Result]:
    roof, operations = roofline_seconds(precision, repeats)
    detail = (
        f"{operations / 1e9:.0f} GFLOP of matrix products take {roof:.2f} s alone, the step {seconds:.2f} s"
    )
    name = f"GPT-2 124M step, {precision}: matmul roofline reached"
    return [Result(name, 100 * roof / seconds, "%", detail=detail)]


def _memory(precision: str) -> list[Result]:
    peak = {
        side: peak_memory_mb(__name__, side, precision).resident
        for side in ("fmlab", "minimal", "transformers")
    }
    return [
        Result(
            f"GPT-2 124M step, {precision}: peak memory against {side}",
            peak["fmlab"] / peak[side],
            "x",
            "<= 1.0",
            detail=f"{peak['fmlab']:.0f} MB against {peak[side]:.0f} MB",
        )
        for side in ("minimal", "transformers")
    ]
