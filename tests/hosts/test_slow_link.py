"""A host with a slow cable is named, and costs bytes by bandwidth; tensor ranks stay inside hosts."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fmlab.bench.links import report
from fmlab.chips.topology import switch
from fmlab.collectives import cost
from fmlab.collectives.pairs import rounds, slow_ranks
from fmlab.parallel import Layout
from tests.hosts.namespaces import Hosts

ROOT = Path(__file__).resolve().parents[2]
MBIT = 20
SIZE = 500_000  # bytes: 0.27 s of an all-reduce on three hosts at 20 Mbit/s


@pytest.mark.multirank
def test_the_slow_one_of_three_hosts_is_named_and_costs_what_the_model_says(hosts_can_be_made: None) -> None:
    with Hosts(3) as hosts:
        hosts[1].limit(MBIT)
        runs = []
        for host in hosts:
            env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "MASTER_PORT": "29500"}
            env |= {"MASTER_ADDR": hosts[0].address, "WORLD_SIZE": "3", "RANK": str(host.number)}
            command = [sys.executable, "-m", "fmlab.bench.links", "--bytes", str(SIZE)]
            env |= {"LOCAL_WORLD_SIZE": "1"}
            runs.append(host.start(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
        (said, wrong), *_ = [run.communicate(timeout=90) for run in runs]
    assert [run.returncode for run in runs] == [0, 0, 0], wrong
    assert re.findall(r"slow: (\S+) \(rank (\d)\)", said) == [("host-1", "1")], said
    found = re.findall(r"(host-\d) - (host-\d) +([\d.]+) MB/s", said)
    rates = {(a, b): float(rate) for a, b, rate in found}
    assert 0.8 * MBIT / 8 < rates["host-0", "host-1"] < 1.1 * MBIT / 8
    measured = float(re.search(r"took ([\d.]+) s", said)[1])  # type: ignore[index]
    predicted = cost.seconds("all_reduce", SIZE, switch(3, MBIT / 8 * 1e6, 0.0), "ring")
    assert predicted == pytest.approx(2 * 2 / 3 * SIZE / (MBIT / 8 * 1e6))
    assert 0.85 <= measured / predicted <= 1.5, said  # headers, starts, cores that are shared


@pytest.mark.parametrize("n", [2, 3, 4, 7])
def test_every_pair_meets_once_and_nobody_is_in_two_at_a_time(n: int) -> None:
    met: list[Any] = []
    for pairs in rounds(n):
        ranks = [rank for pair in pairs for rank in pair]
        assert len(ranks) == len(set(ranks))
        met += pairs
    assert sorted(met) == [(a, b) for a in range(n) for b in range(a + 1, n)]


def test_a_slow_end_is_told_from_a_slow_pair() -> None:
    fast = {(a, b): 10.0 for a in range(4) for b in range(a + 1, 4)}
    assert slow_ranks(fast) == []
    assert slow_ranks({pair: 2.0 if 2 in pair else rate for pair, rate in fast.items()}) == [2]
    assert slow_ranks({**fast, (0, 1): 2.0}) == []  # both have fast links, too
    assert "slow" not in report(["a", "b"], {(0, 1): 1e6}, 8, 1.0).replace("slower", "").replace(
        "slowest", ""
    )


def test_tensor_ranks_are_on_one_host() -> None:
    """Launchers number the ranks host by host, and a layout numbers its tensor axis first."""
    host_of = [rank // 4 for rank in range(8)]  # two hosts of four ranks
    grid = Layout(tensor=4, data=2).grid()
    for host in range(2):
        there = [grid.coordinates(rank) for rank in range(8) if host_of[rank] == host]
        assert sorted(each["tensor"] for each in there) == [0, 1, 2, 3]
        assert len({each["data"] for each in there}) == 1
