"""Costs, dependencies and overlap, worked out by hand."""

import json
from itertools import pairwise

import pytest
import torch

from fmlab.chips import chip
from fmlab.kernels.tiles import CORES, cost, library, run
from fmlab.kernels.tiles.core import PARTITIONS

BF16 = torch.bfloat16


@pytest.mark.parametrize(("name", "row"), [("v2", "trn1-core"), ("v3", "trn2-core")])
def test_the_cores_are_those_of_the_chip_catalogue(name: str, row: str) -> None:
    core, listed = CORES[name], chip(row).figures()
    assert core.peak() == pytest.approx(listed["peak.bf16"].base, rel=0.01)
    assert core.peak(4) == pytest.approx(listed["peak.fp32"].base, rel=0.02)
    assert core.sbuf_partition * PARTITIONS == listed["on_chip"].base
    assert core.clock("tensor") == listed["clock"].base
    assert all(figure.source and figure.convention for figure in core.figures.values())


def test_costs_in_cycles() -> None:
    v2, v3 = CORES["v2"], CORES["v3"]
    assert cost.matmul(128, 512, BF16) == 512
    assert cost.matmul(128, 512, torch.float32) == 2048
    assert cost.matmul(128, 1, BF16) == 64  # a vector as moving tile
    assert cost.matmul(1, 128, BF16) == 128  # and as stationary tile
    assert cost.two_inputs(v2, 512, "add", [torch.float32] * 3, in_psum=False) == 1024
    assert cost.two_inputs(v2, 512, "add", [BF16] * 3, in_psum=False) == 512
    assert cost.two_inputs(v2, 512, "max", [BF16] * 3, in_psum=False) == 1024
    assert cost.one_input(v2, 512, sixteen_bit=True, in_psum=False) == 512
    assert cost.one_input(v3, 512, sixteen_bit=True, in_psum=False) == 128
    assert cost.activation(10, reduces=True) == 128
    assert cost.transfer(v2, 128, 2**20, 8192) == (16, pytest.approx((2**20 + 128 * 128) / 272e9))
    assert cost.transfer(v2, 4, 32768, 8192)[0] == 1  # 4 partitions keep one DMA engine busy


def test_a_profile_of_the_documentation() -> None:
    """One DMA engine of a NeuronCore-v3 took 1,416 ns for 4 rows of 8 KiB (Introduction to DMA with NKI)."""
    engines, seconds = cost.transfer(CORES["v3"], 4, 4 * 8192, 8192)
    assert engines == 1
    assert seconds == pytest.approx(1416e-9, rel=0.05)


def chain(nc, x):
    y = nc.hbm(x.shape, x.dtype)
    tile = nc.load(x)
    tile = nc.activation("exp", tile, out=tile)
    nc.store(y, tile)
    return y


def test_a_chain_takes_the_sum_of_its_parts() -> None:
    done = run(chain, torch.zeros(128, 512))
    move = (128 * 512 * 4 + 128 * 128) / 272e9
    assert done.seconds == pytest.approx(2 * (1.3e-6 + move) + (512 + 100) / 1.4e9)
    assert done.utilisation["scalar"] == pytest.approx(512 / 1.4e9 / done.seconds)
    assert done.utilisation["dma"] == pytest.approx(2 * move / done.seconds)
    assert done.utilisation["tensor"] == 0.0


def exponentials(nc, x, depth):
    y, ring = nc.hbm(x.shape, x.dtype), nc.ring(depth, (128, 2048))
    for i in nc.affine_range(x.shape[0] // 128):
        rows = slice(128 * i, 128 * i + 128)
        tile = nc.load(x[rows], out=ring.next())
        for _ in range(3):
            nc.activation("exp", tile, scale=0.5, out=tile)
        nc.store(y[rows], tile)
    return y


def test_buffers_let_transfers_and_computing_overlap() -> None:
    x = torch.zeros(8 * 128, 2048)
    one, two, three = (run(exponentials, x, depth=depth) for depth in (1, 2, 3))
    parts = (1.3e-6 + (128 * 8192 + 128 * 128) / 272e9, 3 * (2048 + 100) / 1.4e9)
    assert one.seconds == pytest.approx(8 * (2 * parts[0] + parts[1]))  # load, compute, store, one by one
    assert one.seconds > 1.4 * two.seconds
    assert two.seconds >= three.seconds
    assert torch.equal(one.output, three.output)
    assert (one.hbm_bytes, two.peak_sbuf) == (three.hbm_bytes, 2 * one.peak_sbuf)


@pytest.mark.parametrize("buffers", [1, 2, 3, 4])
def test_a_step_of_a_matmul_takes_what_the_formula_says(buffers: int) -> None:
    a, b = (torch.empty(4096, columns, dtype=BF16, device="meta") for columns in (512, 1024))
    done = run(library.matmul_blocked, a, b, dry=True, buffers=buffers)
    products = [one.end for one in done.instructions if one.engine == "tensor"]
    load = (128 * (512 + 1024) * 2 + 2 * 128 * 128) / done.core.bandwidth
    compute = 8 * 512 / done.core.clock("tensor")
    wanted = max(load, compute, (done.core.dma_latency + load + compute) / buffers)
    assert (products[-1] - products[7]) / 31 == pytest.approx(wanted, rel=0.04)


def test_sums_in_psum_follow_back_to_back() -> None:
    def sums(nc, a, b):
        c, left, right = nc.hbm((128, 512)), nc.load(a), nc.load(b)
        total = nc.psum((128, 512))
        for i in range(8):
            nc.matmul(left, right, out=total, accumulate=i > 0)
        nc.store(c, nc.copy(total))
        return c

    done = run(sums, torch.ones(128, 128, dtype=BF16), torch.ones(128, 512, dtype=BF16))
    products = [one for one in done.instructions if one.engine == "tensor"]
    assert products[-1].end - products[0].start == pytest.approx(8 * 512 / 2.8e9)
    assert torch.equal(done.output, torch.full((128, 512), 1024.0))


def test_on_v2_vector_and_gpsimd_take_turns_at_sbuf() -> None:
    def both(nc, x):
        y, z = nc.hbm(x.shape), nc.hbm(x.shape)
        a, b = nc.sbuf(x.shape), nc.sbuf(x.shape)
        nc.iota(a)
        nc.memset(b, 1.0)
        nc.store(y, a)
        nc.store(z, b)
        return y, z

    v2, v3 = (run(both, torch.zeros(128, 4096), core=name).instructions for name in ("v2", "v3"))
    assert v2[0].start >= v2[1].end
    assert v3[1].start == v3[0].start == 0.0


def test_a_transfer_of_single_elements_is_slow() -> None:
    def load(nc, x, turned):
        y = nc.hbm((128, 128), x.dtype)
        nc.store(y, nc.load(x.T if turned else x))
        return y

    x = torch.randn(128, 128).to(BF16)
    plain, turned = (run(load, x, turned=turned) for turned in (False, True))
    assert torch.equal(turned.output, x.T)
    assert turned.instructions[0].part_seconds > 30 * plain.instructions[0].part_seconds
    assert turned.hbm_bytes == plain.hbm_bytes


def test_a_dry_run_says_the_same(tmp_path) -> None:
    x = torch.zeros(512, 2048)
    real, dry = (run(exponentials, x, depth=2, dry=dry) for dry in (False, True))
    assert (real.seconds, real.hbm_bytes, real.peak_sbuf) == (dry.seconds, dry.hbm_bytes, dry.peak_sbuf)
    trace = json.loads(dry.save_trace(tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [one for one in trace if one["ph"] == "X"]
    assert len(spans) == len(dry.instructions)
    assert max(one["ts"] + one["dur"] for one in spans) == pytest.approx(1e6 * dry.seconds)
    assert "scalar     12  exponentials:" in dry.hot_lines(1)
    assert dry.timeline(40).splitlines()[0].startswith("  DMA, loads |")


def test_every_wait_is_kept_and_there_is_no_other() -> None:
    x = torch.empty(1, 256, 64, dtype=BF16, device="meta")
    done = run(library.flash_attention, x, x, x, core="v3", dry=True)
    latency = {engine: 100 / done.core.clock(engine) for engine in ("vector", "scalar", "gpsimd")}
    latency |= {"tensor": 64 / done.core.clock("tensor"), "load": 0.0, "store": 0.0}
    for one in done.instructions:
        assert all(done.instructions[number].end <= one.start + 1e-15 for number in one.waits_for)
    for engine in ("tensor", "vector", "scalar", "gpsimd"):
        own = [one for one in done.instructions if one.engine == engine]
        assert all(a.end <= b.start + 1e-15 for a, b in pairwise(own))
        for before, one in pairwise(own):  # v3: no ports to share
            waits = (done.instructions[number] for number in one.waits_for)
            ready = max([before.end, *(other.end + latency[other.engine] for other in waits)])
            assert one.start == pytest.approx(ready, abs=1e-15)
