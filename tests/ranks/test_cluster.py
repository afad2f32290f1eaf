"""Ranks on two hosts, which are agents on this machine: how they start, and what is told when a host is lost.

What the ranks themselves can do wrong is in test_pool.py and test_failures.py, which run over both.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from fmlab import RankError, Ranks, cli
from fmlab._ranks import token
from fmlab.parallel import Layout, parity
from fmlab.ranks import ClusterTransport
from tests.parallel import common
from tests.ranks.cluster import REPO, Cluster, ended, within

pytestmark = pytest.mark.multirank


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    one = Cluster(tmp_path_factory.mktemp("broken"))
    yield one
    one.close()


@pytest.fixture
def cluster(broken: Cluster) -> Cluster:
    """A head, and a host with one slot on either side, which the test may break."""
    broken.mend()
    return broken


def test_neighbours_share_a_host_and_know_their_places(clusters: Callable[[int], Cluster]) -> None:
    ranks = clusters(4).get()
    assert ranks.hosts == ["a", "a", "b", "b"]

    def place() -> tuple[str, str, int]:
        return os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"], os.getppid()

    places = ranks.run(place)
    assert [place[:2] for place in places] == [("0", "2"), ("1", "2")] * 2
    servers = [place[2] for place in places]
    assert servers[0] == servers[1] != servers[2] == servers[3]
    assert ranks.run(os.getpid) == ranks.pids


def test_a_step_on_two_hosts_of_two_ranks_is_one_devices(clusters: Callable[[int], Cluster]) -> None:
    layout = Layout(data=2, tensor=2, micro_batches=2)
    report = parity(common.gpt, layout, "fmlab", precision="fp64", ranks=clusters(4).get())
    report.raise_if_different()
    assert len(report.rows) == len(list(common.gpt().named_parameters()))


def sleep_then_meet(seconds: float) -> int:
    time.sleep(seconds)
    dist.barrier()
    return dist.get_rank()


def test_an_agent_that_is_killed_is_named_and_another_takes_its_place(cluster: Cluster) -> None:
    ranks = cluster.start(2)
    lost = ranks.pids[1]
    threading.Timer(0.5, cluster.agents["b"].kill).start()
    start = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 \(host b\): died: host b is gone") as info:
        ranks.run(sleep_then_meet, 2)
    assert time.monotonic() - start < 10
    assert not info.value.restarted
    assert "1 of 2 slots are missing after 3 s" in str(info.value)
    assert "host a with 1 joined; host b is gone" in str(info.value)
    assert within(5, lambda: ended(lost))
    cluster.join("b2", 1, "--address", "127.0.0.2")
    assert ranks.run(sleep_then_meet, 0) == [0, 1]  # waits until it has joined
    assert ranks.hosts == ["a", "b2"]


def test_an_agent_that_falls_silent_is_noticed_in_time(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fmlab._ranks.cluster.AGENT_SILENT", 3.0)
    monkeypatch.setattr("fmlab.ranks.HOSTS_AGAIN", 0.1)
    ranks = cluster.start(2)
    cluster.agents["b"].send_signal(signal.SIGSTOP)  # as when its link is down: no end of the connection
    start = time.monotonic()
    try:
        with pytest.raises(RankError, match=r"rank 1 \(host b\): died: .* nothing was heard from it for 3 s"):
            ranks.run(sleep_then_meet, 20)
        assert 2 < time.monotonic() - start < 10
    finally:
        cluster.agents["b"].send_signal(signal.SIGCONT)
    assert within(10, lambda: "joined" in cluster.said("b").partition("gone")[2])  # it finds out, and is back
    assert ranks.run(sleep_then_meet, 0) == [0, 1]


HEAD = """
import sys, time
from fmlab import Ranks
from fmlab.ranks import ClusterTransport
ranks = Ranks(2, transport=ClusterTransport(sys.argv[1], token_file=sys.argv[2]))
print(*ranks.pids, flush=True)
ranks.run(time.sleep, 60)
"""


def test_agents_end_their_ranks_when_the_head_is_killed(cluster: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "head.py"
    file.write_text(HEAD)
    # the agents find the head of a script at the address of ours, which does not listen now
    command = [sys.executable, str(file), cluster.head.address, str(cluster.head.token_file)]
    env = {**os.environ, "PYTHONPATH": str(REPO)}
    head = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    assert head.stdout is not None
    pids = [int(word) for word in head.stdout.readline().split()]
    assert len(pids) == 2
    assert not any(ended(pid) for pid in pids)
    head.kill()
    head.communicate()
    assert within(5, lambda: all(ended(pid) for pid in pids))
    assert within(5, lambda: "the head is gone" in cluster.said("a"))
    assert cluster.start(2).run(dist.get_rank) == [0, 1]  # and they serve the next head


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="finds the files of a rank by /proc")
def test_an_agent_that_is_ended_ends_its_ranks_and_leaves_no_files(cluster: Cluster) -> None:
    ranks = cluster.start(2)
    folders = [Path(file).parent for file in ranks.run(lambda: os.readlink("/proc/self/fd/1"))]
    assert folders[0] != folders[1]
    assert all(folder.exists() for folder in folders)
    pids = ranks.pids
    cluster.agents["b"].terminate()
    assert cluster.agents["b"].wait(10) == 128 + signal.SIGTERM
    assert within(5, lambda: ended(pids[1]))
    assert not folders[1].exists()
    ranks.close()
    assert within(5, lambda: ended(pids[0]) and not folders[0].exists())


def test_the_command_says_in_one_line_why_it_cannot_join(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fmlab._ranks.command.end_on_terminate", lambda: None)
    head = ClusterTransport()
    try:
        file = tmp_path / "token"
        token.make(file)
        join = ["ranks", "join", head.address, "--slots", "1", "--wait", "0.1", "--token-file"]
        assert cli.main([*join, str(file)]) == 2
        assert "the head has another token" in capsys.readouterr().err
    finally:
        head.stop()
    assert cli.main([*join, str(file)]) == 2
    assert f"no head at {head.address} within 0.1 s" in capsys.readouterr().err
    assert cli.main([*join, str(tmp_path / "absent")]) == 2
    assert "fmlab ranks token" in capsys.readouterr().err


def test_large_results_and_arguments_arrive_whole(clusters: Callable[[int], Cluster]) -> None:
    ranks: Ranks = clusters(4).get()
    data = os.urandom(5 << 20)
    assert ranks.run(lambda sent: sent[dist.get_rank() :], data) == [data[rank:] for rank in range(4)]
