"""Meters count exactly what happened."""

import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fmlab import Ranks
from fmlab.meter import flops, peak_memory, saved_activations, traffic, wire

multirank = pytest.mark.multirank


def every_collective() -> dict[str, tuple[int, int]]:
    x, rank = torch.ones(12), dist.get_rank()
    with traffic() as sent:
        dist.all_reduce(x)
        dist.all_reduce(x.to(torch.bfloat16), async_op=True).wait()
        dist.all_gather_into_tensor(torch.empty(24), x)
        dist.all_gather([torch.empty(12), torch.empty(12)], x)
        dist.reduce_scatter_tensor(torch.empty(6), x)
        dist.all_to_all_single(torch.empty(12), x)
        dist.broadcast(x, 0)
        dist.barrier()
        if rank == 0:
            dist.send(x, 1)
        else:
            dist.recv(x, 0)
    return sent.by_op()


@multirank
def test_traffic_counts_calls_and_payload_of_each_collective(ranks2: Ranks) -> None:
    common = {
        "all_reduce": (2, 48 + 24),
        "all_gather": (2, 96 + 96),  # what is put together
        "reduce_scatter": (1, 48),  # what is taken in
        "all_to_all": (1, 48),
        "broadcast": (1, 48),
        "barrier": (1, 0),
    }
    assert ranks2.run(every_collective) == [common | {"send": (1, 48)}, common | {"recv": (1, 48)}]


def functional_and_ddp() -> tuple[dict[str, tuple[int, int]], dict[str, tuple[int, int]], tuple[int, ...]]:
    import torch.distributed._functional_collectives as functional

    x, world = torch.ones(12), dist.group.WORLD
    with traffic() as sent:
        functional.all_reduce(x, "sum", world).wait()
        functional.all_gather_tensor(x, 0, world).wait()
        functional.reduce_scatter_tensor(x, "sum", 0, world).wait()
    model = DistributedDataParallel(nn.Linear(10, 10))
    with traffic() as step:
        model(torch.ones(2, 10)).sum().backward()
    return sent.by_op(), step.by_op(), step.calls[0].ranks


@multirank
def test_traffic_sees_functional_collectives_and_the_reducer_of_ddp(ranks2: Ranks) -> None:
    expected = {"all_reduce": (1, 48), "all_gather": (1, 96), "reduce_scatter": (1, 48)}
    assert ranks2.run(functional_and_ddp) == [(expected, {"all_reduce": (1, 440)}, (0, 1))] * 2


def by_group() -> tuple[int, int, int]:
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]
    with traffic() as sent:
        dist.all_reduce(torch.ones(5), group=pair)
        dist.all_reduce(torch.ones(7, dtype=torch.float64))
    own = (0, 1) if dist.get_rank() < 2 else (2, 3)
    return sent.bytes(ranks=own), sent.bytes(ranks=(0, 1, 2, 3)), sent.count("all_reduce", dtype="float64")


@multirank
def test_traffic_by_group_and_type(ranks4: Ranks) -> None:
    assert ranks4.run(by_group) == [(20, 56, 1)] * 4


def ring(elements: int) -> tuple[int, int]:
    x = torch.ones(elements)
    dist.all_reduce(x)
    dist.barrier()
    with wire() as line:
        dist.all_reduce(x)
    dist.barrier()
    return line.sent, line.received


@multirank
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="TCP_INFO is Linux's")
@pytest.mark.parametrize("elements", [120_000, 1_200_000])
def test_wire_of_an_all_reduce_is_the_ring_formula_plus_headers(
    ranks2: Ranks, ranks4: Ranks, elements: int
) -> None:
    for ranks in (ranks2, ranks4):
        ideal = 2 * (ranks.n - 1) * elements * 4 // ranks.n
        for sent, received in ranks.run(ring, elements):
            assert 0 <= sent - ideal <= 4000  # headers of 96 bytes a message; not one payload byte more
            assert abs(received - ideal) <= 4000


def test_wire_says_where_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(RuntimeError, match=r"Linux's TCP_INFO .* this is darwin"), wire():
        pass
    with wire(required=False) as line:
        pass
    assert line.sent is None
    assert "darwin" in str(line)


def test_peak_memory_counts_storages_once_and_sees_them_go() -> None:
    outside = torch.empty(10_000)
    with peak_memory() as memory:
        a = torch.empty(1000)
        views = [a.view(10, 100), a[:5], outside[:10], outside.add_(1)]
        assert memory.live == 4000
        b = a + 1
        del a, views
        assert memory.live == 4000
        c = torch.empty(500)
        assert memory.live == 6000
        del b, c
    assert (memory.live, memory.peak) == (0, 8000)


def test_peak_memory_of_a_backward_pass() -> None:
    weight = torch.ones(1000, requires_grad=True)
    with peak_memory() as memory:
        loss = (weight * weight).sum()  # product 4000, sum 4
        loss.backward()
    assert memory.peak >= 4000 + 4 + 4000  # the gradient is made while the product may be gone
    assert memory.live == 4 + 4000  # loss and gradient


def test_saved_activations_exclude_parameters_and_share_storages() -> None:
    layer, x = nn.Linear(64, 32), torch.randn(16, 64)
    with saved_activations() as saved:
        y = layer(x).relu()  # saves x (for the weight) and relu's output; not the weight
        z = y.exp() * y.view(32, 16).view(16, 32)  # exp's output, y twice through views
    assert saved.live == 4 * (16 * 64 + 16 * 32 + 16 * 32)
    assert saved.by_dtype == {"float32": saved.live}
    z.sum().backward()
    del y, z
    assert (saved.live, saved.peak) == (0, 4 * (16 * 64 + 2 * 16 * 32))


def test_saved_activations_exclude_what_they_are_told_to() -> None:
    layer, x = nn.Linear(64, 32), torch.randn(16, 64)
    with saved_activations(exclude=[x]) as saved:
        y = layer(x)
    assert saved.live == 0
    assert y.requires_grad


def test_flops_by_operator_and_module() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    x = torch.randn(5, 8, requires_grad=True)
    first, second = 2 * 5 * 8 * 16, 2 * 5 * 16 * 4
    with flops() as forward:
        y = model(x)
    assert forward.total == first + second
    with flops() as backward:
        y.sum().backward()
    assert backward.total == 2 * (first + second)
    with flops() as both:
        model(x).sum().backward()
    assert both.total == 3 * (first + second)
    assert sum(both.by_op.values()) == both.total
    assert sum(both.by_module["Sequential.0"].values()) == 3 * first


def test_flops_of_fused_attention() -> None:
    batch, heads, queries, keys, width = 2, 3, 5, 7, 8
    product = 2 * batch * heads * queries * keys * width
    shapes = (queries, keys, keys)
    q, k, v = (torch.randn(batch, heads, length, width, requires_grad=True) for length in shapes)
    with flops() as forward:
        out = nn.functional.scaled_dot_product_attention(q, k, v)
    assert forward.total == 2 * product
    with flops() as backward:
        out.sum().backward()
    assert backward.total == 5 * product


def test_a_graph_that_is_dropped_leaves_nothing_behind() -> None:
    with saved_activations() as record:
        x = torch.randn(4, 8, requires_grad=True)
        y = (x * 2).tanh().softmax(-1)  # both save their own result
        assert record.live > 0
        del y
        assert record.live == 0
