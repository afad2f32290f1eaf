"""Generated Triton: operators against torch, families against eager, bytes counted, built for other GPUs."""

import ast
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._guards import detect_fake_mode

from fmlab.compiler import (
    Compiled,
    FusedKernel,
    Fusion,
    GenerateTriton,
    PassManager,
    Program,
    SplitBias,
    capture,
    default_passes,
    kernels,
    optimize,
)
from fmlab.compiler.codegen import TritonGroup
from fmlab.compiler.codegen.triton_maths import EXPRESSIONS
from fmlab.compiler.fusion.operators import ELEMENTWISE, GELU
from fmlab.compiler.graph import nbytes
from tests.compiler.families import FAMILIES, step
from tests.compiler.same import assert_same

aten = torch.ops.aten
pytest.importorskip("triton", reason="Triton, the extra `kernels`, is for Linux only")
from fmlab.kernels import triton as ft  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("triton")


def optimized(fn: Callable[..., Any], folder: Path, *inputs: Tensor) -> Program:
    program = capture(fn, *inputs, backward=any(x.requires_grad for x in inputs))
    assert isinstance(program, Program)
    optimize(program, PassManager([SplitBias(), Fusion(), GenerateTriton(folder)]))
    return program


def groups(program: Program) -> list[FusedKernel]:
    return [kernel for graph in program.graphs.values() for kernel in kernels(graph)]


def generated(fn: Callable[..., Any], folder: Path, *inputs: Tensor) -> Program:
    program = optimized(fn, folder, *inputs)
    assert groups(program)
    assert all(isinstance(kernel.code, TritonGroup) for kernel in groups(program)), program.reports[-1][
        1
    ].refused
    return program


def x(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def arguments(target: Any, a: Tensor, b: Tensor) -> tuple[object, ...]:
    if target is aten.where.self:
        return (a > 0, a, b)
    if target is aten.logical_not.default:
        return (a > 0,)
    tensors = iter((a, b))
    names = [argument.type.kind() for argument in target._schema.arguments if not argument.kwarg_only]
    wanted = names[: 3 if target is aten.threshold_backward.default else 2]
    return tuple(next(tensors) if kind == "TensorType" else 0.25 for kind in wanted)


def test_every_elementwise_operator_equals_torch_in_fp64(folder: Path) -> None:
    targets = [target for target in ELEMENTWISE if target in EXPRESSIONS]

    def fn(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        results = [target(*arguments(target, a, b)) for target in targets]  # type: ignore[operator]
        for how in GELU:
            results += [aten.gelu(a, approximate=how), aten.gelu_backward(b, a, approximate=how)]
        return tuple(result.to(a.dtype) * 2 if result.dtype != torch.bool else ~result for result in results)

    assert len(targets) >= 28
    a, b = x(5, 7).abs() + 0.1, x(5, 7, seed=1)
    a[0] *= -1
    a[1, :4] = torch.tensor([0.0, 1e-9, 0.0999, -0.1001])
    program = generated(fn, folder, a, b)
    torch.testing.assert_close(Compiled(program)(a, b), fn(a, b), rtol=1e-11, atol=1e-14, equal_nan=True)


def test_reductions_over_rows_and_their_gradients_equal_torch_in_fp64(folder: Path) -> None:
    def fn(a: Tensor, w: Tensor, b: Tensor) -> Tensor:
        normed = F.layer_norm(a * 2, (7,), w, b, 1e-3) + F.layer_norm(a, (7,))
        ways = normed.softmax(-1) + normed.log_softmax(-1) * 0.1
        moments = normed.sum(-1, keepdim=True) + normed.square().mean(-1, keepdim=True).rsqrt()
        return ways * moments + (normed - normed.amax(-1, keepdim=True).detach()).exp()

    inputs = [y.requires_grad_() for y in (x(3, 500, 7), x(7, seed=1), x(7, seed=2))]
    program = generated(fn, folder, *inputs)
    assert max(kernel.code.tiles.programs for kernel in groups(program)) == math.ceil(1500 / 256)  # type: ignore[union-attr]
    want, got = fn(*inputs), Compiled(program)(*inputs)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)
    weights = x(3, 500, 7, seed=3)
    torch.testing.assert_close(
        torch.autograd.grad((got * weights).sum(), inputs),
        torch.autograd.grad((want * weights).sum(), inputs),
        rtol=1e-9,
        atol=1e-10,
    )


SLOW = pytest.mark.slow  # the interpreter takes some milliseconds a line and program


@pytest.mark.parametrize("family", [pytest.param(f, marks=[SLOW] * (f == "unet")) for f in FAMILIES])
def test_a_family_trains_the_same_on_generated_kernels(family: str, folder: Path) -> None:
    model, inputs = step(family)
    program = capture(model, kwargs=inputs)
    assert isinstance(program, Program)
    optimize(program, PassManager([*default_passes(), SplitBias(), Fusion(), GenerateTriton(folder)]))
    made = groups(program)
    refused = [why for _, report in program.reports if report.name == "Triton" for why in report.refused]
    assert all(isinstance(kernel.code, TritonGroup) for kernel in made), refused
    assert {"gpt": 8, "bert": 6, "t5": 15, "clip": 8, "unet": 12, "resnet": 2}[family] <= len(made)
    with ft.count_bytes() as count:
        assert_same(Compiled(program), model, inputs, most=1e-11)
    assert len(count.launches) == len(made), "each group is one kernel"
    assert (count.loaded, count.stored) == tuple(
        sum(part)
        for part in zip(*(kernel.code.traffic for kernel in made), strict=True)  # type: ignore[union-attr]
    )


def test_masks_of_minus_infinity_blind_rows_and_nan_are_as_in_torch(folder: Path) -> None:
    mask = torch.zeros(4, 6).masked_fill(torch.ones(4, 6, dtype=torch.bool).triu(2), -math.inf)
    mask[3] = -math.inf
    a = x(4, 6, dtype=torch.float32)
    a[1, 2] = math.nan

    def fn(a: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        scores = a * 3 + mask
        return scores.softmax(-1), scores.amax(-1, keepdim=True) + 1, scores.relu(), scores.tanh()

    got, want = Compiled(generated(fn, folder, a, mask))(a, mask), fn(a, mask)
    torch.testing.assert_close(got, want, equal_nan=True)
    assert got[0][3].isnan().all()
    assert got[1][1].isnan()


def test_a_file_is_python_to_be_read_and_groups_that_compute_the_same_share_it(tmp_path: Path) -> None:
    def twice(a: Tensor, b: Tensor, w: Tensor) -> Tensor:
        return F.gelu(F.gelu(a + b) @ w + b)

    program = generated(twice, tmp_path, x(4, 6), x(6), x(6, 6))
    first, second = groups(program)
    assert "Triton: 2x kernel, 1x file" in str(program.reports[-1][1])
    assert first.code.kernel is second.code.kernel  # type: ignore[union-attr]
    (file,) = tmp_path.glob("*.py")
    assert file.read_text() == first.code.source == second.code.source  # type: ignore[union-attr]
    assert [one.name for one in ast.parse(file.read_text()).body if isinstance(one, ast.FunctionDef)] == [
        "f_gelu",
        "add_gelu_kernel",
    ]
    assert max(map(len, file.read_text().splitlines())) <= 110
    file.write_text("broken")
    (again, _) = groups(generated(twice, tmp_path, x(4, 6), x(6), x(6, 6)))
    assert file.read_text() == again.code.source  # type: ignore[union-attr]


def test_bytes_are_those_of_the_fused_group_and_of_its_tiles(folder: Path) -> None:
    def fn(a: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.layer_norm(a.relu(), (5,), w, b)

    for rows, programs in ((64, 1), (1000, 4)):
        inputs = [y.requires_grad_() for y in (x(rows, 5), x(5, seed=1), x(5, seed=2))]
        program = generated(fn, folder, *inputs)
        with ft.count_bytes() as count:
            Compiled(program)(*inputs).sum().backward()
        for launch, kernel in zip(count.launches, groups(program), strict=True):
            code = kernel.code
            assert isinstance(code, TritonGroup)
            assert launch.programs == code.tiles.programs == programs
            assert (launch.loaded.total(), launch.stored.total()) == code.traffic
            given = [node for node in kernel.graph.nodes if node.op == "placeholder"]
            made = next(node for node in kernel.graph.nodes if node.op == "output").all_input_nodes
            once = sum(nbytes(node) for node in (*(given[number] for number, _ in code.lowered.reads), *made))
            again = sum(kind in ("row", "sum") for _, kind in (*code.lowered.reads, *code.lowered.writes))
            assert code.traffic.total == once + (programs - 1) * again * 5 * 8
            assert again == (
                2 if kernel is groups(program)[0] else 3
            )  # weight, bias; weight, their gradients


def test_generated_kernels_compile_for_gpus_that_are_not_here(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def fn(a: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return (F.gelu(a + b, approximate="tanh") * (a > 0)).softmax(-1) + F.layer_norm(a, (64,), w, b)

    def rows(dtype: torch.dtype) -> list[Tensor]:
        return [y.to(dtype).requires_grad_() for y in (x(8, 64), x(64, seed=1), x(64, seed=2))]

    def images(a: Tensor, w: Tensor) -> Tensor:
        return F.silu(F.group_norm(a, 2, w, w))

    pixels = x(2, 8, 4, 4, dtype=torch.float32).to(memory_format=torch.channels_last).requires_grad_()
    labels = torch.arange(8)
    cases: list[tuple[Callable[..., Tensor], list[Tensor]]] = [
        (fn, rows(torch.float32)),
        (fn, rows(torch.float64)),
        (lambda a, w, b: (a + w).softmax(-1), rows(torch.bfloat16)),
        (lambda a, t: F.cross_entropy(a * 2, t), [rows(torch.float32)[0], labels]),
        (images, [pixels, torch.ones(8, requires_grad=True)]),
    ]
    launches = {}
    for fn, inputs in cases:
        program = generated(fn, folder, *inputs)
        with ft.count_bytes() as count:
            Compiled(program)(*inputs).sum().backward()
        launches |= {(launch.kernel.__name__, inputs[0].dtype): launch for launch in count.launches}
    assert len(launches) >= 9
    for launch in launches.values():
        made = ft.compile_for(launch, "sm_90a")
        assert made.size > 500
        assert made.spilled == 0


def test_results_may_be_preallocated_and_other_tensors_are_refused(folder: Path) -> None:
    a, w, b = x(301, 67), x(67, seed=1), x(67, seed=2)
    program = generated(lambda a, w, b: F.layer_norm(a.relu(), (67,), w, b), folder, a, w, b)
    (kernel,) = groups(program)
    out = kernel.empty()
    assert isinstance(kernel.code, TritonGroup)
    made = kernel.code([a, w, b], out)
    assert all(one is given for one, given in zip(made, out, strict=True))
    torch.testing.assert_close(out, list(kernel.code([a.T.contiguous().T, w, b])))
    torch.testing.assert_close(list(kernel.code([a, w, b], [None, *out[1:]])), out)
    with pytest.raises(ValueError, match="takes and writes plain tensors"):
        kernel.code([a, w, b.float()], out)
    with pytest.raises(ValueError, match="in the memory of an input"):
        kernel.code([a, w, b], [a, *out[1:]])


def test_groups_that_cannot_be_lowered_are_named_and_still_run(folder: Path) -> None:
    a, b = x(4, 6), x(6, dtype=torch.float32)
    cases: list[tuple[Callable[..., Tensor], tuple[Tensor, ...], str]] = [
        (lambda a, b: (a * 2 + b).exp(), (a, b), "dtypes"),
        (lambda a: (a * 2).softmax(-1), (x(2, 70_000),), "rows of 70,000 numbers"),
    ]
    for fn, inputs, why in cases:
        program = optimized(fn, folder, *inputs)
        assert all(kernel.code is None for kernel in groups(program))
        (reason,) = program.reports[-1][1].refused
        assert why in reason
        torch.testing.assert_close(Compiled(program)(*inputs), fn(*inputs))


def test_without_triton_that_is_said_and_groups_still_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    a = x(4, 6)
    program = optimized(lambda a: (a * 2).exp(), folder, a)
    (reason,) = program.reports[-1][1].refused
    assert "no Triton: this needs the package 'triton'" in reason
    assert ".[kernels]" in reason
    torch.testing.assert_close(Compiled(program)(a), (a * 2).exp())


def test_a_cross_entropy_is_one_kernel_there_and_one_back_and_labels_out_of_range_are_seen(
    folder: Path,
) -> None:
    scores, labels = x(300, 11).requires_grad_(), torch.arange(300) % 11
    labels[::3] = -100
    for reduction in ("mean", "sum"):
        fn = lambda a, t, how=reduction: F.cross_entropy(a * 2, t, reduction=how)  # noqa: E731
        program = generated(fn, folder, scores, labels)
        assert [len(kernels(graph)) for graph in program.graphs.values()] == [1, 1]
        with ft.count_bytes() as count:
            got, want = Compiled(program)(scores, labels), fn(scores, labels)
            torch.testing.assert_close(got, want)
            torch.testing.assert_close(*(torch.autograd.grad(one, scores)[0] for one in (got, want)))
        assert [launch.programs for launch in count.launches] == [3, 3]
        sizes = [kernel.code.traffic for kernel in groups(program)]  # type: ignore[union-attr]
        assert [(one.loaded.total(), one.stored.total()) for one in count.launches] == sizes
    labels[1] = 11
    with torch.no_grad():
        assert Compiled(program)(scores, labels).isnan()


def test_images_in_channels_last_are_normalised_by_group_in_one_kernel(folder: Path) -> None:
    a = x(2, 6, 5, 3).to(memory_format=torch.channels_last).requires_grad_()
    w, b, shift = (y.requires_grad_() for y in (x(6, seed=1), x(6, seed=2), x(2, 6, 1, 1, seed=3)))

    def fn(a: Tensor, w: Tensor, b: Tensor, shift: Tensor) -> Tensor:
        return F.silu(F.group_norm(a + shift, 3, w, b, 1e-3))

    program = generated(fn, folder, a, w, b, shift)
    with ft.count_bytes() as count:
        got, want = Compiled(program)(a, w, b, shift), fn(a, w, b, shift)
        torch.testing.assert_close(got, want)
        grads = [torch.autograd.grad(one.sin().sum(), (a, w, b, shift)) for one in (got, want)]
        torch.testing.assert_close(*grads)
    assert count.launches[0].grid == (2, 3), "a program for each image and group of channels"
    sizes = [kernel.code.traffic for kernel in groups(program)]  # type: ignore[union-attr]
    assert [(one.loaded.total(), one.stored.total()) for one in count.launches] == sizes


def test_bf16_is_computed_in_fp32_and_rounded_where_it_is_written(folder: Path) -> None:
    a, w = (y.bfloat16() for y in (x(9, 40), x(40, seed=1)))
    fn = lambda a, w: (a * 3 + w).softmax(-1)  # noqa: E731
    got = Compiled(generated(fn, folder, a, w))(a, w)
    exact = fn(a.double(), w.double())
    assert got.dtype == torch.bfloat16
    assert ((got.double() - exact).abs() <= 2**-8 * exact).all(), "rounded once"
    assert ((fn(a, w).double() - exact).abs() > 2**-8 * exact).any(), "and not at every step, as eager does"
    rows, bias = x(1200, 5).bfloat16(), x(5, seed=1).bfloat16().requires_grad_()
    program = generated(lambda a, b: (a + b).tanh(), folder, rows, bias)
    with ft.count_bytes() as count:
        Compiled(program)(rows, bias).sum().backward()
    assert count.launches[-1].programs == 5
    assert count.launches[-1].stored.total() == groups(program)[-1].code.traffic.stored  # type: ignore[union-attr]
    saved = (rows + bias).detach().float().tanh().bfloat16().double()  # as the forward kernel hands it over
    exact = (1 - saved**2).sum(0)
    assert ((bias.grad.double() - exact).abs() <= 2**-8 * exact.abs()).all(), "sums of a program are fp32"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU that PyTorch sees")
@pytest.mark.parametrize("family", ["gpt", "bert", "t5", "clip"])
def test_on_a_gpu_the_kernels_are_compiled_and_launched(family: str, folder: Path) -> None:
    model, inputs = step(family)
    model, inputs = model.cuda(), {name: one.cuda() for name, one in inputs.items()}
    program = capture(model, kwargs=inputs)
    assert isinstance(program, Program)
    fusion = Fusion(device="cuda")
    optimize(program, PassManager([*default_passes(), SplitBias(), fusion, GenerateTriton(folder)]))
    assert any(isinstance(kernel.code, TritonGroup) for kernel in groups(program))
    assert_same(Compiled(program), model, inputs, most=1e-10)


def test_fusion_is_told_the_device_and_code_is_called_on_its_own_devices_alone(folder: Path) -> None:
    program = capture(lambda a: (a * 2).exp(), x(4, 6), backward=False)
    assert isinstance(program, Program)
    optimize(program, PassManager([Fusion(device="cuda")]))
    assert not groups(program)
    assert "mul: not on cuda" in program.reports[-1][1].refused
    with detect_fake_mode([node.meta["val"] for node in program.forward.graph.nodes if "val" in node.meta]):
        elsewhere = torch.empty(4, 6, device="cuda")  # without data, so that no GPU is needed
    for node in program.forward.graph.nodes:
        node.meta["val"] = elsewhere
    optimize(program, PassManager([Fusion(device="cuda"), GenerateTriton(folder)]))
    (kernel,) = groups(program)
    assert isinstance(kernel.code, TritonGroup)
    assert kernel.fake()[0].device.type == "cuda"
    with pytest.raises(ValueError, match="'cpu' or 'cuda'"):
        Fusion(device="tpu")
    kernel.code = lambda inputs, out=None: pytest.fail(
        "C++ on another device"
    )  # as GenerateCpp's: names no device
    assert kernel(torch.empty(4, 6, device="meta"))[0].device.type == "meta"


def test_the_example_in_the_guide_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (Path(__file__).parents[2] / "docs" / "compiler.md").read_text()
    (example,) = re.findall(r"## Generated Triton.*?```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    names: dict[str, Any] = {}
    exec(example, names)
    traffic, count = names["group"].traffic, names["count"]
    assert (count.loaded, count.stored) == traffic
    assert "def add_gelu_kernel(" in capsys.readouterr().out
    assert list((tmp_path / "kernels").glob("add_gelu_kernel_*.py"))
