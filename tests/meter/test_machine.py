"""The ceilings of this machine: plausible, and used as a roofline is."""

import pytest
import torch

from fmlab.meter import Machine, measure_chip, measure_machine, read_bandwidth


def test_the_ceilings_are_plausible() -> None:
    machine = measure_machine(size=256, repeats=2)
    assert 1e8 < machine.flops < 1e14
    assert 1e8 < machine.bandwidth < 1e13


def test_the_slower_of_the_two_decides() -> None:
    machine = Machine(flops=100.0, bandwidth=10.0)
    assert machine.balance == 10
    assert machine.seconds(flops=200, nbytes=10) == 2
    assert machine.seconds(flops=200, nbytes=50) == pytest.approx(5)


def test_this_machine_is_a_chip() -> None:
    here = measure_chip(dtypes=("fp32", torch.bfloat16), size=256, repeats=2, link_bandwidth=1e9)
    assert here.dtypes == ["fp32", "bf16"]
    assert 0.01 < here.roofline("fp32").ridge < 1e4
    assert here.link_bandwidth == 1e9
    assert "threads" in here.figure("memory_bandwidth").source
    with pytest.raises(ValueError, match=r"fp8.*fp32, bf16"):
        measure_chip(dtypes=("fp8",))


def test_small_blocks_are_read_often_enough_for_the_clock() -> None:
    assert 1e8 < read_bandwidth(2**16, repeats=2) < 1e13
