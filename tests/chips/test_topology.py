"""Wiring: routes that follow links, axes that wrap, ports that are shared, and clusters that stay cheap."""

import itertools
import pickle
import time

import pytest

from fmlab.chips import Link, Topology, chip, cluster, fat_tree, host, hosts, mesh, ring, switch, torus

SMALL = {
    "ring": ring(6, 1e9, 1e-6),
    "line": torus((5,), 1e9, 1e-6, wrap=False),
    "torus": torus((3, 4, 2), 1e9, 1e-6),
    "half open": torus((4, 4), 1e9, 1e-6, wrap=(True, False)),
    "switch": switch(8, 1e9, 1e-6),
    "mesh": mesh(5, 1e9, 1e-6),
    "tree": fat_tree(3, torus((2, 2), 1e9, 1e-6), 4e9, 1e-5),
    "groups": fat_tree(4, switch(4, 1e9, 1e-6), 2e9, 1e-5, hosts_in_group=2),
    "cube mesh": host("p3.16xlarge").topology(latency=1e-6),
}


@pytest.mark.parametrize("name", SMALL)
def test_every_route_is_a_chain_of_links(name: str) -> None:
    topology = SMALL[name]
    for a, b in itertools.product(topology.chips, topology.chips):
        route = topology.route(a, b)
        if a == b:
            assert route == []
            continue
        assert route[0][0] == a
        assert route[-1][1] == b
        assert all(edge in topology.links for edge in route)
        assert all(first[1] == second[0] for first, second in itertools.pairwise(route))
        assert len({edge[0] for edge in route}) == len(route)  # no node twice
        assert topology.seconds(a, b, 1e6) > 1e6 / topology.bandwidth(a, b)
    assert sorted(chip for chips in topology.hosts for chip in chips) == list(topology.chips)
    assert pickle.loads(pickle.dumps(topology)).route(0, 3) == topology.route(0, 3)


def test_a_torus_wraps_and_goes_the_shorter_way() -> None:
    assert ring(8, 1e9).route(1, 7) == [(1, 0), (0, 7)]
    assert len(ring(8, 1e9).route(0, 4)) == 4
    assert len(torus((8,), 1e9, wrap=False).route(1, 7)) == 6
    cube = torus((4, 4, 4), 1e9)
    assert max(len(cube.route(0, chip)) for chip in cube.chips) == 6  # half of each axis
    assert cube.route(0, 21) == [(0, 16), (16, 20), (20, 21)]  # first axis first
    assert len(cube.links) == 64 * 6
    assert cube.outgoing(0) == 6e9
    # two chips on an axis have one link between them, not two
    assert len(torus((2, 2), 1e9).links) == 8


def test_a_switch_shares_a_chips_ports_and_a_mesh_does_not() -> None:
    assert len(switch(64, 450e9).links) == 128
    assert switch(8, 450e9).bandwidth(0, 7) == 450e9
    eight = host("mi300x-host").topology()
    assert eight.outgoing(0) == chip("mi300x").link_bandwidth == 448e9
    assert eight.bandwidth(0, 1) == 64e9  # one peer gets a seventh


def test_the_cube_mesh_has_double_links() -> None:
    v100 = host("p3.16xlarge").topology()
    assert v100.outgoing(0) == chip("v100-16gb").link_bandwidth
    assert v100.bandwidth(0, 3) == 2 * v100.bandwidth(0, 1)
    assert len(v100.route(0, 7)) == 2


def test_hosts_share_their_adapters() -> None:
    tree = fat_tree(2, switch(8, 450e9, 1e-6), network=400e9, latency=15e-6)
    assert tree.route(0, 3) == [(0, "switch/0"), ("switch/0", 3)]
    assert tree.route(1, 9) == [(1, "network0"), ("network0", "core"), ("core", "network1"), ("network1", 9)]
    assert tree.bandwidth(1, 9) == 50e9  # a chip's share of the adapters
    assert tree.latency(1, 9) == 15e-6
    assert tree.host_of(9) == 1
    assert tree.outgoing(0) == 450e9
    assert fat_tree(2, switch(8, 450e9), 400e9, per_chip=400e9).bandwidth(1, 9) == 400e9


@pytest.mark.parametrize("name", hosts())
def test_every_host_is_wired_as_its_chips_say(name: str) -> None:
    one = host(name)
    topology = one.topology()
    assert len(topology.chips) == one.chips
    if one.chips > 1 and one.fabric["kind"] in ("switch", "mesh", "graph", "ring"):
        assert topology.outgoing(0) == pytest.approx(one.chip.link_bandwidth)
    for a, b in itertools.combinations(topology.chips, 2):
        assert topology.bandwidth(a, b) <= one.chip.link_bandwidth


def test_slices_and_ultraservers() -> None:
    pod = cluster("tpu-v5e-host", 32)
    assert len(pod.chips) == 256
    assert len(pod.route(0, 255)) == 2  # 16 x 16, both axes wrap
    assert len(cluster("tpu-v5e-host", 2).route(0, 15)) == 6  # 4 x 4 does not wrap
    cubes = cluster("tpu-v4-host", 32)
    assert len(cubes.route(0, 127)) == 3  # 4 x 4 x 8 wraps throughout
    assert len(cluster("tpu-v4-host", 4).route(0, 15)) == 5  # 2 x 2 x 4 does not
    assert len(cluster("tpu-v5p-host", 1536).hosts) == 1536  # the largest job: 6,144 chips
    long = cluster("tpu-v5e-host", 16, shape=(16, 8))
    assert len(long.route(0, 127)) == 1 + 7  # only the axis as long as the pod's wraps
    ultra = cluster("trn2u.48xlarge", 4)
    assert ultra.outgoing(0) == chip("trn2").link_bandwidth
    assert ultra.bandwidth(0, 16) == 64e9  # between hosts half as wide as inside
    assert ultra.bandwidth(0, 1) == 128e9
    assert len(cluster("p6e-gb200", 18).chips) == 72


def test_latencies_are_published_or_given_or_missing() -> None:
    assert cluster("tpu-v5p-host", 16).latency(0, 1) == 1e-6
    assert cluster("trn1.32xlarge", 2).latency(0, 16) == 15e-6
    with pytest.raises(ValueError, match=r"no latency.*latency="):
        cluster("p4d.24xlarge", 2).latency(0, 1)
    assert cluster("p4d.24xlarge", 2, latency=2e-6, network_latency=9e-6).latency(0, 8) == 9e-6


def test_a_thousand_chips_are_cheap() -> None:
    start = time.process_time()
    big = cluster("p4de.24xlarge", 128)
    assert len(big.chips) == 1024
    assert len(big.links) < 5000
    for a in range(0, 1024, 8):
        assert len(big.route(a, (a + 9) % 1024)) == 4
    assert len(cluster("tpu-v5p-host", 256).links) == 6 * 1024
    assert time.process_time() - start < 5  # 0.5 s on a machine with nothing else to do


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: host("p4"), r"unknown host 'p4'.*p4d.24xlarge"),
        (lambda: cluster("p4d.24xlarge", 0), "at least one host"),
        (lambda: cluster("p3.16xlarge", 2), r"no source.*network_bandwidth="),
        (lambda: cluster("tpu-v5e-host", 5), r"40 chips make no slice"),
        (lambda: cluster("tpu-v5e-host", 4, shape=(4, 4)), "16 chips, the hosts have 32"),
        (lambda: cluster("tpu-v5e-host", 4, shape=(1, 32)), "largest slice is 16 x 16"),
        (lambda: cluster("tpu-v5e-host", 40), "groups of 32"),
        (lambda: cluster("tpu-v5p-host", 2240), "groups of 1536"),
        (lambda: cluster("p4d.24xlarge", 1, shape=(2, 4)), "TPU slices"),
        (lambda: cluster("trn2u.48xlarge", 3), "groups of 4"),
        (lambda: fat_tree(3, switch(4, 1e9), 1e9, hosts_in_group=2), "multiple"),
        (lambda: torus((4, 0), 1e9), "at least one chip"),
        (lambda: torus((4, 4), (1e9,)), "1 entries for 2 axes"),
        (lambda: switch(0, 1e9), "at least one chip"),
        (lambda: Link(0), "above 0"),
        (lambda: Link(1e9, -1), "not below 0"),
        (lambda: ring(4, 1e9).route(0, 4), "0 to 3"),
        (lambda: Topology([0, 2], {}), "0 to n-1"),
        (lambda: Topology([0, 1], {(0, 5): Link(1e9)}), "does not join"),
        (lambda: Topology([0, 1, 2], {(0, 1): Link(1e9)}).route(0, 2), "no links lead"),
        (lambda: hosts("h1000"), "unknown chip"),
    ],
)
def test_bad_wiring_is_refused(call, says) -> None:
    with pytest.raises(ValueError, match=says):
        call()
