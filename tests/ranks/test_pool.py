"""The pool itself: what it sends and returns, what it refuses, and that it leaves nothing behind."""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fmlab import Ranks
from fmlab.ranks import check_fits, namespace

pytestmark = pytest.mark.multirank
REPO = Path(__file__).parents[2]


class Doubler(nn.Module):
    """A class of the test module, unknown to the ranks."""

    def forward(self, x: Tensor) -> Tensor:
        return helper(x)


def helper(x: Tensor) -> Tensor:
    return 2 * x


def reduced(model: nn.Module, x: Tensor) -> tuple[nn.Module, Tensor]:
    y = model(x) * (dist.get_rank() + 1)
    dist.all_reduce(y)
    return model, y


def test_functions_classes_and_tensors_go_both_ways(ranks4: Ranks) -> None:
    results = ranks4.run(reduced, Doubler(), torch.arange(3.0))
    for model, y in results:
        assert isinstance(model, Doubler)
        assert torch.equal(y, torch.arange(3.0) * 20)


def test_state_persists_between_calls_and_restart_clears_it(ranks2: Ranks) -> None:
    def remember(key: str) -> None:
        namespace()[key] = dist.get_rank() * 10

    ranks2.run(remember, "kept")
    assert ranks2.run_cell("other = kept + rank\nother", show=False) == [0, 11]
    assert ranks2.run_cell("scale * other", {"scale": 2}, show=False) == [0, 22]
    old = ranks2.pids
    ranks2.restart()
    assert not set(old) & set(ranks2.pids)
    assert not any(psutil.pid_exists(pid) for pid in old)
    assert ranks2.run_cell("'kept' in globals()", show=False) == [False, False]


def test_ranks_have_their_environment_and_their_own_seeds(ranks2: Ranks, where: str) -> None:
    def look() -> tuple[str, ...]:
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
        return tuple(os.environ[name] for name in names)

    local = ("0", "1") if where == "here" else ("0", "0")  # one rank on each of two hosts
    assert ranks2.run(look) == [(str(r), local[r], "2", "127.0.0.1", "1") for r in range(2)]
    assert ranks2.run(os.getppid)[0] != os.getpid()
    ranks2.restart()
    draws = ranks2.run(lambda: (torch.rand(1).item(), random.random()))
    assert draws[0] != draws[1]
    ranks2.restart()
    assert ranks2.run(lambda: (torch.rand(1).item(), random.random())) == draws


def test_output_is_labelled_in_order_and_told_once_where_equal(
    ranks4: Ranks, capfd: pytest.CaptureFixture[str]
) -> None:
    def talk(differ: bool) -> None:
        time.sleep(0.1 * (3 - dist.get_rank()))
        print("one\ntwo" if not differ else f"I am {dist.get_rank()}", end="")
        os.write(1, b"raw\n")

    ranks4.run(talk, False)
    assert capfd.readouterr() == ("[ranks 0-3] one\n[ranks 0-3] two\n", "[ranks 0-3] raw\n")
    ranks4.run(talk, True)
    assert capfd.readouterr().out == "".join(f"[rank {r}] I am {r}\n" for r in range(4))


def test_what_cannot_be_sent_is_said(ranks2: Ranks) -> None:
    lock = __import__("threading").Lock()
    with pytest.raises(ValueError, match=r"cannot send .*lock"):
        ranks2.run(lambda: lock)
    with pytest.raises(RuntimeError, match=r"all 2 ranks: ValueError: cannot send .*generator"):
        ranks2.run(lambda: (i for i in range(3)))


@pytest.mark.parametrize("n", [0, -1, 2.0, True, 10**6])
def test_impossible_numbers_of_ranks_are_refused(n: int) -> None:
    with pytest.raises(ValueError, match=r"at least 1|MiB|cores"):
        Ranks(n)


def test_many_ranks_for_the_cores_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr("fmlab._ranks.fit.available_memory", lambda: 2 << 30)
    with pytest.warns(UserWarning, match="9 ranks share 2 cores"):
        check_fits(9)
    monkeypatch.setattr("fmlab._ranks.fit.available_memory", lambda: 700 << 20)
    with pytest.raises(ValueError, match="at most 4 ranks fit"):
        check_fits(5)


def test_a_rank_that_cannot_start_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"rank 0 of 1 could not start: .*no_such_interface"):
        Ranks(1, env={"GLOO_SOCKET_IFNAME": "no_such_interface"})


def test_ranks_missing_at_the_start_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fmlab.ranks.START_TIMEOUT", 4.0)
    from fmlab._ranks.transport import LocalTransport

    class WithoutRank1(LocalTransport):
        def _fork(self, rank: int, spec: dict[str, object], deadline: float) -> None:
            super()._fork(rank, spec, deadline)
            if rank == 1:
                os.kill(self.pids[1], signal.SIGSTOP)

    with pytest.raises((TimeoutError, RuntimeError), match=r"ranks? \[?1\]? of 2|did not join"):
        Ranks(2, transport=WithoutRank1())


def gone(processes: list[psutil.Process], within: float = 6) -> bool:
    """Whether all end in time; where nobody reaps an orphan, it stays a zombie."""
    until = time.monotonic() + within
    while any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def test_close_ends_the_ranks_and_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with Ranks(2) as ranks:
        children = ranks.run(lambda: subprocess.Popen(["sleep", "60"]).pid)
        processes = [psutil.Process(pid) for pid in ranks.pids + children]
        assert len(list(tmp_path.iterdir())) == 1
    assert gone(processes)
    assert not list(tmp_path.iterdir())
    assert not ranks.alive
    with pytest.raises(RuntimeError, match="closed"):
        ranks.run(os.getpid)
    with pytest.raises(RuntimeError, match="closed"):
        ranks.restart()


OPENMP_FIRST = """
import torch
torch.randn(500, 500) @ torch.randn(500, 500)  # a plain fork would not survive OpenMP in the parent
from fmlab import Ranks
class Local:
    def __init__(self, x): self.x = x
def square(x):
    return Local(x.x ** 2)
ranks = Ranks(2, threads=2)
print([r.x for r in ranks.run(square, Local(3))])
"""

# A child forked by the parent holds the parent's sockets open, so that the ranks see no end of file.
BLOCKED = """
import os, time
from fmlab import Ranks
ranks = Ranks(2)
if os.fork() == 0:
    time.sleep(30)
    os._exit(0)
print("started", flush=True)
def wait():
    import torch
    torch.distributed.recv(torch.ones(1), 1 - torch.distributed.get_rank())
ranks.run(wait)
"""


def start_script(tmp_path: Path, source: str) -> subprocess.Popen[str]:
    script = tmp_path / "with no guard.py"
    script.write_text(source)
    env = {**os.environ, "PYTHONPATH": str(REPO), "PYTHONWARNINGS": "error::ResourceWarning"}
    return subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    )


def test_a_script_without_a_main_guard_ends_clean(tmp_path: Path) -> None:
    process = start_script(tmp_path, OPENMP_FIRST)
    out, err = process.communicate(timeout=60)
    assert (out, err, process.returncode) == ("[9, 9]\n", "", 0)


def test_nothing_is_left_when_the_parent_is_killed_in_a_call(tmp_path: Path) -> None:
    process = start_script(tmp_path, BLOCKED)
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    time.sleep(0.5)
    ours = [p for p in psutil.Process(process.pid).children(recursive=True) if "fmlab._ranks" in _command(p)]
    assert len(ours) == 3
    forked = [p for p in psutil.Process(process.pid).children() if p not in ours]
    process.kill()
    process.wait()
    assert gone(ours)
    assert len(forked) == 1
    forked[0].kill()
    process.communicate()


def _command(process: psutil.Process) -> str:
    return " ".join(process.cmdline())


def test_a_pool_that_is_dropped_ends() -> None:
    ranks = Ranks(1)
    process = psutil.Process(ranks.pids[0])
    del ranks
    assert gone([process])


def test_pools_of_different_sizes_live_side_by_side(ranks2: Ranks, ranks4: Ranks) -> None:
    size: Callable[[], int] = dist.get_world_size
    assert (ranks2.run(size), ranks4.run(size)) == ([2] * 2, [4] * 4)
