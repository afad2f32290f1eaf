"""Capture: graphs that equal eager in every family, parameters that stay live, and what cannot be held."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmlab.compiler import (
    CaptureError,
    Compiled,
    Eager,
    PassManager,
    Program,
    capture,
    compile,
    default_passes,
    optimize,
    recompute,
)
from fmlab.compiler.graph import is_random
from fmlab.models import CLIP, GPT
from tests.compiler.families import FAMILIES, step
from tests.compiler.same import assert_same


@pytest.mark.parametrize("family", FAMILIES)
def test_the_graphs_of_each_family_equal_eager_in_loss_and_every_gradient(family: str) -> None:
    model, inputs = step(family)
    compiled = compile(model, kwargs=inputs, passes=[])
    assert_same(compiled, model, inputs)
    optimize(compiled.program, PassManager(default_passes()))
    assert any(report.changed for _, report in compiled.program.reports)
    compiled = Compiled(compiled.program)
    assert_same(compiled, model, inputs)
    with torch.no_grad():
        torch.testing.assert_close(compiled(**inputs), model(**inputs), rtol=1e-12, atol=1e-12)


def test_parameters_stay_live_and_tied_weights_stay_one() -> None:
    model, inputs = step("gpt")
    compiled = compile(model, kwargs=inputs)
    assert {id(p) for p in compiled.parameters()} == {id(p) for p in model.parameters()}
    program = compiled.program
    assert sum(entry.name.endswith("tokens.weight") for entry in program.flat.inputs) == 1
    twin, _ = step("gpt")
    for module in (model, twin):
        run = compiled if module is model else twin
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
        for _ in range(3):
            optimizer.zero_grad()
            run(**inputs)[0].backward()
            optimizer.step()
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12, msg=name)


def test_a_state_comes_back_whole_and_without_tensors_of_the_capture() -> None:
    torch.manual_seed(0)
    model = GPT.from_preset("gpt2-tiny", num_layers=1, hidden_size=16, num_heads=2, vocab_size=64).eval()
    ids = torch.randint(0, 64, (2, 6))
    compiled = compile(model, ids)
    for tokens in (ids, ids.flip(0)):
        got, want = compiled(tokens), model(tokens)
        assert list(got) == list(want)
        assert got.input_ids is tokens
        assert not any(isinstance(x, Tensor) for mask in got.derived.values() for x in vars(mask).values())
        torch.testing.assert_close(dict(got), dict(want))


def test_shapes_and_dtypes_are_in_the_graphs() -> None:
    program = capture(lambda x: (x @ x.T).sum(), torch.randn(3, 4, requires_grad=True))
    assert isinstance(program, Program)
    assert program.backward is not None
    for graph in program.graphs.values():
        for node in graph.nodes:
            assert node.op == "output" or node.meta["val"].shape is not None
    assert "float32[3, 3] = mm" in str(program)
    assert "# backward" in str(program)


class Straight(torch.autograd.Function):
    """Rounds; passes the gradient through as if it had not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 3


def test_a_backward_written_by_hand_is_kept_and_rewrites_before_it_are_left_out() -> None:
    x = torch.tensor([0.2, 1.7], requires_grad=True)
    compiled = compile(lambda x: (Straight.apply(x) * x).sum(), x)
    assert isinstance(compiled, Compiled)
    compiled(x).backward()
    torch.testing.assert_close(x.grad, 3 * x.detach() + x.detach().round())
    assert "Straight has a backward of its own" in compiled.program.notes[0]


def branches(x: Tensor) -> Tensor:
    if x.sum() > 0:  # here: branches
        return x * 2
    return x


def reads(x: Tensor) -> Tensor:
    return x * x.max().item()  # here: reads


def counts(x: Tensor) -> Tensor:
    return x[x > 0].sum()  # here: counts


def writes(x: Tensor) -> Tensor:
    y = x.detach()
    y[0].mul_(2)  # here: writes
    return x * 1


class Counter(nn.Module):
    """Changes a buffer in one of three ways."""

    def __init__(self, how: str):
        super().__init__()
        self.how = how
        self.weight = nn.Parameter(torch.ones(3))
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "in place":
            self.seen += x.detach()  # here: in place
        elif self.how == "anew":
            self.seen = self.seen + x.detach()
        else:
            self.last = x * 2  # here: attribute
        return x * self.weight


REFUSED: dict[str, tuple[Callable[..., Any], str, str]] = {
    "branches": (branches, "control flow", "a value of a tensor is read"),
    "reads": (reads, "control flow", "a value of a tensor is read"),
    "counts": (counts, "shape", "shape of a result depends on the values"),
    "writes": (writes, "mutation", "changes argument 0 in place"),
    "in place": (Counter("in place"), "mutation", "changes buffer seen in place"),
    "anew": (Counter("anew"), "state", "seen is set to another tensor"),
    "attribute": (Counter("attribute"), "state", "Counter.last is set to a tensor"),
    "view": (lambda x: (x * 1, x.view(-1)), "alias", "output 1 is a view of argument 0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_graph_cannot_hold_is_named_with_its_line_and_runs_eagerly_on_request(case: str) -> None:
    fn, kind, message = REFUSED[case]
    x = torch.tensor([-1.0, 2.0, 3.0], requires_grad=True)
    with pytest.raises(CaptureError, match=message) as caught:
        compile(fn, x)
    error = caught.value
    assert error.kind == kind
    if case not in ("anew", "view"):
        assert error.line is not None
        assert f"# here: {case}" in error.line.text
        assert error.line.file == __file__
    eager = compile(fn, x, fallback="eager")
    assert isinstance(eager, Eager)
    assert eager.why.kind == kind
    if case != "writes":
        torch.testing.assert_close(eager(x), fn(x))
    assert not isinstance(getattr(fn, "last", None), torch._subclasses.FakeTensor)


def test_a_models_own_mutation_is_named_in_its_file() -> None:
    model = CLIP.from_preset("clip-tiny").train()
    ids = torch.full((1, 8), 3)
    with pytest.raises(CaptureError, match="log_scale in place") as caught:
        capture(model, torch.randn(1, 3, 32, 32), ids)
    assert caught.value.line is not None
    assert caught.value.line.file.endswith("clip.py")
    assert "clamp_" in caught.value.line.text


def test_a_gradient_that_would_get_lost_is_refused_and_modules_of_a_closure_are_found() -> None:
    loose, layer = torch.randn(3, requires_grad=True), nn.Linear(3, 3)
    x = torch.randn(2, 3)
    with pytest.raises(CaptureError, match="its gradient would get lost"):
        compile(lambda x: (x * loose).sum(), x.requires_grad_())
    compiled = compile(lambda x: layer(x).sum(), x)
    compiled(x).backward()
    torch.testing.assert_close(layer.weight.grad, x.detach().sum(0).expand(3, 3))


def test_a_call_that_the_graphs_do_not_hold_for_is_refused() -> None:
    layer = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).eval()
    compiled = compile(lambda x, factor: layer(x) * factor, torch.randn(2, 4), 2.0)
    compiled(torch.randn(2, 4), 2.0)
    with pytest.raises(ValueError, match=r"shape \(3, 4\), captured \(2, 4\)"):
        compiled(torch.randn(3, 4), 2.0)
    with pytest.raises(ValueError, match=r"dtype torch.float64"):
        compiled(torch.randn(2, 4).double(), 2.0)
    with pytest.raises(ValueError, match=r"argument 1 is 3.0 and was 2.0"):
        compiled(torch.randn(2, 4), 3.0)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="autocast"):
        compiled(torch.randn(2, 4), 2.0)
    layer.train()
    with pytest.raises(ValueError, match="another mode"):
        compiled(torch.randn(2, 4), 2.0)
    with pytest.raises(ValueError, match="backward=False"):
        compile(lambda x: x * 2, torch.randn(3))
    with pytest.raises(ValueError, match="legal"):
        compile(F.relu, torch.randn(3, requires_grad=True), partition="max-cut")


def test_dropout_draws_what_eager_draws_and_min_cut_saves_less() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.5), nn.Linear(8, 8), nn.Softmax(-1))
    x = torch.randn(4, 8)
    compiled = compile(model, x)
    torch.manual_seed(3)
    want = model(x)
    torch.manual_seed(3)
    torch.testing.assert_close(compiled(x), want)
    x.requires_grad_()
    chain = {how: compile(lambda x: x.sin().cos().exp(), x, partition=how) for how in ("default", "min-cut")}
    assert chain["min-cut"].program.saved_bytes < chain["default"].program.saved_bytes
    want, got = (torch.autograd.grad(chain[how](x).sum(), x) for how in chain)
    torch.testing.assert_close(got, want)


def test_a_copy_of_a_program_takes_passes_of_its_own() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    x = torch.randn(3, 4, requires_grad=True)
    program = capture(model, x)
    before, twin = str(program), program.copy()
    assert recompute(twin, 0).bytes_after == 0
    assert str(program) == before != str(twin)
    (want,), (got,) = (torch.autograd.grad(Compiled(one)(x).sum(), x) for one in (program, twin))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("partition", ["default", "min-cut"])
def test_the_backward_graph_runs_no_random_operator_of_the_forward_pass_again(partition: str) -> None:
    def attend(q: Tensor) -> Tensor:
        return F.dropout(F.scaled_dot_product_attention(q, q, q, is_causal=True), 0.5, True)

    q = torch.randn(1, 2, 8, 4, requires_grad=True)
    compiled = compile(attend, q, partition=partition)
    assert not any(is_random(node) for node in compiled.program.backward.graph.nodes)
    result = compiled(q).sum()
    drawn = torch.get_rng_state()
    result.backward()
    assert torch.equal(torch.get_rng_state(), drawn)


def test_gradients_in_another_memory_order_are_taken() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    compiled = compile(lambda x: (x.sin(), x.cos()), x)
    first, _ = compiled(x)
    (
        first.T * torch.ones(4, 3)
    ).sum().backward()  # the gradient comes transposed; there is none for the second
    torch.testing.assert_close(x.grad, x.detach().cos())
