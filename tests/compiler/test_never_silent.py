"""What a graph cannot see, by kind: named at capture or refused at the call, never a silent wrong result."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmlab.compiler import CaptureError, Compiled, Eager, compile, default_passes, recompute
from fmlab.compiler.passes import Algebra, ConstantFolding

KEPT: list[Tensor] = []
FACTOR = 2.0


def draws_python(x: Tensor) -> Tensor:
    return x * random.random()  # here: python


def draws_numpy(x: Tensor) -> Tensor:
    return x * float(np.random.rand())  # here: numpy


def seeds(x: Tensor) -> Tensor:
    torch.manual_seed(3)  # here: seed
    return x * torch.rand(3)


def own_generator(x: Tensor) -> Tensor:
    return x * torch.rand(3, generator=torch.Generator().manual_seed(0))  # here: generator


def keeps(x: Tensor) -> Tensor:
    KEPT.append(x * 2)  # here: kept
    return x * 3


class Box:
    """Holds a tensor; torch's pytree does not know it."""

    def __init__(self, x: Tensor):
        self.x = x


class Counts(nn.Module):
    """Counts its calls in a number that it computes with."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1  # here: counter
        return x * self.calls


class Norm(nn.Module):
    """A batch norm without a counter: nothing in its operators' schemas says that statistics are written."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("variance", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x.expand(4, 3), self.mean, self.variance, training=True)  # here: statistics


def leaf(x: Tensor) -> Tensor:
    return F.relu_(x) * 2  # here: leaf


RECURRENT = nn.GRU(3, 3, num_layers=2, dropout=0.5)


def recurrent(x: Tensor) -> Any:
    return RECURRENT(x.view(1, 1, 3))[0]


REFUSED: dict[str, tuple[Callable[..., Any], str, str]] = {
    "python": (draws_python, "state", "Python's random generator"),
    "numpy": (draws_numpy, "state", "numpy's random generator"),
    "seed": (seeds, "state", "torch's generator"),
    "generator": (own_generator, "state", "a generator of its own"),
    "kept": (keeps, "state", r"a tensor \[3\] is kept outside"),
    "counter": (Counts(), "state", "Counts.calls is"),
    "statistics": (Norm(), "mutation", "changes buffer mean in place"),
    "leaf": (leaf, "mutation", "is changed in place"),
    "dropout between layers": (recurrent, "operator", "gru with dropout 0.5 between its 2 layers"),
    "unknown class": (lambda x: (x * 2, Box(x * 3)), "operator", "does not know its tensors"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_python_does_beside_the_graph_is_named_with_its_line(case: str) -> None:
    fn, kind, message = REFUSED[case]
    x = torch.tensor([-1.0, 2.0, 3.0], requires_grad=True)
    states = random.getstate(), torch.get_rng_state()
    with pytest.raises(CaptureError, match=message) as caught:
        compile(fn, x)
    KEPT.clear()
    assert caught.value.kind == kind
    if case not in ("dropout between layers", "unknown class"):
        assert caught.value.line is not None
        assert f"# here: {case}" in caught.value.line.text
    assert states[0] == random.getstate(), "a capture moves no generator"
    assert torch.equal(states[1], torch.get_rng_state())
    assert isinstance(compile(fn, x, fallback="eager"), Eager)
    KEPT.clear()


class Scaled(nn.Module):
    """Reads values of every kind from itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.sizes, self.act = 2.0, [1, 2], F.relu
        self.table = torch.ones(3)
        self.drop, self.inner = nn.Dropout(0.0), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.inner(self.drop(x))) * self.scale * len(self.sizes) + self.table


def _replace(model: Any) -> None:
    model.inner = nn.Linear(3, 3)


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "number": (lambda m: setattr(m, "scale", 3.0), "Scaled.scale is 3.0 and was 2.0"),
    "zero's sign": (lambda m: setattr(m, "scale", -0.0), "Scaled.scale"),
    "list": (lambda m: m.sizes.append(3), r"Scaled.sizes is \[1, 2, 3\]"),
    "function": (lambda m: setattr(m, "act", F.gelu), "Scaled.act"),
    "tensor": (lambda m: setattr(m, "table", torch.zeros(3)), "Scaled.table is another tensor"),
    "dropout": (lambda m: setattr(m.drop, "p", 0.5), "drop.p is 0.5 and was 0.0"),
    "module": (_replace, "Scaled.inner"),
    "hook": (lambda m: m.inner.register_forward_hook(lambda *a: None), "hooks of inner"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_value_that_the_graph_holds_may_not_change(case: str) -> None:
    change, message = CHANGES[case]
    model, x = Scaled(), torch.randn(2, 3)
    compiled = compile(model, x, passes=[])
    model.table += 1  # in place: the graph reads the tensor itself
    torch.testing.assert_close(compiled(x), model(x))
    change(model)
    with pytest.raises(ValueError, match=f"{message}.*compile again"):
        compiled(x)


def test_names_of_a_function_and_constants_of_other_types_are_refused_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inner = 2.0

    def both(x: Tensor) -> Tensor:
        return x * FACTOR * inner

    x = torch.arange(3.0, requires_grad=True)
    compiled = compile(both, x, passes=[])
    inner = 3.0
    with pytest.raises(ValueError, match=r"inner is 3.0 and was 2.0"):
        compiled(x)
    inner = 2.0
    monkeypatch.setitem(globals(), "FACTOR", 5.0)
    with pytest.raises(ValueError, match=r"FACTOR is 5.0 and was 2.0"):
        compiled(x)
    times = compile(lambda x, k: x * k, torch.arange(3), 1, passes=[], backward=False)
    for other in (1.0, True):
        with pytest.raises(ValueError, match="was 1 at capture"):
            times(torch.arange(3), other)
    compile(lambda x, k: x * k, torch.arange(3), float("nan"), passes=[], backward=False)
    with pytest.raises(CaptureError, match="of numpy"):
        compile(lambda x, k: x * torch.from_numpy(k), x, np.ones(3), passes=[])


def test_a_module_under_two_names_is_itself_again_after_a_capture() -> None:
    layer = nn.Linear(3, 3)
    model = nn.Sequential(layer, nn.Tanh(), layer)
    x = torch.randn(2, 3, requires_grad=True)
    compiled = compile(model, x)
    assert type(layer.weight) is nn.Parameter
    want, got = (torch.autograd.grad(f(x).sum(), [x, *model.parameters()]) for f in (model, compiled))
    torch.testing.assert_close(got, want)


def test_arguments_in_another_memory_order_are_laid_out_or_refused() -> None:
    def fn(x: Tensor) -> Tensor:
        return (x.view(-1).sin().view(4, 3) @ x).softmax(-1)

    x, other = torch.randn(3, 4, requires_grad=True), torch.randn(4, 3).T.requires_grad_()
    compiled = compile(fn, x)
    want, got = (torch.autograd.grad(f(a)[0, 0], a) for f, a in ((fn, other.contiguous()), (compiled, other)))
    torch.testing.assert_close(got, want, check_stride=False)
    strided = compile(lambda x: x.as_strided((2, 2), (1, 2)) * 2, x)
    with pytest.raises(ValueError, match=r"reads by strides \(as_strided\)"):
        strided(other)


@pytest.mark.parametrize("passes", [[], None])
def test_a_result_changed_in_place_under_the_backward_graph_is_noticed(passes: Any) -> None:
    x = torch.ones(3, 2, requires_grad=True)
    for fn in (lambda x: x.exp().view(-1), lambda x: x.exp()[0], torch.exp):
        result = compile(fn, x, passes=passes)(x)
        with torch.no_grad():
            result.mul_(2)
        with pytest.raises(RuntimeError, match=r"in place|inplace"):
            result.sum().backward()
    free = compile(lambda x: (x * 3).view(-1), x, passes=passes)(x)
    free += 1  # nobody needs what it was
    free.sum().backward()
    assert torch.equal(x.grad, torch.full((3, 2), 3.0))


def test_the_graphs_run_as_captured_under_autocast() -> None:
    layer, x = nn.Linear(8, 8), torch.randn(4, 8)

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = layer(x)
        with torch.autocast("cpu", enabled=False):
            return y, x @ x.T  # in fp32, whatever is around it

    with torch.autocast("cpu", torch.bfloat16):
        compiled = compile(fn, x)
        torch.testing.assert_close(compiled(x), fn(x), rtol=0, atol=0)
    with torch.autocast("cpu", torch.float16), pytest.raises(ValueError, match=r"float16.*bfloat16"):
        compiled(x)


NUMBERS: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
    "0.1 of another dtype": (lambda x: x * torch.full((3,), 0.1), torch.tensor([1.0, 2, 3]).double()),
    "0.1 of 16 bits": (lambda x: x * torch.full((3,), 0.1).bfloat16() * 1, torch.ones(3).bfloat16()),
    "whole numbers": (lambda x: x * torch.full((3,), 2), torch.arange(3)),
    "cut to a whole number": (lambda x: x * torch.full((3,), 2.7, dtype=torch.int64), torch.arange(3)),
    "more than fp64 holds": (lambda x: x + torch.full((3,), 2**53 + 1), torch.arange(3)),
    "whole from whole": (lambda x: torch.full((3,), 5) - x, torch.arange(3)),
    "divided": (lambda x: x / torch.full((3,), 2), torch.arange(3)),
    "a factor behind 0": (lambda x: torch.add(torch.full((3,), 0), x * 1, alpha=3) * 1, torch.arange(3)),
}


@pytest.mark.parametrize("case", NUMBERS)
def test_a_filled_tensor_is_the_number_that_its_dtype_holds(case: str) -> None:
    fn, x = NUMBERS[case]
    want, got = fn(x), compile(fn, x, passes=[Algebra(fast=True)], backward=False)(x)
    assert got.dtype == want.dtype
    assert torch.equal(got, want)


class Cosine(torch.autograd.Function):
    """Its backward makes a constant of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * torch.arange(3.0).cos() * ctx.saved_tensors[0]


def test_constants_of_both_graphs_stay_apart_when_work_moves_between_them() -> None:
    def fn(x: Tensor) -> Tensor:
        numbers = torch.arange(3.0) + 5
        return Cosine.apply((x * numbers.sin()).tanh() * numbers.cos()).exp()

    x = torch.randn(2, 3, requires_grad=True)
    compiled = compile(fn, x, passes=[ConstantFolding()])
    assert recompute(compiled.program, 0).bytes_after == 0
    (want,), (got,) = (torch.autograd.grad(f(x).sum(), x) for f in (fn, Compiled(compiled.program)))
    torch.testing.assert_close(got, want)
    with pytest.raises(ValueError, match="legal: 0 or more"):
        recompute(compiled.program, float("nan"))


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (1, 1)])
def test_empty_and_single_tensors_run_in_one_block(shape: tuple[int, int]) -> None:
    def fn(x: Tensor) -> Tensor:
        return ((x * 2).exp().sum(-1, keepdim=True) + x * 3).relu().sum(0)

    x = torch.randn(shape, requires_grad=True)
    compiled = Compiled(compile(fn, x, passes=default_passes()).program, one_block=True)
    torch.testing.assert_close(compiled(x), fn(x))
