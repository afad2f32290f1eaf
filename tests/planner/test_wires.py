"""Prices by formula, held to the priced schedules of fmlab.collectives and to measured machines."""

import pytest

from fmlab.chips import cluster
from fmlab.collectives import cost, machine
from fmlab.planner.calibration import Calibration, fitted
from fmlab.planner.hardware import hardware
from fmlab.planner.wires import wires_of

WIRE = Calibration(inside=1.0, between=1.0, hop_inside=2e-6, hop_between=15e-6)


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce_scatter"])
@pytest.mark.parametrize("payload", [2**15, 2**22, 2**30])
def test_inside_a_host_it_is_the_best_of_the_priced_schedules(collective: str, payload: int) -> None:
    topology = cluster("p4de.24xlarge", 1, latency=2e-6)
    priced = min(cost.seconds(collective, payload, topology, name) for name in ("ring", "halving_doubling"))
    wires = wires_of("p4de.24xlarge")
    assert wires.seconds(collective, payload, wires.group(8, 1), WIRE) == pytest.approx(priced, rel=0.01)


@pytest.mark.parametrize("hosts", [2, 4])
def test_between_hosts_it_is_near_the_hierarchical_schedule(hosts: int) -> None:
    """Ours lets both phases run at once; the schedule runs one after the other, which takes up to 2 times."""
    topology = cluster("p4de.24xlarge", hosts, latency=2e-6, network_latency=15e-6)
    wires = wires_of("p4de.24xlarge")
    for collective in ("all_reduce", "all_gather"):
        priced = cost.seconds(collective, 2**28, topology, "hierarchical")
        ours = wires.seconds(collective, 2**28, wires.group(8 * hosts, 1), WIRE)
        assert ours <= priced <= 2 * ours


def test_a_measured_machine_reaches_about_the_default_share() -> None:
    seconds = {}
    for name, chip in (("a100", "a100-80gb"), ("h200", "h200")):
        wires = hardware(chip).wires
        assert wires is not None
        ours = wires.seconds("all_reduce", 2**32, wires.group(8, 1), Calibration())
        seconds[name] = machine(name).seconds("all_reduce", 2**32, 8), ours
    assert seconds["a100"][1] == pytest.approx(seconds["a100"][0], rel=0.1)
    assert seconds["h200"][1] > seconds["h200"][0]  # whose switches add up: no ring reaches that


def test_where_a_group_lies() -> None:
    wires = wires_of("p4de.24xlarge")  # islands of 8
    assert wires.group(8, 1).near == 8
    assert wires.group(4, 2).near == 4
    assert wires.group(16, 1).near == 8
    assert wires.group(16, 4).near == 2
    assert wires.group(8, 8).near == 1
    assert wires.group(6, 4).near == 2
    near, far = (wires.seconds("all_reduce", 1e9, wires.group(8, stride), WIRE) for stride in (1, 8))
    assert far > 5 * near
    assert wires.send(1e9, 1, 8, WIRE) < wires.send(1e9, 8, 4, WIRE)


def test_a_torus_gives_a_group_the_links_of_its_axes() -> None:
    wires = wires_of("trn2.48xlarge")  # 4 x 4
    line, square = (wires.seconds("all_gather", 1e9, wires.group(n, 1), WIRE) for n in (4, 16))
    assert square < line  # twice the links
    assert wires_of("tpu-v5p-host").island == 6144


def test_cores_share_the_links_of_their_chip() -> None:
    chip, core = hardware("trn1").wires, hardware("trn1-core").wires
    assert chip is not None
    assert core is not None
    assert (core.island, core.inside) == (2 * chip.island, chip.inside / 2)


def test_bad_input_is_refused() -> None:
    wires = wires_of("p5e.48xlarge")
    with pytest.raises(ValueError, match="network_bandwidth="):
        wires.seconds("all_reduce", 1e9, wires.group(16, 1), WIRE)
    with pytest.raises(ValueError, match="has h100, not a100-80gb; hosts with it: p4de"):
        hardware("a100-80gb", "p5.48xlarge")
    with pytest.raises(ValueError, match="did you mean"):
        hardware("a100-80")
    with pytest.raises(ValueError, match="give chip="):
        hardware()
    with pytest.raises(ValueError, match="above 0 and up to 1"):
        Calibration(memory=0)
    with pytest.raises(ValueError, match="above 0 and up to 1"):
        Calibration(matmul={"h100": 1.2})
    with pytest.raises(ValueError, match="at least 0"):
        Calibration(launch=-1e-6)
    with pytest.raises(ValueError, match="no fused"):
        Calibration().changed(fused=1)


def test_shares_of_peaks(tmp_path) -> None:
    assert hardware("h100").rate("bf16") == pytest.approx(
        fitted().matmul_share(hardware("h100").chip, "bf16") * 989e12
    )
    own = Calibration(matmul={"h100": 0.5, "h100 fp8": 0.4})
    chip = hardware("h100").chip
    assert (own.matmul_share(chip, "bf16"), own.matmul_share(chip, "fp8")) == (0.5, 0.4)
    assert Calibration().matmul_share(chip, "bf16") == pytest.approx(794.5 / 989)
    path = tmp_path / "mine.toml"
    path.write_text('[calibration]\nmemory = 0.7\n[calibration.matmul]\n"h100" = 0.6\n')
    read = Calibration.read(path)
    assert (read.memory, read.matmul["h100"], read.attention) == (0.7, 0.6, Calibration().attention)
