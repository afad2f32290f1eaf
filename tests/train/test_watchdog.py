"""Ranks that wait in vain end within the limit, and the verdict names rank, call and line."""

import socket
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from fmlab.meter import read_dumps
from fmlab.train.watchdog import Watchdog, recorded

pytestmark = pytest.mark.multirank


def late(folder):
    """Rank 1 comes to an all_reduce after the limit; what each rank's watchdog says, and nothing ends."""
    rank, said = dist.get_rank(), []
    store = dist.FileStore(f"{folder}/store", 2)
    with Watchdog(0.3, store, rank, 2, f"{folder}/flight", end=said.append):
        if rank == 1:
            time.sleep(1.5)
        dist.all_reduce(torch.ones(3))
        time.sleep(1)
    return said[0].kind, said[0].ranks, str(said[0])


def test_a_late_rank_is_named_on_every_rank_and_in_the_folder(ranks2, tmp_path):
    for kind, ranks, text in ranks2.run(late, str(tmp_path)):
        assert (kind, ranks) == ("absent", (1,))
        assert "rank 1 did not enter all_reduce #" in text
        assert "time.sleep(1.5)" in text
    assert "no collective has ended for 0.3 s" in (tmp_path / "flight" / "verdict.txt").read_text()
    assert [dump.rank for dump in read_dumps(tmp_path / "flight")] == [0, 1]


def fine(folder):
    with Watchdog(0.2, dist.FileStore(f"{folder}/store", 2), dist.get_rank(), 2, folder, end=print) as dog:
        for _ in range(20):
            dist.all_reduce(torch.ones(3))
            time.sleep(0.05)  # longer than the limit in all, and every collective ends
        time.sleep(0.5)
    return dog.verdict


def test_a_long_computation_is_no_hang(ranks2, tmp_path):
    assert ranks2.run(fine, str(tmp_path)) == [None, None]


def test_checking_comes_too_late_for_a_group_that_exists(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with pytest.raises(ValueError, match="before the ranks meet"), recorded(check=True):
        pass


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_job(fault, tmp_path, size=3):
    """(exit codes, what each rank wrote to stderr, the folder of the dumps)."""
    command = [sys.executable, "-m", "tests.train.watchdog_job"]
    out, port = tmp_path / "out", free_port()
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(size), str(port), str(out), fault],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        texts = [process.communicate(timeout=150)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], texts, out / "flight"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("dies", "dead", ["rank 1 left no dump", "all_reduce #", "watchdog_job.py"]),
        ("sleeps", "absent", ["rank 1 did not enter all_reduce #", "time.sleep(60)"]),
        ("sleeps, one is slow", "absent", ["rank 1 did not enter all_reduce #", "time.sleep(60)"]),
        ("raises", "absent", ["rank 1 did not enter all_reduce #", "KeyError", "go_wrong"]),
        ("unequal", "absent", ["rank 1 did not enter all_reduce #", "has finished"]),
        ("shape checked", "mismatch", ["allreduce float[5]", "allreduce float[4]", "go_wrong"]),
        ("type checked", "mismatch", ["allreduce double[4]", "allreduce float[4]", "go_wrong"]),
        ("other group", "mismatch", ["broadcast", "rank 1"]),
    ],
)
def test_a_job_that_goes_wrong_ends_within_the_limit_and_says_why(fault, kind, words, tmp_path):
    codes, texts, folder = run_job(fault, tmp_path)
    said = [text for text in texts if "fmlab: train:" in text]
    verdict = (folder / "verdict.txt").read_text()
    assert len(said) == 1, "one rank tells"
    for word in words:
        assert word in verdict, verdict
    assert all(code not in (0, None) or (fault == "unequal" and rank == 1) for rank, code in enumerate(codes))
