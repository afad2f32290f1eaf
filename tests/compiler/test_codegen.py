"""Generated C++: each operator against torch, fp32 functions against fp64, machines without a compiler."""

import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fmlab.compiler import (
    Compiled,
    Fusion,
    GenerateCpp,
    NoCompiler,
    PassManager,
    Program,
    SplitBias,
    capture,
    fusing_passes,
    kernels,
    optimize,
)
from fmlab.compiler.codegen import build, cache_folder, compiler, source
from fmlab.compiler.fusion.operators import ELEMENTWISE, GELU, GELU_BACKWARD
from tests.compiler.families import step
from tests.compiler.same import assert_same

aten = torch.ops.aten
try:
    compiler()
except NoCompiler as error:  # Windows, or a bare container
    pytest.skip(str(error), allow_module_level=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


def generated(fn: Callable[..., object], folder: Path, *inputs: Tensor) -> Program:
    program = capture(fn, *inputs, backward=any(x.requires_grad for x in inputs))
    assert isinstance(program, Program)
    optimize(program, PassManager([SplitBias(), Fusion(), GenerateCpp(folder)]))
    made = [kernel for graph in program.graphs.values() for kernel in kernels(graph)]
    assert made
    assert all(kernel.code is not None for kernel in made), program.reports[-1][1].refused
    return program


def x(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def arguments(target: object, a: Tensor, b: Tensor) -> tuple[object, ...]:
    names = [argument.type.kind() for argument in target._schema.arguments if not argument.kwarg_only]  # type: ignore[attr-defined]
    if target is aten.where.self:
        return (a > 0, a, b)
    if target is aten.logical_not.default:
        return (a > 0,)
    tensors = iter((a, b))
    wanted = names[: 3 if target is aten.threshold_backward.default else 2]
    return tuple(next(tensors) if kind == "TensorType" else 0.25 for kind in wanted)


def test_every_elementwise_operator_equals_torch_in_fp64(folder: Path) -> None:
    def fn(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        results = [target(*arguments(target, a, b)) for target in ELEMENTWISE]  # type: ignore[operator]
        for how in GELU:
            results += [aten.gelu(a, approximate=how), aten.gelu_backward(b, a, approximate=how)]
        return tuple(result.to(a.dtype) * 2 if result.dtype != torch.bool else ~result for result in results)

    assert set(GELU) == set(GELU_BACKWARD)
    a, b = x(5, 7).abs() + 0.1, x(5, 7, seed=1)
    a[0] *= -1
    program = generated(fn, folder, a, b)
    members = [name for kernel in kernels(program.forward.graph) for name in kernel.members]
    assert len(members) > len(ELEMENTWISE)
    torch.testing.assert_close(Compiled(program)(a, b), fn(a, b), rtol=1e-12, atol=1e-14, equal_nan=True)


def test_reductions_over_rows_and_their_gradients_equal_torch_in_fp64(folder: Path) -> None:
    def fn(a: Tensor, w: Tensor, b: Tensor) -> Tensor:
        normed = F.layer_norm(a * 2, (7,), w, b, 1e-3) + F.layer_norm(a, (7,))
        ways = normed.softmax(-1) + normed.log_softmax(-1) * 0.1
        moments = normed.sum(-1, keepdim=True) + normed.square().mean(-1, keepdim=True).rsqrt()
        return ways * moments + (normed - normed.amax(-1, keepdim=True).detach()).exp()

    inputs = [y.requires_grad_() for y in (x(3, 5, 7), x(7, seed=1), x(7, seed=2))]
    program = generated(fn, folder, *inputs)
    want, got = fn(*inputs), Compiled(program)(*inputs)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)
    weights = x(3, 5, 7, seed=3)
    torch.testing.assert_close(
        torch.autograd.grad((got * weights).sum(), inputs),
        torch.autograd.grad((want * weights).sum(), inputs),
        rtol=1e-10,
        atol=1e-11,
    )


FUNCTIONS = {
    torch.exp: 2e-7,
    torch.erf: 5e-7,
    torch.tanh: 5e-7,
    torch.sigmoid: 2e-7,
    F.gelu: 1e-6,
    F.silu: 1e-6,
}


def test_fp32_functions_keep_their_stated_error_and_nan_and_infinities(folder: Path) -> None:
    def fn(a: Tensor) -> tuple[Tensor, ...]:
        return tuple(function(a) * 1.0 for function in FUNCTIONS)

    grid = torch.cat(
        [torch.linspace(-100, 88.7, 40001), torch.linspace(-6, 6, 40001), torch.tensor([88.72, 0.0])]
    )
    special = torch.tensor([math.nan, math.inf, -math.inf, 89.0])
    a = torch.cat([grid, special])[None].repeat(2, 1)
    results = Compiled(generated(fn, folder, a))(a)
    for (function, most), result in zip(FUNCTIONS.items(), results, strict=True):
        exact = function(grid.double())
        # relative for exp where it is a normal number; else absolute below 1 and relative above
        scale = exact.clamp(min=1.2e-38) if function is torch.exp else exact.abs().clamp(min=1)
        assert ((result[0, :-4] - exact).abs() / scale)[grid > -87].max() < most, function
        if function not in (F.gelu, F.silu):  # of -infinity these are NaN in torch as well
            torch.testing.assert_close(result[1, -4:], function(special), equal_nan=True)


def test_masks_of_minus_infinity_and_blind_rows_are_as_in_torch(folder: Path) -> None:
    mask = torch.zeros(4, 6).masked_fill(torch.ones(4, 6, dtype=torch.bool).triu(2), -math.inf)
    mask[3] = -math.inf
    a = x(4, 6, dtype=torch.float32)
    fn = lambda a, mask: (a * 3 + mask).softmax(-1)  # noqa: E731
    got = Compiled(generated(fn, folder, a, mask))(a, mask)
    torch.testing.assert_close(got, fn(a, mask), equal_nan=True)
    assert got[3].isnan().all()


def test_results_may_be_preallocated_and_threads_share_rows_and_sums(folder: Path) -> None:
    a, w, b = (y.requires_grad_() for y in (x(301, 67), x(67, seed=1), x(67, seed=2)))
    program = generated(lambda a, w, b: F.layer_norm(a.relu(), (67,), w, b), folder, a, w, b)
    (kernel,) = kernels(program.forward.graph)
    out = kernel.empty()
    assert kernel.code is not None
    made = kernel.code([a, w, b], out)
    assert all(one is given for one, given in zip(made, out, strict=True))
    torch.testing.assert_close(out, list(kernel.code([a, w, b])))
    with pytest.raises(ValueError, match="takes and writes plain tensors"):
        kernel.code([a, w, b.float()], out)
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            got = torch.autograd.grad(Compiled(program)(a, w, b).sin().sum(), (a, w, b))
            want = torch.autograd.grad(F.layer_norm(a.relu(), (67,), w, b).sin().sum(), (a, w, b))
            torch.testing.assert_close(got, want)
    finally:
        torch.set_num_threads(threads)


def test_a_family_trains_the_same_on_generated_code(folder: Path) -> None:
    model, inputs = step("gpt")
    program = capture(model, kwargs=inputs)
    assert isinstance(program, Program)
    optimize(program, PassManager(fusing_passes(folder)))
    members = [set(kernel.members) for kernel in kernels(program.forward.graph)]
    assert {"add", "gelu"} in members
    assert {"add", "native_layer_norm"} in members
    assert sum(kernel.code is not None for kernel in kernels(program.graphs["backward"])) >= 5
    assert_same(Compiled(program), model, inputs, most=1e-11)


def test_without_a_compiler_that_is_named_and_groups_still_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    a = x(4, 6)
    for cxx, why in (("no-such-compiler", "no C++ compiler on this machine"), ("false", "false failed")):
        monkeypatch.setenv("CXX", cxx)
        with pytest.raises(NoCompiler, match=r"C\+\+ compiler|failed"):
            build(source({}), tmp_path)
        program = capture(lambda a: (a * 2).exp(), a, backward=False)
        assert isinstance(program, Program)
        optimize(program, PassManager([Fusion(), GenerateCpp(tmp_path)]))
        assert any(why in reason for reason in program.reports[-1][1].refused)
        torch.testing.assert_close(Compiled(program)(a), (a * 2).exp())


def test_other_dtypes_run_torchs_operators_and_a_source_is_built_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = x(4, 6), x(6, dtype=torch.float32)
    program = capture(lambda a, b: (a * 2 + b).exp(), a, b, backward=False)
    assert isinstance(program, Program)
    optimize(program, PassManager([Fusion(), GenerateCpp(folder)]))
    assert "dtypes" in program.reports[-1][1].refused[0]
    torch.testing.assert_close(Compiled(program)(a, b), (a * 2 + b).exp())
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*.so")}
    generated(lambda a, mask: (a * 3 + mask).softmax(-1), folder, x(4, 6).float(), x(4, 6).float())
    assert {path: path.stat().st_mtime_ns for path in folder.glob("*.so")} == before
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(folder))
    assert cache_folder() == folder / "fmlab" / "compiler"
