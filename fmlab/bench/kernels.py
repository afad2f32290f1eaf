"""The Triton kernels: counted bytes against predicted ones anywhere, and speed where there is a GPU.

On a CPU kernels are interpreted, so their time says nothing; what can be measured is what they move, that
they are right, and what a compiler makes of them. On a GPU each is timed against torch's own, in pairs, and
against the least time of that chip's roofline from published figures.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fmlab.bench import Result, interleaved
from fmlab.bench.sim_device import known_chip
from fmlab.chips import chip
from fmlab.extras import require
from fmlab.kernels import triton as ft
from fmlab.lab.roofline import operations


def run(quick: bool) -> Iterator[Result]:
    """Bytes, fusion, compiled size; then ratios to torch on a GPU, or a line that says there is none."""
    require("kernels", "triton")
    yield _predictions(quick)
    yield from _fusion()
    yield from _compiled(("sm_90a",) if quick else tuple(ft.TARGETS))
    if torch.cuda.is_available():
        yield from _on_a_gpu(pairs=5 if quick else 30)
    else:
        detail = (
            "no GPU that PyTorch sees: ratios to torch and shares of the roofline are measured only there"
        )
        yield Result("kernels: timed on a GPU", 0, "kernels", detail=detail)


def _predictions(quick: bool) -> Result:
    """Shapes whose counted bytes are not exactly the predicted ones."""
    wrong, tried = 0, 0
    sizes = (
        [(64, 64, 64), (100, 70, 33)] if quick else [(64, 64, 64), (100, 70, 33), (1, 200, 65), (129, 64, 17)]
    )
    for m, n, k in sizes:
        for tile in ((16, 16, 16), (32, 64, 32)):
            with ft.count_bytes() as count:
                ft.matmul(torch.ones(m, k), torch.ones(k, n), ft.Tile(*tile))
            wrong += (count.loaded, count.stored) != ft.matmul_bytes(m, n, k, *tile[:2])
            tried += 1
    for n, d, causal in [(70, 20, False), (70, 20, True), (128, 64, True)]:
        for side in ((16, 16), (32, 16), (16, 64)):
            q = torch.ones(1, 2, n, d, requires_grad=True)
            with ft.count_bytes() as count:
                ft.attention(q, q, q, causal=causal, tile=ft.AttentionTile(*side)).sum().backward()
            shape = dict(heads=2, causal=causal)
            forward = ft.attention_bytes(n, n, d, *side, **shape)
            backward = ft.attention_backward_bytes(n, n, d, *side, **shape)
            wrong += count.total != forward.total + backward.total
            tried += 1
    return Result(
        "kernels: shapes whose counted bytes differ from the predicted", wrong, "shapes", "<= 0",
        detail=f"of {tried}: tiled products, and flash attention forward and backward",
    )  # fmt: skip


def _fusion() -> Iterator[Result]:
    """Bytes of the unfused operations of torch over the bytes that the fused kernel counts."""

    def by_steps(x: Tensor) -> Tensor:
        weights = (x - x.amax(-1, keepdim=True)).exp()
        return weights / weights.sum(-1, keepdim=True)

    x, bias = torch.randn(64, 512), torch.randn(512)
    targets = torch.arange(64)
    q = torch.randn(1, 1, 512, 64)
    cases: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "softmax": (lambda: ft.softmax(x), lambda: by_steps(x)),
        "bias and GELU": (lambda: ft.bias_gelu(x, bias), lambda: F.gelu(x + bias)),
        "cross-entropy": (
            lambda: ft.cross_entropy(x, targets),
            lambda: -by_steps(x).log().gather(-1, targets[:, None]),
        ),
        "attention, 512 x 64": (
            lambda: ft.attention(q, q, q, tile=ft.AttentionTile(128, 64)),
            lambda: by_steps(q @ q.transpose(-1, -2) * 0.125) @ q,
        ),
    }
    for name, (fused, steps) in cases.items():
        with ft.count_bytes() as count:
            fused()
        moved = sum(one.bytes for one in operations(steps))
        detail = f"{moved:,} B in steps, {count.total:,} B fused, both counted"
        yield Result(f"kernels: {name}, bytes saved by fusing", moved / count.total, "x", detail=detail)


def _compiled(targets: tuple[str, ...]) -> Iterator[Result]:
    """What the compiler makes of the two kernels with products, for chips that need not be there."""
    half = torch.bfloat16
    q = torch.ones(1, 1, 16, 64, dtype=half)
    with ft.count_bytes() as count:
        ft.matmul(torch.ones(16, 16, dtype=half), torch.ones(16, 16, dtype=half))
        ft.attention(q, q, q, causal=True)
    for target in targets:
        for launch in count.launches:
            made = ft.compile_for(launch, target)
            detail = f"{made.registers} registers a thread, {made.shared:,} B on the chip a program; not run"
            name = f"kernels: {made.kernel} in bf16 for {target}, bytes spilled a thread"
            yield Result(name, made.spilled, "B", detail=detail)


# --- a GPU ------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A kernel on a GPU, torch's own, and the work that both must do at least."""

    ours: Callable[[], object]
    torchs: Callable[[], object]
    flops: float
    bytes: float


def _on_a_gpu(pairs: int) -> Iterator[Result]:
    name = known_chip(torch.cuda.get_device_name())
    for label, case in _cases().items():
        ratio = interleaved(_waiting(case.ours), _waiting(case.torchs), pairs=pairs, warmup=3)
        yield Result(f"kernels: {label}, torch's time over ours", ratio.median, "x", detail=str(ratio))
        if name is not None:
            least = chip(name).roofline("bf16").seconds(case.flops, case.bytes)
            detail = f"{least * 1e6:.0f} us at least on {name} by its published figures"
            share = least / ratio.seconds_a
            yield Result(f"kernels: {label}, share of the roofline", share, "x", detail=detail)


def _waiting(call: Callable[[], object]) -> Callable[[], None]:
    """A launch returns at once: wait until its work is done."""

    def timed() -> None:
        call()
        torch.cuda.synchronize()

    return timed


def _cases() -> dict[str, Case]:
    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    a, b, x, weight = randn(4096, 4096), randn(4096, 4096), randn(16384, 4096), randn(4096)
    logits, targets = randn(8192, 50_257), torch.zeros(8192, dtype=torch.int64, device="cuda")
    q, k, v = (randn(4, 16, 4096, 64) for _ in range(3))
    parameter = torch.nn.Parameter(torch.zeros(2**26, device="cuda"))
    parameter.grad = torch.ones_like(parameter)
    moments = [torch.zeros_like(parameter) for _ in range(2)]
    optimizer = torch.optim.AdamW([parameter], fused=True)
    rows = 2 * x.nbytes
    pairs_seen = 4 * 16 * 4096 * 4097 / 2
    return {
        "matmul 4096^3": Case(lambda: ft.matmul(a, b), lambda: a @ b, 2 * 4096**3, 3 * a.nbytes),
        "softmax": Case(lambda: ft.softmax(x), lambda: x.softmax(-1), 0, rows),
        "layer norm": Case(
            lambda: ft.layer_norm(x, weight, weight),
            lambda: F.layer_norm(x, weight.shape, weight, weight),
            0,
            rows,
        ),
        "rms norm": Case(
            lambda: ft.rms_norm(x, weight), lambda: F.rms_norm(x, weight.shape, weight, 1e-6), 0, rows
        ),
        "bias and GELU": Case(lambda: ft.bias_gelu(x, weight), lambda: F.gelu(x + weight), 0, rows),
        "cross-entropy, 50,257 words": Case(
            lambda: ft.cross_entropy(logits, targets),
            lambda: F.cross_entropy(logits, targets, reduction="none"),
            0,
            logits.nbytes,
        ),
        "causal attention, 4096 x 64": Case(
            lambda: ft.attention(q, k, v, causal=True),
            lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
            4 * pairs_seen * 64,
            4 * q.nbytes,
        ),
        "AdamW, 67 M parameters": Case(
            lambda: ft.adamw_step(parameter, parameter.grad, *moments, step=1),
            lambda: optimizer.step(),
            0,
            7 * parameter.nbytes,
        ),
    }
