"""Gradient sums and buckets: where they stand, how many they are, what they are divided by, what stays."""

import math
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from fmlab.compiler import (
    Bucket,
    Compiled,
    InsertGradientSums,
    Overlap,
    Pass,
    PassManager,
    Program,
    Report,
    capture,
    default_passes,
    optimize,
)
from fmlab.compiler.distributed.collective import start_of, waits
from tests.compiler.distributed.alone import one_rank
from tests.compiler.families import step
from tests.compiler.same import assert_same


@pytest.fixture
def alone() -> Iterator[dist.ProcessGroup]:
    with one_rank() as group:
        yield group


def captured(model: Callable[..., object], *inputs: Tensor, **kwargs: Tensor) -> Program:
    program = capture(model, *inputs, kwargs=kwargs)
    assert isinstance(program, Program)
    return program


def backward(program: Program) -> fx.Graph:
    return program.graphs["backward"]


class Layers(nn.Module):
    """`count` matrices [8, 8], one behind the other: 512 bytes each in fp64."""

    def __init__(self, count: int):
        super().__init__()
        torch.manual_seed(0)
        self.matrices = nn.ParameterList([torch.randn(8, 8, dtype=torch.float64) for _ in range(count)])

    def forward(self, x: Tensor) -> Tensor:
        for matrix in self.matrices:
            x = (x @ matrix).tanh()
        return x.sum()


class Line(nn.Module):
    """p x + q: the gradient of q is what comes into the backward graph."""

    def __init__(self, p: Tensor, q: Tensor):
        super().__init__()
        self.p, self.q = nn.Parameter(p.detach()), nn.Parameter(q.detach())

    def forward(self, x: Tensor) -> Tensor:
        return self.p * x + self.q


X = torch.ones(4, 8, dtype=torch.float64)


def test_each_gradient_is_summed_right_where_it_is_made() -> None:
    model, inputs = step("gpt")
    program = captured(model, **inputs)
    manager = PassManager([*default_passes(), InsertGradientSums("data")])
    reports = [one.report for one in manager.run(program.graphs) if one.report.name == "gradient sums"]
    forward, back = reports
    trained = sum(1 for _ in model.parameters())
    assert not forward.changed
    assert back.made["sum"] == back.after["all_reduce"] == back.after["wait_tensor"] == trained
    assert f"{trained}x sum" in str(back)
    for wait in waits(backward(program)):
        start = start_of(wait)
        assert start.prev is start.args[0]
        assert start.next is wait
        assert [user.op for user in wait.users] == ["output"]


@pytest.mark.parametrize("family", ["gpt", "resnet"])
def test_each_pass_keeps_values_and_gradients(family: str, alone: dist.ProcessGroup) -> None:
    model, inputs = step(family)
    program = captured(model, **inputs)
    optimize(program, PassManager(default_passes()))
    for one in (InsertGradientSums(alone), Bucket(4096), Overlap()):
        optimize(program, PassManager([one]))
        assert program.reports[-1][1].changed
        assert_same(Compiled(program), model, inputs)


def test_the_gradient_is_divided_by_what_the_caller_says(alone: dist.ProcessGroup) -> None:
    p, q, x = (torch.rand(3, requires_grad=True) for _ in range(3))
    model = Line(p, q)
    program = captured(model, x)
    optimize(program, PassManager([InsertGradientSums(alone, divide_by=4)]))
    Compiled(program)(x).sum().backward()
    for found, whole in ((model.p.grad, x), (model.q.grad, torch.ones(3)), (x.grad, p)):
        torch.testing.assert_close(found, whole.detach() / 4)
    assert program.reports[-1][1].made == {"sum": 2, "division by 4": 1}


def test_only_some_parameters_can_be_summed_and_none_twice() -> None:
    program = captured(Layers(3), X)
    first = InsertGradientSums("data", only={"matrices.1"}).run(backward(program))
    assert first.after["all_reduce"] == 1
    again = InsertGradientSums("data").run(backward(program))
    assert again.after["all_reduce"] == 3
    assert again.refused == ["matrices.1 is summed over data already"]
    assert Bucket(1e6).run(backward(program)).after["all_reduce"] == 1
    assert not InsertGradientSums("data").run(backward(program)).changed  # views of a bucket count too
    assert InsertGradientSums("other").run(backward(program)).after["all_reduce"] == 4


def test_a_parameter_without_a_gradient_is_left_alone() -> None:
    model = Layers(2)
    model.unused = nn.Parameter(torch.ones(3))
    report = InsertGradientSums("data").run(backward(captured(model, X)))
    assert report.made["sum"] == 2
    assert report.refused == ["unused has no gradient"]


BAD: dict[str, tuple[Callable[[], object], str]] = {
    "divided by 0": (lambda: InsertGradientSums("data", 0), "divide_by is 0; legal"),
    "divided by nan": (lambda: InsertGradientSums("data", math.nan), "divide_by is nan"),
    "an unknown parameter": (
        lambda: applied(InsertGradientSums("data", only={"w"})),
        "no parameter is called",
    ),
    "no group": (lambda: applied(InsertGradientSums(dist.group.WORLD)), "after init_process_group"),
    "a bucket of 0": (lambda: Bucket(0), "0 bytes holds nothing"),
    "a bucket of nan": (lambda: Bucket(math.nan), "nan bytes holds nothing"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused(case: str) -> None:
    fn, why = BAD[case]
    with pytest.raises(ValueError, match=why):
        fn()


def applied(*passes: Pass) -> Report:
    program = captured(Layers(6), X)
    for one in passes:
        report = one.run(backward(program))
    return report


@pytest.mark.parametrize(
    ("nbytes", "collectives", "refused"), [(512, 6, 0), (1024, 3, 0), (1600, 2, 0), (1e9, 1, 0), (511, 6, 6)]
)
def test_buckets_are_as_many_as_they_must_be(nbytes: float, collectives: int, refused: int) -> None:
    report = applied(InsertGradientSums("data"), Bucket(nbytes))
    assert report.before["all_reduce"] == 6
    assert report.after["all_reduce"] == report.after["wait_tensor"] == collectives
    assert len(report.refused) == refused
    assert report.made["sum merged"] in (0, 6)


def test_a_bucket_has_one_group_and_one_dtype_and_nothing_that_the_graph_itself_reads() -> None:
    model = Layers(4)
    model.matrices[1].data = model.matrices[1].data.float()

    def mixed(x: Tensor) -> Tensor:
        for matrix in model.matrices:
            x = (x @ matrix.double()).tanh()
        return x.sum()

    program = captured(mixed, X)
    assert InsertGradientSums("data").run(backward(program)).made["sum"] == 4
    assert Bucket(1e9).run(backward(program)).after["all_reduce"] == 3  # 3 and 2; 1; 0
    program = captured(model.double(), X)
    names = [name for name, _ in model.named_parameters()]
    InsertGradientSums("one", only=names[:2]).run(backward(program))
    InsertGradientSums("two", only=names[2:]).run(backward(program))
    assert Bucket(1e9).run(backward(program)).after["all_reduce"] == 2
    graph = backward(captured(model, X))
    InsertGradientSums("data").run(graph)
    first = next(waits(graph))
    with graph.inserting_after(first):
        read = graph.call_function(torch.ops.aten.neg.default, (first,))
    read.meta["val"] = first.meta["val"]
    next(node for node in graph.nodes if node.op == "output").replace_input_with(first, read)
    assert Bucket(1e9).run(graph).after["all_reduce"] == 2
