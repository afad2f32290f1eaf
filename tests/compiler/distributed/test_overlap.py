"""Overlap: the order it gives, the communication it hides, the bound it keeps; and the model of time."""

import random
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fmlab.compiler import (
    Bucket,
    InsertGradientSums,
    Overlap,
    PassManager,
    Program,
    Runner,
    capture,
    default_passes,
    overlap_timeline,
    plan_memory,
)
from fmlab.compiler import graph as g
from fmlab.compiler.distributed.collective import insert_sum, is_start
from fmlab.compiler.distributed.schedule import arrange, scheduled
from tests.compiler.distributed.alone import one_rank
from tests.compiler.families import step

SQUARE = torch.eye(8, dtype=torch.float64)  # 512 bytes; a product of two is 1024 operations


def made(fn: Callable[..., object], *inputs: Tensor, sums: Sequence[str] = (), group: str = "g") -> fx.Graph:
    """The graph of `fn`, in which the nodes with these names are summed and the sums are read."""
    program = capture(fn, *inputs, backward=False)
    assert isinstance(program, Program)
    return summed(program.forward.graph, sums, group)


def summed(graph: fx.Graph, sums: Sequence[str], group: str) -> fx.Graph:
    for node in [node for node in graph.nodes if node.name in sums]:
        readers = list(node.users)
        wait = insert_sum(node.next, node, group)
        for reader in readers:
            reader.replace_input_with(node, wait)
    return graph


def order(graph: fx.Graph) -> list[str]:
    return [g.name(node) for node in g.calls(graph)]


def late(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """What is independent of the collective stands in front of what it sends."""
    b = b.mm(b).mm(b)
    return a.sin().cos(), b


def seconds(graph: fx.Graph, latency: float = 0.0) -> tuple[float, float, float, float]:
    line = overlap_timeline(graph, flops_rate=1024, bandwidth=512, latency=latency)
    return line.compute, line.communication, line.exposed, line.seconds


def test_starts_go_in_front_of_independent_work_and_waits_behind_it() -> None:
    graph = made(late, SQUARE, SQUARE, sums=["sin"])
    assert order(graph) == ["mm", "mm", "sin", "all_reduce", "wait_tensor", "cos"]
    report = Overlap().run(graph)
    assert order(graph) == ["sin", "all_reduce", "mm", "mm", "wait_tensor", "cos"]
    assert report.made == {"start earlier": 1, "wait later": 1}
    assert report.before == report.after
    assert not Overlap().run(graph).changed


def test_the_timeline_of_a_graph_is_worked_out_by_hand() -> None:
    graph = made(late, SQUARE, SQUARE, sums=["sin"])
    small = 64 / 1024  # sin or cos of 64 elements
    assert seconds(graph) == (2 + 2 * small, 1.0, 1.0, 3 + 2 * small)
    Overlap().run(graph)
    assert seconds(graph) == (2 + 2 * small, 1.0, 0.0, 2 + 2 * small)
    assert seconds(graph, latency=1.5) == (2 + 2 * small, 2.5, 0.5, 2.5 + 2 * small)
    text = str(overlap_timeline(graph, 1024, 512, 1.5))
    assert text.endswith("communication 2.5 s in 1 collective, of which 500 ms exposed")
    lanes = overlap_timeline(graph, 1024, 512, 1.5).lanes(42).splitlines()
    assert lanes == ["compute       " + "#" * 33 + "." * 8 + "#", "communication ." + "#" * 40 + "."]


def test_collectives_share_one_stream_and_memory_can_be_the_limit() -> None:
    def two(a: Tensor) -> tuple[Tensor, Tensor]:
        return a.sin().neg(), a.cos().neg()

    graph = made(two, SQUARE, sums=["sin", "cos"])
    Overlap().run(graph)
    assert order(graph) == ["sin", "all_reduce", "cos", "all_reduce", *("wait_tensor", "neg") * 2]
    line = overlap_timeline(graph, flops_rate=64, bandwidth=256, latency=0)
    sent = [(span.begin, span.end) for span in line.spans if span.stream == "communication"]
    assert sent == [(1, 3), (3, 5)]
    assert (line.exposed, line.seconds) == (2.0, 6.0)  # until 3, and from 4 to 5
    bound = overlap_timeline(graph, flops_rate=64, bandwidth=256, latency=0, memory_bandwidth=512)
    assert bound.compute == 8.0  # each of four reads and writes 1024 bytes


def test_the_sums_of_a_model_are_hidden_behind_its_backward_pass() -> None:
    model, inputs = step("gpt")
    program = capture(model, kwargs=inputs)
    assert isinstance(program, Program)
    PassManager([*default_passes(), InsertGradientSums("data"), Bucket(8192)]).run(program.graphs)
    graph = program.graphs["backward"]
    rates = dict(flops_rate=1e9, bandwidth=2e9, latency=1e-6)
    before = overlap_timeline(graph, **rates)
    assert before.exposed == pytest.approx(before.communication)
    starts = [node for node in graph.nodes if is_start(node)]
    peak = plan_memory(graph).peak
    Overlap().run(graph)
    after = overlap_timeline(graph, **rates)
    assert (after.compute, after.communication) == pytest.approx((before.compute, before.communication))
    assert after.exposed < 0.5 * before.exposed
    assert after.seconds == pytest.approx(after.compute + after.exposed)
    assert [node for node in graph.nodes if is_start(node)] == starts
    names = order(graph)
    assert names.index("wait_tensor") > max(i for i, name in enumerate(names) if name in ("mm", "all_reduce"))
    assert plan_memory(graph).peak <= peak


def wide(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    """Two steps with a large tensor in each, and work whose results, made before that, are in its way."""
    for _ in range(2):
        a = torch.cat([a] * 16).view(16, 8, 8).sum(0)
    return a, b * 2, b * 3, b * 4


def test_a_bound_on_live_bytes_is_kept_or_refused() -> None:
    graph = made(wide, SQUARE, SQUARE, sums=["sum_1", "sum_2"])
    given = [node for node in graph.nodes if node.op == "call_function"]
    loose = plan_memory(graph).peak
    Overlap().run(graph)
    assert plan_memory(graph).peak > loose
    arrange(graph, given)
    report = Overlap(loose).run(graph)
    assert plan_memory(graph).peak <= loose
    assert order(graph)[-5:] == ["all_reduce", "mul", "mul", "mul", "wait_tensor"]
    assert f"within {loose} bytes" in report.refused[0].replace(",", "")
    arrange(graph, given)
    text = g.text(graph)
    with pytest.raises(ValueError, match="bytes are alive in this graph wherever"):
        Overlap(loose - 1).run(graph)
    assert g.text(graph) == text


def test_random_operators_keep_their_order() -> None:
    def noisy(a: Tensor) -> tuple[Tensor, Tensor]:
        early = F.dropout(a, 0.5, True)
        return early, F.dropout(a, 0.25, True).sin().cos()

    graph = made(noisy, SQUARE, sums=["sin"])
    random_before = [node for node in graph.nodes if g.is_random(node)]
    assert len(random_before) == 2
    Overlap().run(graph)
    assert [node for node in graph.nodes if g.is_random(node)] == random_before


def test_what_overwrites_memory_stays_behind_all_who_read_it() -> None:
    def fn(a: Tensor) -> tuple[Tensor, Tensor]:
        x = a.sin()
        return x.t().cos(), x.neg().exp()

    graph = made(fn, SQUARE, sums=["neg"])
    Overlap().run(graph)
    assert order(graph).index("neg") < order(graph).index("cos")
    graph = made(fn, SQUARE, sums=["neg"])
    next(node for node in graph.nodes if node.name == "neg").meta["overwrites"] = {0: 0}
    Overlap().run(graph)
    assert order(graph).index("cos") < order(graph).index("neg")


def test_any_order_gives_the_same_bits() -> None:
    with one_rank() as group:
        for seed in range(6):
            draw = random.Random(seed)
            plan = [(draw.choice("+*s"), draw.random(), draw.random()) for _ in range(25)]

            def fn(a: Tensor, b: Tensor, plan: list[tuple[str, float, float]] = plan) -> tuple[Tensor, ...]:
                known = [a + b, a * b]
                for what, i, j in plan:
                    x, y = known[int(i * len(known))], known[int(j * len(known))]
                    known.append(x + y if what == "+" else x.tanh() * y if what == "*" else x.sin())
                return tuple(known[-3:])

            program = capture(fn, torch.rand(2, 2), torch.rand(2, 2), backward=False)
            assert isinstance(program, Program)
            names = [node.name for node in program.forward.graph.nodes if node.op == "call_function"]
            graph = summed(program.forward.graph, draw.sample(names, 6), group.group_name)
            inputs = [torch.rand(2, 2), torch.rand(2, 2)]
            given = [node for node in graph.nodes if node.op == "call_function"]
            assert graph.owning_module is not None
            want = Runner(graph.owning_module)(list(inputs))
            for ahead in (0, 2, len(given)):
                arrange(graph, scheduled(given, ahead))
                graph.lint()
                got = Runner(graph.owning_module)(list(inputs))
                assert all(torch.equal(x, y) for x, y in zip(want, got, strict=True))


@pytest.mark.parametrize(
    ("name", "rates"),
    [("flops_rate", (0, 1, 0)), ("bandwidth", (1, -1, 0)), ("latency", (1, 1, -1e-9))],
)
def test_rates_that_cannot_be_are_refused(name: str, rates: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match=name):
        overlap_timeline(made(late, SQUARE, SQUARE, sums=["sin"]), *rates)
