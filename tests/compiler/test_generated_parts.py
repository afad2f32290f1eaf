"""Generated C++ for whole parts of a step: 16 bits, group norm, cross-entropy, bias gradients, AdamW."""

import math
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fmlab.compiler import Compiled, CostModel, Fusion, GenerateCpp, PassManager, capture, kernels, optimize
from fmlab.compiler.codegen import text
from fmlab.compiler.codegen.generate import code
from fmlab.compiler.codegen.lower import lower
from fmlab.compiler.optimizer import CompiledAdamW
from tests.compiler.families import step
from tests.compiler.same import assert_same
from tests.compiler.test_codegen import generated, x  # skips without a compiler


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


IMAGES = torch.channels_last


def members(program: object, graph: str = "forward") -> list[list[str]]:
    return [kernel.members for kernel in kernels(program.graphs[graph])]  # type: ignore[attr-defined]


def errors(fn: Callable[..., Tensor], inputs: list[Tensor], made: Callable[..., Tensor]) -> list[float]:
    """Relative errors of a result and its gradients, computed by `made`, against fn in fp64."""
    exact = [y.detach().double().requires_grad_() for y in inputs]
    want = fn(*exact)
    got = made(*inputs)
    d = torch.randn(want.shape, generator=torch.Generator().manual_seed(8)).to(got.dtype)
    pairs = [(got, want)]
    pairs += zip(
        torch.autograd.grad(got, inputs, d), torch.autograd.grad(want, exact, d.double()), strict=True
    )
    return [float((a.detach().double() - b.detach()).norm() / b.detach().norm()) for a, b in pairs]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_tensors_are_computed_in_fp32_and_no_worse_than_eager(
    dtype: torch.dtype, folder: Path
) -> None:
    def fn(a: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.gelu(F.layer_norm(a * 2 + b, (96,), w, b)).softmax(-1) * 9 + a

    inputs = [y.to(dtype).requires_grad_() for y in (x(64, 96), x(96, seed=1), x(96, seed=2))]
    program = generated(fn, folder, *inputs)
    assert len(members(program)) == 1
    ours, eager = errors(fn, inputs, Compiled(program)), errors(fn, inputs, fn)
    assert all(a <= 1.1 * b for a, b in zip(ours, eager, strict=True)), (ours, eager)
    assert ours[0] < 0.8 * eager[0]  # rounded once, not after each operator


def test_a_cast_rounds_inside_a_group_too_and_nan_stays(folder: Path) -> None:
    a = x(4, 40, dtype=torch.float32) * 1e3
    a[0, :4] = torch.tensor([math.nan, math.inf, -math.inf, 1 + 2**-8])
    for narrow in (torch.bfloat16, torch.float16):
        fn = lambda a, narrow=narrow: (a * 1.0).to(narrow).float() * 3  # noqa: E731
        program = generated(fn, folder, a)
        assert members(program) == [["mul", "_to_copy", "_to_copy", "mul"]]
        torch.testing.assert_close(Compiled(program)(a), fn(a), rtol=0, atol=0, equal_nan=True)


def normed(a: Tensor, shift: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.silu(F.group_norm(a + shift[:, :, None, None], 4, w, b, 1e-3)) + a


@pytest.mark.parametrize("channels", [20, 64])  # a block with a rest, and one without
def test_group_norm_joins_its_neighbours_forward_and_backward(channels: int, folder: Path) -> None:
    image = (x(2, channels, 3, 5) + 3).contiguous(memory_format=IMAGES)
    inputs = [image, x(2, channels, seed=1), x(channels, seed=2), x(channels, seed=3)]
    inputs = [y.requires_grad_() for y in inputs]
    program = generated(normed, folder, *inputs)
    assert members(program) == [["add", "native_group_norm", "silu", "add"]]
    assert any("native_group_norm_backward" in one for one in members(program, "backward"))
    got, want = Compiled(program)(*inputs), normed(*inputs)
    assert got.stride() == want.stride()
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)
    weights = x(2, channels, 3, 5, seed=4)
    torch.testing.assert_close(
        torch.autograd.grad((got * weights).sum(), inputs),
        torch.autograd.grad((want * weights).sum(), inputs),
        rtol=1e-10,
        atol=1e-11,
    )


def test_group_norm_of_other_memory_is_left_alone() -> None:
    program = capture(lambda a: F.group_norm(a.exp(), 4), x(2, 8, 3, 5), backward=False)
    optimize(program, PassManager([Fusion()]))
    assert not members(program)
    assert any("not in channels_last memory" in why for why in program.reports[0][1].refused)


LABELS = torch.tensor([3, -100, 0, 8, -100])


@pytest.mark.parametrize(("reduction", "ignored"), [("mean", -100), ("sum", -100), ("mean", 8)])
def test_a_whole_cross_entropy_is_one_kernel_each_way(reduction: str, ignored: int, folder: Path) -> None:
    labels = LABELS if ignored == -100 else LABELS.clamp(min=0)
    scores = (x(5, 9) * 4).requires_grad_()

    def fn(scores: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(scores, labels, ignore_index=ignored, reduction=reduction)

    program = generated(fn, folder, scores, labels)
    assert members(program) == [["_log_softmax", "nll_loss_forward"]]
    assert members(program, "backward") == [["nll_loss_backward", "_log_softmax_backward_data"]]
    (report,) = (r for graph, r in program.reports if (graph, r.name) == ("backward", "fusion"))
    assert report.bytes_after < report.bytes_before  # the gradient of the log-probabilities is never there
    compiled = Compiled(program)
    got, want = compiled(scores, labels), fn(scores, labels)
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(
        torch.autograd.grad(got * 3, scores), torch.autograd.grad(want * 3, scores), rtol=1e-12, atol=1e-13
    )
    none = torch.full_like(labels, ignored)
    torch.testing.assert_close(compiled(scores, none), fn(scores, none), equal_nan=True)
    with pytest.raises(ValueError, match=r"outside of 0\.\.8"):
        compiled(scores, torch.where(labels == 3, 9, labels))


def test_long_rows_are_summed_block_by_block(folder: Path) -> None:
    scores = x(7, 9001) * 4
    scores[1, :4500] = -math.inf  # the first block and a part of the second
    scores[2, 8000:] += 300  # a new maximum in the last block
    scores[3, 5], scores[4, 8999], scores[5] = math.nan, math.inf, -math.inf
    labels = torch.tensor([3, 9000, 8500, 1, 2, 3, 4096])
    for rows in (slice(None), slice(0, 3)):
        a, at = scores[rows].detach().requires_grad_(), labels[rows]
        program = generated(F.cross_entropy, folder, a, at)
        assert members(program) == [["_log_softmax", "nll_loss_forward"]]
        got, want = Compiled(program)(a, at), F.cross_entropy(a, at)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12, equal_nan=True)
        gradients = torch.autograd.grad(got, a), torch.autograd.grad(want, a)
        torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-13, equal_nan=True)


def test_large_results_go_past_the_caches_piece_by_piece_but_not_in_place(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "FAR", 3 * 2500 * 8)
    a, w = x(3, 2500), x(2500, seed=1)  # rows begin anywhere in a line of the cache
    fn = lambda a, w: ((m := a * w) + a.softmax(-1), m.relu() + 1)  # noqa: E731
    program = generated(fn, folder, a, w)
    (kernel,) = kernels(program.forward.graph)
    assert "f_stream" in code(lower(kernel), *kernel.space)
    assert "f_stream" not in code(lower(kernel), 2, 2500)  # smaller
    torch.testing.assert_close(Compiled(program)(a, w), fn(a, w), rtol=1e-13, atol=1e-13)
    (number, sources), *_ = kernel.overwrites.items()
    assert sources == [0]
    assert kernel.code is not None
    want, mine = fn(a, w), a.clone()
    out = [mine if place == number else None for place in range(2)]
    torch.testing.assert_close(list(kernel.code([mine, w], out)), list(want))  # type: ignore[call-arg]


def test_cross_entropies_of_other_kinds_are_left_alone() -> None:
    weight = torch.rand(9, dtype=torch.float64)
    for fn, why in (
        (lambda a: F.cross_entropy(a, LABELS, reduction="none"), "a loss of each row"),
        (lambda a: F.cross_entropy(a, LABELS, weight), "a weight for each class"),
    ):
        program = capture(fn, x(5, 9), backward=False)
        optimize(program, PassManager([Fusion()]))
        assert any(why in reason for reason in program.reports[0][1].refused)
        torch.testing.assert_close(Compiled(program)(x(5, 9)), fn(x(5, 9)))


def test_the_gradient_of_a_bias_is_summed_where_it_is_made(folder: Path) -> None:
    a, b = x(33, 20).requires_grad_(), x(20, seed=1).requires_grad_()
    program = generated(lambda a, b: F.gelu(a + b), folder, a, b)
    assert members(program, "backward") == [["gelu_backward", "sum"]]
    torch.testing.assert_close(
        torch.autograd.grad(Compiled(program)(a, b).sin().sum(), (a, b)),
        torch.autograd.grad(F.gelu(a + b).sin().sum(), (a, b)),
    )

    def reads_it(a: Tensor) -> Tensor:  # known after the last row only, so another group has to use it
        return a * 2 - (a * 3).sum(0, keepdim=True)

    torch.testing.assert_close(
        Compiled(generated(reads_it, folder, x(33, 20)))(x(33, 20)), reads_it(x(33, 20))
    )


def test_a_maximum_keeps_nan_and_an_operator_may_stand_alone(folder: Path) -> None:
    a = x(3, 70)
    a[1, 5] = math.nan
    fn = lambda a: a * 1.0 + a.amax(-1, keepdim=True)  # noqa: E731
    torch.testing.assert_close(Compiled(generated(fn, folder, a))(a), fn(a), equal_nan=True)
    program = capture(lambda a: a.softmax(-1), a, backward=False)
    optimize(program, PassManager([Fusion(CostModel(least_bytes=-1, least_nodes=1)), GenerateCpp(folder)]))
    (kernel,) = kernels(program.forward.graph)
    torch.testing.assert_close(Compiled(program)(a), a.softmax(-1), equal_nan=True)
    assert kernel.code is not None


def test_a_result_may_lie_on_an_input_only_if_that_is_not_read_again(folder: Path) -> None:
    a = x(3, 70)
    program = generated(lambda a: (b := a * 2, b + a.softmax(-1)), folder, a)
    (kernel,) = kernels(program.forward.graph)
    assert kernel.overwrites == {1: [0]}  # twice a is written while the softmax still reads a
    assert kernel.code is not None
    want = [a * 2, a * 2 + a.softmax(-1)]
    with pytest.raises(ValueError, match="reads input 0 again after it writes result 0"):
        kernel.code([a], [a, None])  # type: ignore[call-arg]
    torch.testing.assert_close(list(kernel.code([a], [None, a])), want)  # type: ignore[call-arg]


@pytest.mark.parametrize("family", ["unet", "bert"])
def test_families_train_the_same_on_generated_code(family: str, folder: Path) -> None:
    from fmlab.compiler import fusing_passes

    model, inputs = step(family)
    program = capture(model, kwargs=inputs)
    optimize(program, PassManager(fusing_passes(folder)))
    made = [kernel for graph in program.graphs.values() for kernel in kernels(graph)]
    assert all(kernel.code is not None for kernel in made)
    if family == "unet":
        assert sum("native_group_norm" in kernel.members for kernel in made) >= 4
        assert sum("native_group_norm_backward" in kernel.members for kernel in made) >= 4
    assert_same(Compiled(program), model, inputs, most=1e-11)


def parameters(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    kernel = x(4, 3, 3, 3, seed=1).contiguous(memory_format=IMAGES)
    return [y.to(dtype).requires_grad_() for y in (x(5, 7), kernel, x(1, seed=2), x(6, seed=3))]


def test_a_generated_adamw_is_torchs_and_takes_its_state(folder: Path) -> None:
    ours, theirs = parameters(), parameters()
    settings = dict(lr=0.02, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3)
    pair = CompiledAdamW(ours, **settings, folder=folder), torch.optim.AdamW(theirs, **settings)  # type: ignore[arg-type]
    for turn in range(6):
        if turn == 3:  # each goes on with the other's state
            pair[0].load_state_dict(deepcopy(pair[1].state_dict()))
        for optimizer, params in zip(pair, (ours, theirs), strict=True):
            optimizer.param_groups[0]["lr"] = 0.02 / (turn + 1)
            for i, p in enumerate(params[:3]):  # the last one has no gradient
                p.grad = (p.detach() * (i + 1)).sin()
            optimizer.step()
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-13)
    assert pair[0].generated
    with pytest.raises(ValueError, match="dense fp32 or fp64"):
        CompiledAdamW([torch.zeros(3, dtype=torch.bfloat16, requires_grad=True)])
    with pytest.raises(ValueError, match="beta1"):
        CompiledAdamW(ours, betas=(1.0, 0.9))
