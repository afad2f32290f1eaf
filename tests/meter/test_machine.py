"""The ceilings of this machine: plausible, and used as a roofline is."""

import pytest

from fmlab.meter import Machine, measure_machine


def test_the_ceilings_are_plausible() -> None:
    machine = measure_machine(size=256, repeats=2)
    assert 1e8 < machine.flops < 1e14
    assert 1e8 < machine.bandwidth < 1e13


def test_the_slower_of_the_two_decides() -> None:
    machine = Machine(flops=100.0, bandwidth=10.0)
    assert machine.balance == 10
    assert machine.seconds(flops=200, nbytes=10) == 2
    assert machine.seconds(flops=200, nbytes=50) == pytest.approx(5)
