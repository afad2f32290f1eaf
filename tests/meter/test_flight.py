"""The flight recorder on real ranks: what each way to go wrong leaves behind."""

import contextlib

import pytest
import torch
import torch.distributed as dist

from fmlab.meter import FlightRecorder, read_dumps, verdict
from fmlab.ranks import RankError

pytestmark = pytest.mark.multirank


def broken(fault, folder):
    """One collective that fits, then the fault; each rank dumps what it knows while it lasts."""
    import threading
    import time

    rank, x = dist.get_rank(), torch.ones(4)
    with FlightRecorder() as flight:
        dumped = threading.Timer(0.1, lambda: flight.dump(f"{folder}/rank-{rank}.json"))
        dist.all_reduce(x)
        dumped.start()
        if fault == "skip" and rank == 1:
            time.sleep(1)  # where it is instead
        elif fault == "swapped sends":
            dist.send(x, 1 - rank)
            dist.recv(x, 1 - rank)
        elif fault == "swapped collectives" and rank == 1:
            dist.reduce(x, 0)
            dist.all_reduce(x)
        else:
            dist.all_reduce(x)
        dumped.join()
        time.sleep(1)


@pytest.mark.parametrize(
    ("fault", "kind", "ranks", "words"),
    [
        ("skip", "absent", (1,), ["rank 1 did not enter all_reduce #", "time.sleep(1)"]),
        ("swapped sends", "deadlock", (0, 1), ["send #1 float32[4] to rank 1", "dist.send(x, 1 - rank)"]),
        ("swapped collectives", "mismatch", (1,), ["entered reduce #", "entered all_reduce #"]),
    ],
)
def test_a_fault_is_named_by_rank_call_and_line(ranks2, tmp_path, fault, kind, ranks, words):
    ranks2.run(kept, None)  # imports take time, and the pool soon ends what cannot end
    with contextlib.suppress(RankError):  # the pool sees it, too, and ends the ranks
        ranks2.run(broken, fault, str(tmp_path), timeout=2)
    found = verdict(read_dumps(tmp_path))
    assert (found.kind, found.ranks) == (kind, ranks)
    for word in words:
        assert word in found.headline
    assert "test_flight.py" in found.headline


def kept(_):
    """A dozen collectives of several kinds with a ring of all, and messages."""
    rank, x = dist.get_rank(), torch.ones(2, 3)
    group = dist.new_group([0, 1])
    with FlightRecorder() as flight:
        dist.all_reduce(x, group=group)
        dist.all_gather([torch.empty(2, 3), torch.empty(2, 3)], x)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
        model(x).sum().backward()
        work = dist.isend(x, 1) if rank == 0 else dist.irecv(x, 0)
        before = flight.entries()[-1].ended
        work.wait()
        found = flight.entries()
        return [(e.op, e.shape, e.bytes, e.ranks, e.lines[0]) for e in found], before, found[-1].ended


def test_every_path_to_the_group_is_recorded_with_its_line(ranks2):
    for entries, before, after in ranks2.run(kept, None):
        ops = [op for op, *_ in entries]
        assert entries[0][:4] == ("all_reduce", (2, 3), 24, (0, 1))
        assert entries[1][:3] == ("all_gather", (2, 3), 48)
        assert ("all_reduce", (4,), 16, (0, 1)) in [entry[:4] for entry in entries[2:]], (
            "DDP's reducer, in C++"
        )
        assert ops[-1] in ("send", "recv")
        assert (before, after) == (False, True)
        assert all("test_flight.py" in line for *_, line in entries)


def sent_after(_):
    """Messages once the recorder is closed: its methods are gone, torch's are back."""
    rank, x = dist.get_rank(), torch.full((3,), float(dist.get_rank()))
    before = [vars(dist.ProcessGroup)[name] for name in ("send", "recv")], vars(dist.Work)["wait"]
    for _ in range(2):
        with FlightRecorder():
            dist.barrier()
    assert before == ([vars(dist.ProcessGroup)[name] for name in ("send", "recv")], vars(dist.Work)["wait"])
    if rank == 0:
        dist.send(x, 1)
    else:
        dist.recv(x, 0)
    return x.tolist()


def test_messages_go_on_after_the_recorder(ranks2):
    assert ranks2.run(sent_after, None) == [[0.0] * 3, [0.0] * 3]


def test_a_recorder_that_comes_too_late_says_so(monkeypatch):
    monkeypatch.delenv("TORCH_FR_BUFFER_SIZE", raising=False)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with pytest.raises(ValueError, match="before torch"):
        FlightRecorder()
    with pytest.raises(ValueError, match="at least 1"):
        FlightRecorder(0)


def test_a_folder_without_dumps_and_a_torn_one_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no dumps"):
        read_dumps(tmp_path)
    (tmp_path / "rank-0.json").write_text('{"rank": 0, "entr')
    with pytest.raises(ValueError, match=r"rank-0\.json"):
        read_dumps(tmp_path)
