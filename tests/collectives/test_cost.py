"""Formulas, priced schedules and their short forms agree; contention, crossovers and fits are right."""

import time

import pytest

from fmlab.chips.topology import Link, Topology, fat_tree, mesh, ring, switch, torus
from fmlab.collectives import ALGORITHMS, cost, schedule
from fmlab.collectives.closed import closed_form
from fmlab.collectives.machines import machine, machine_names
from fmlab.collectives.measured import bus_factor, measurements
from fmlab.collectives.pricing import link_loads, price, price_schedule

PAIRS = [(collective, algorithm) for collective, names in ALGORITHMS.items() for algorithm in names]
LATENCY, BANDWIDTH = 2e-6, 10e9


@pytest.mark.parametrize(("collective", "algorithm"), PAIRS)
def test_formula_schedule_and_short_form_agree_on_a_full_mesh(collective: str, algorithm: str) -> None:
    grid = algorithm in ("torus", "hierarchical")
    for n in (2, 3, 5, 8, 12, 18):
        if (grid and n % 2) or (algorithm == "double_tree" and n < 5):
            continue
        dims = (2, n // 2) if grid else ()
        plan, topology = schedule(collective, algorithm, n, dims=dims or None), mesh(n, BANDWIDTH, LATENCY)
        for payload in (0, 1e3, 1e9):
            priced = price_schedule(plan, topology).seconds(payload)
            short = price(topology, collective, algorithm, [range(n)], None, dims).seconds(payload)
            formula = closed_form(collective, algorithm, n, dims=dims).seconds(payload, LATENCY, BANDWIDTH)
            assert short == pytest.approx(priced, rel=1e-9)
            assert formula == pytest.approx(priced, rel=1e-9)


def test_hosts_that_are_tori_use_all_their_links() -> None:
    dims, hosts = (3, 4, 4), fat_tree(3, torus((4, 4), 100e9, 1e-6), 16 * 25e9, 15e-6)
    plan = schedule("all_reduce", "hierarchical", 48, dims=dims, between="halving_doubling")
    priced = price_schedule(plan, hosts).seconds(1e9)
    best = cost.compare("all_reduce", 1e9, hosts)[0]
    assert (best.algorithm, best.dims, best.between) == ("hierarchical", dims, "halving_doubling")
    assert best.seconds == pytest.approx(priced, rel=1e-9)
    inside = cost.seconds("all_reduce", 1e9, torus((4, 4), 100e9, 1e-6), "torus")
    between = 2 * 2 * (15e-6 + 1e9 / 48 / 25e9)  # two passes of two steps, each with its own adapters
    assert best.seconds == pytest.approx(inside + between, rel=0.01)
    full = closed_form("all_reduce", "hierarchical", 48, dims=dims).seconds(1e9, LATENCY, BANDWIDTH)
    ringed = schedule("all_reduce", "hierarchical", 48, dims=dims)
    assert price_schedule(ringed, mesh(48, BANDWIDTH, LATENCY)).seconds(1e9) == pytest.approx(full)


def test_textbook_values() -> None:
    # 2 (n-1) latencies and 2 (n-1) / n of the payload; logarithmic latency (NVIDIA/nccl issues 1049, 1712)
    n, payload = 8, 1e9
    there = switch(n, 450e9, 3e-6)
    expected = 14 * 3e-6 + 14 / 8 * payload / 450e9
    assert cost.seconds("all_reduce", payload, there, "ring") == pytest.approx(expected)
    wide = switch(64, 450e9, 3e-6)
    assert cost.seconds("all_reduce", 0, wide, "ring") == pytest.approx(126 * 3e-6)
    assert cost.seconds("all_reduce", 0, wide, "halving_doubling") == pytest.approx(12 * 3e-6)
    # scaling-book: all-gather over the axes of a torus takes V / (axes x W both ways), whatever its size
    for side in (4, 8):
        grid = torus((side, side), 45e9, 0.0)
        share = (side * side - 1) / side**2
        found = cost.seconds("all_gather", payload, grid, "torus")
        assert found == pytest.approx(share * payload / (2 * 90e9))
    # MI300X: two chips of a full mesh use one link of seven, eight chips use all
    full = mesh(8, 64e9, 1e-6)
    rates = {
        count: bus_factor("all_reduce", count) * 4e9
        / cost.seconds("all_reduce", 4e9, full, "direct", ranks=range(count))
        for count in (2, 8)
    }  # fmt: skip
    assert rates[8] / rates[2] == pytest.approx(7, rel=0.01)


def test_contention_is_priced() -> None:
    line = ring(8, 10e9, 1e-6)
    near = cost.seconds("all_to_all", 8e6, line, "direct")
    loads = link_loads(schedule("all_to_all", "direct", 8), line, 8_000_000)
    assert near == pytest.approx(4e-6 + max(loads.values()) / 10e9)
    hosts = fat_tree(4, switch(8, 450e9, 3e-6), 400e9, 15e-6)
    spread = cost.seconds("all_reduce", 1e9, hosts, "ring", ranks=[0, 8, 16, 24])
    own = [[lane, 8 + lane, 16 + lane, 24 + lane] for lane in range(1, 8)]
    assert cost.seconds("all_reduce", 1e9, hosts, "ring", ranks=[0, 8, 16, 24], beside=own) == spread
    shared = [[1, 9, 17, 25]] * 1 + [[1, 9, 17, 25]]
    assert cost.seconds("all_reduce", 1e9, hosts, "ring", ranks=[0, 8, 16, 24], beside=shared) > spread
    everyone = cost.compare("all_reduce", 1e9, hosts)
    assert everyone[0].algorithm == "hierarchical"
    naive = cost.seconds("all_reduce", 1e9, hosts, "ring")
    assert naive > 2 * everyone[0].seconds  # one ring through all hosts uses one chip's share of the network


def test_the_best_algorithm_depends_on_the_payload() -> None:
    there = switch(32, 100e9, 5e-6)
    assert cost.compare("all_reduce", 256, there)[0].algorithm == "one_shot"
    at = cost.crossover("all_reduce", there, "one_shot", "ring")
    assert at is not None
    for payload, faster in ((at / 2, "one_shot"), (at * 2, "ring")):
        found = {c.algorithm: c.seconds for c in cost.compare("all_reduce", payload, there)}
        slower = {"ring", "one_shot"} - {faster}
        assert found[faster] < found[slower.pop()]
    assert cost.crossover("all_reduce", there, "ring", "halving_doubling") is None


def test_a_thousand_chips_are_priced_at_once() -> None:
    hosts = fat_tree(128, switch(8, 450e9, 3e-6), 400e9, 15e-6)
    first = cost.seconds("all_reduce", 1e9, hosts, "hierarchical")
    start = time.perf_counter()
    for payload in range(10, 30):
        cost.seconds("all_reduce", payload * 1e6, hosts)
    assert (time.perf_counter() - start) / 20 < 0.5  # the first of them prices every algorithm
    start = time.perf_counter()
    again = cost.seconds("all_reduce", 1e9, hosts, "hierarchical")
    assert again == first
    assert time.perf_counter() - start < 0.01


def test_prices_are_refused_where_something_is_missing() -> None:
    unknown = Topology([0, 1], {(0, 1): Link(1e9), (1, 0): Link(1e9)})
    with pytest.raises(ValueError, match="no latency is known"):
        cost.seconds("all_reduce", 1, unknown)
    there = switch(4, 1e9, 1e-6)
    with pytest.raises(ValueError, match="different chips"):
        cost.seconds("all_reduce", 1, there, ranks=[0, 0])
    with pytest.raises(ValueError, match="all chips of a torus"):
        cost.seconds("all_reduce", 1, there, "torus")
    with pytest.raises(ValueError, match="several hosts"):
        cost.seconds("all_reduce", 1, there, "hierarchical")
    with pytest.raises(ValueError, match="at least 0 bytes"):
        cost.seconds("all_reduce", -1, there)
    with pytest.raises(ValueError, match="measure_links"):
        cost.seconds("all_reduce", 1, object())  # type: ignore[arg-type]


# Errors of the fits, (median, worst), as bounds: what the documentation says about them.
FITTED = {"a100": (0.02, 0.17), "h200": (0.01, 0.10), "p6-b200": (0.05, 0.14), "4x p6-b200": (0.04, 0.11)}
HELD_OUT = {"a100": (0.02, 0.18), "h200": (0.01, 0.06), "p6-b200": (0.07, 0.23), "4x p6-b200": (0.04, 0.15)}


@pytest.mark.parametrize("name", machine_names())
def test_fits_are_as_good_as_we_say(name: str) -> None:
    whole, half = machine(name), machine(name, every_second=True)
    for found, bounds in ((whole.errors(), FITTED[name]), (half.errors("held out"), HELD_OUT[name])):
        assert found[0] <= bounds[0]
        assert found[1] <= bounds[1]
    left_out = [row for row in whole.rows if row.used.startswith("left out")]
    assert len(whole.rows) == 20
    assert len(left_out) == (3 if name == "4x p6-b200" else 0)


def test_fits_carry_over_to_other_numbers_of_ranks_where_we_say_so() -> None:
    rows = [m for m in measurements() if "NVLS (default)" in m.notes]
    assert len(rows) == 7
    for row in rows:
        model = machine("h200" if "H200" in row.node else "p6-b200")
        assert model.seconds("all_reduce", row.payload, row.ranks) == pytest.approx(row.seconds, rel=0.07)
    with pytest.raises(ValueError, match="fitted for 5 to 8 ranks"):
        machine("h200").seconds("all_reduce", 1e6, 4)
    with pytest.raises(ValueError, match="says nothing about all_gather"):
        machine("h200").seconds("all_gather", 1e6)
    a100 = machine("a100")
    both = a100.seconds("all_gather", 1e9) + a100.seconds("reduce_scatter", 1e9)
    assert both == pytest.approx(a100.seconds("all_reduce", 1e9))
    with pytest.raises(ValueError, match="did you mean 'a100'"):
        machine("a10")


def test_the_table_is_read_as_its_source_means_it() -> None:
    rows = measurements()
    assert len(rows) == 107
    row = next(m for m in rows if "A100" in m.node and m.payload == 2**30)
    assert row.seconds == pytest.approx(8203.9e-6)
    assert bus_factor("all_reduce", 8) * row.payload / row.seconds == pytest.approx(
        row.bus_bandwidth, rel=1e-3
    )
    assert all(m.source and m.seconds > 0 for m in rows)
