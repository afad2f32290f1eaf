"""What is charged: FLOPs and bytes of operators, fused kernels, host reads and compilations, by hand."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmlab.chips import Chip
from fmlab.sim import record, simulated_mode
from fmlab.sim.event import Event

#: one FLOP and one byte a second make the arithmetic plain
CHIP = Chip.measured("plain", {"fp32": 2.0, "bf16": 4.0}, memory_bandwidth=1.0, memory_bytes=10**9)


def events(run: Callable[..., Any], *inputs: Tensor, **settings: Any) -> list[Event]:
    """The compute events of `run(*inputs)`."""
    with simulated_mode(CHIP, **settings) as chip, record(chip) as trace:
        result = run(*inputs)
        chip.flush()  # while the result is alive, so that it counts as needed
    del result
    return [event for event in trace if event.kind == "compute"]


a, b = torch.ones(8, 16), torch.ones(16, 4)
table, ids = torch.ones(100, 10), torch.tensor([3, 3, 7])
N = 4 * 8 * 16  # bytes of a


@pytest.mark.parametrize(
    ("run", "inputs", "flops", "nbytes"),
    [
        (lambda x, y: x @ y, (a, b), 2 * 8 * 16 * 4, 4 * (8 * 16 + 16 * 4 + 8 * 4)),
        (lambda x: x + x, (a,), 0, 2 * N),  # one tensor, read once
        (lambda x: x + x[0], (a,), 0, 2 * N + 64),
        (lambda x: x.add_(1), (a.clone(),), 0, 2 * N),
        (lambda x: x.zero_(), (a.clone(),), 0, N),
        (lambda x, y: torch.add(x, 1, out=y), (a, a.clone()), 0, 2 * N),
        (lambda x: x[:1].expand(8, 16) * 2, (a,), 0, 64 + N),
        (lambda x: x.to(torch.bfloat16), (a,), 0, N + N // 2),
        (lambda x: torch.empty_like(x).t().view(-1)[2:].detach(), (a.t(),), 0, 0),
        (F.embedding, (ids, table), 0, 24 + 2 * 3 * 40),
        (lambda t, i: t[i], (table, ids), 0, 24 + 2 * 3 * 40),
        (lambda t, i, v: t.index_add_(0, i, v), (table.clone(), ids, table[:3]), 0, 24 + 3 * 120),
        (lambda x: torch._foreach_mul([x, x[0]], 2), (a,), 0, 2 * (N + 64)),
    ],
)
def test_flops_and_bytes_by_hand(
    run: Callable[..., Any], inputs: tuple[Tensor, ...], flops: int, nbytes: int
) -> None:
    found = events(run, *inputs)
    assert (sum(e.flops for e in found), sum(e.bytes for e in found)) == (flops, nbytes)
    assert sum(e.seconds for e in found) == max(nbytes, flops / 2)


def test_convolution_attention_and_their_gradients_count_as_torchs_meter() -> None:
    from fmlab.meter import flops

    q = torch.ones(1, 2, 8, 4, requires_grad=True)
    image, kernel = torch.ones(1, 3, 6, 6), torch.ones(5, 3, 3, 3, requires_grad=True)

    def run() -> None:
        F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
        F.conv2d(image, kernel).sum().backward()

    with flops() as counted:
        run()
    assert sum(e.flops for e in events(run)) == counted.total > 0


def test_a_fused_optimizer_reads_gradients_and_writes_the_rest() -> None:
    weight = nn.Parameter(torch.ones(100))
    optimizer = torch.optim.AdamW([weight], fused=True)
    weight.grad = torch.ones(100)
    optimizer.step()
    fused = next(e for e in events(optimizer.step) if "fused_adamw" in e.name)
    assert fused.bytes == 400 * (4 + 3) + 2 * 4  # four tensors read, three written, and the count of steps
    assert fused.phase == "optimizer"


def test_compiled_chains_are_one_kernel_that_writes_what_is_needed() -> None:
    def chain(x: Tensor) -> Tensor:
        return F.gelu(x * 2 + 1).sigmoid()

    eager, (kernel,) = events(chain, a), events(chain, a, execution="compiled")
    assert sum(e.bytes for e in eager) == 4 * 2 * N
    assert kernel.name == "fused(mul, add, gelu, sigmoid)"
    assert kernel.bytes == 2 * N

    def kept(x: Tensor) -> tuple[Tensor, Tensor]:
        middle = x * 2
        return middle, middle + 1

    with simulated_mode(CHIP, execution="compiled") as chip, record(chip) as trace:
        both = kept(a)
        chip.flush()
    assert len(both) == 2
    assert [e.bytes for e in trace] == [3 * N]  # both results live on, so both are written


def test_fusion_stops_at_products_reductions_shapes_and_reads() -> None:
    def run(x: Tensor, y: Tensor) -> Tensor:
        scores = (x * 2) @ y  # the product needs its whole input
        weights = (scores + 1).softmax(-1)  # a reduction ends the kernel
        return weights * 3

    found = events(run, a, b, execution="compiled")
    assert [e.name for e in found] == ["aten::mul", "aten::mm", "fused(add, _softmax)", "aten::mul"]
    assert [e.bytes for e in found][2:] == [2 * 128, 2 * 128]
    (unread,) = events(lambda x: bool((x * 2).shape), a, execution="compiled")
    assert unread.bytes == N  # a result that nobody reads is not written

    def read(x: Tensor) -> Tensor:
        y = x * 2
        y.sum().item()
        return y + 1

    assert [e.name for e in events(read, a, execution="compiled")] == ["fused(mul, sum)", "aten::add"]


def test_foreach_and_in_place_updates_fuse_tensor_by_tensor() -> None:
    def update(p: Tensor, m: Tensor) -> None:
        torch._foreach_mul_([m], 0.9)
        torch._foreach_add_([p], [m], alpha=-0.1)

    (kernel,) = events(update, a.clone(), a.clone(), execution="compiled")
    assert kernel.bytes == 4 * N  # both read and written once
    assert sum(e.bytes for e in events(update, a.clone(), a.clone())) == 5 * N


def test_each_new_graph_is_compiled_once() -> None:
    with simulated_mode(CHIP, execution="compiled", compile_seconds=100.0) as chip:
        for rows in (4, 8, 4, 8):
            (a[:rows] * 2).sum().item()
    assert chip.totals.compiles == 2
    assert chip.totals.seconds["compile"] == 200
    assert chip.seconds > 200
    with simulated_mode(CHIP, execution="compiled") as chip:
        for rows in (4, 8, 4):
            (a[:rows] * 2).sum().item()
    assert (chip.totals.compiles, chip.totals.seconds["compile"]) == (2, 0)


def test_launches_limit_small_operators() -> None:
    small = torch.ones(1)
    with simulated_mode(CHIP, launch_overhead=100.0) as chip, record(chip) as trace:
        for _ in range(3):
            small + small
    assert [e.start for e in trace] == [100, 200, 300]
    assert {e.bound for e in trace} == {"overhead"}
    assert chip.seconds == 308


def test_modules_phases_and_lines_are_known() -> None:
    torch.manual_seed(0)
    with simulated_mode(CHIP) as chip:
        model = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 2)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with record(chip) as trace:
            loss = model(torch.ones(3, 4)).sum()
            loss.backward()
            optimizer.step()
        lines = dict(chip.memory.lines)
        text = chip.memory.summary()
    products = [(e.phase, e.module) for e in trace if e.flops]
    assert products[:2] == [("forward", "0"), ("forward", "1.1")]
    assert set(products[2:]) == {("backward", "0"), ("backward", "1.1")}
    assert {e.phase for e in trace} == {"forward", "backward", "optimizer"}
    size = 4 * sum(p.numel() for p in model.parameters())
    assert lines["parameters"] == lines["gradients"] == lines["optimizer states"] == size
    assert "0.weight" in text


def test_the_summary_of_a_trace() -> None:
    with simulated_mode(CHIP) as chip, record(chip) as trace:
        with pytest.raises(RuntimeError, match="recorded already"), record(chip):
            pass
        torch.ones(64, 64) @ torch.ones(64, 64)
    assert trace.flops == 2 * 64**3
    assert trace.utilisation == pytest.approx(64**3 / (64**3 + 2 * 64 * 64 * 4))
    assert trace.top(1)[0].name == "aten::mm"
    assert trace.bound_shares()["compute"] > 0.8
    text = trace.summary()
    assert "of the peak rate" in text
    assert "aten::mm" in text
    with pytest.raises(ValueError, match="legal are 'name', 'module' and 'phase'"):
        trace.top(by="colour")


def test_a_dtype_without_a_rate_says_what_to_do() -> None:
    with simulated_mode("tpu-v5p"):
        (a.bfloat16() @ b.bfloat16()).sum()
    with (
        pytest.raises(ValueError, match=r"fp32 rate for tpu-v5p.*assumed_flops=\{'fp32'"),
        simulated_mode("tpu-v5p"),
    ):
        (a @ b).sum()
    with simulated_mode("tpu-v5p", assumed_flops={"fp32": 1e12}, execution="eager") as chip:
        a @ b
    assert chip.totals.seconds["compute"] == pytest.approx(2 * 8 * 16 * 4 / 1e12)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"execution": "lazy"}, "legal are 'eager' and 'compiled'"),
        ({"launch_overhead": 1e-6, "execution": "compiled"}, "set execution='eager'"),
        ({"compile_seconds": 3.0}, "cost of execution='compiled'"),
        ({"memory_bytes": 0}, "above 0"),
        ({"memory_bytes": 5, "unlimited": True}, "means nothing with unlimited"),
        ({"host_bandwidth": -1.0}, "above 0"),
        ({"launch_overhead": -1.0}, "0 or more"),
        ({"assumed_flops": {"fp64": -1e12}}, "above 0"),
        ({"network": "p5.48xlarge"}, "cluster"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words), simulated_mode("h100", **settings):
        pass


def test_unknown_chips_and_unmeasured_rates_are_refused() -> None:
    with pytest.raises(ValueError, match=r"h100.*trn2"), simulated_mode("h1000"):
        pass
    with (
        pytest.raises(ValueError, match="nobody's measured rates of trn2"),
        simulated_mode("trn2", achievable=True),
    ):
        pass
    with simulated_mode("h100", achievable=True) as chip:
        assert chip.roofline("bfloat16").peak < chip.chip.peak_flops("bf16")
