"""`fmlab flight` on dumps that ranks left."""

import pytest

from fmlab.cli import main
from fmlab.meter import Dump, FlightEntry


@pytest.fixture
def run(tmp_path):
    """A run's folder: rank 1 came 2 s late to the second call, and never to the third."""
    folder = tmp_path / "flight"
    folder.mkdir()
    for rank, times in {0: (1.0, 2.0, 5.0), 1: (1.0, 4.0)}.items():
        entries = [
            FlightEntry(
                "0", n, "all_reduce", "float32", (4,), 16, (0, 1), at, n < 3, (f"loop.py:{n}, in step",)
            )
            for n, at in enumerate(times, 1)
        ]
        dump = Dump(rank, 2, entries, {"0": len(times)}, lines=("data.py:9, in read",), at=7.0)
        (folder / f"rank-{rank}.json").write_text(dump.to_json())
    return tmp_path


def test_the_verdict_the_calls_and_the_waiting_are_shown(run, capsys):
    assert main(["flight", str(run), "--rank", "0", "--last", "2", "--stragglers"]) == 0
    said = capsys.readouterr().out
    assert "rank 1 did not enter all_reduce #3 float32[4], for which rank 0 waits" in said
    assert "data.py:9" in said
    assert "-5.000 s  all_reduce #2" in said
    assert "all_reduce #1" not in said
    assert "all_reduce #2 float32[4] by 2000.0 ms, at loop.py:2" in said


def test_a_folder_or_rank_without_dumps_is_named(run, tmp_path, capsys):
    assert main(["flight", str(run), "--rank", "7"]) == 2
    assert "those that did: 0, 1" in capsys.readouterr().err
    assert main(["flight", str(tmp_path / "nothing")]) == 2
    assert "holds no dumps" in capsys.readouterr().err
