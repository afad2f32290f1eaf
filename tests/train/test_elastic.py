"""Under torchrun a run goes on by itself: the same job, no other; with the ranks that are left."""

import json
import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from fmlab.bench.launched import Launched, free_port, host_options
from fmlab.parallel import Layout
from fmlab.rendezvous import keep
from fmlab.train import checkpoint
from fmlab.train.elastic import Recovery, Start, go_on, last_step, starts
from fmlab.train.launch import World
from fmlab.train.meeting import meet
from tests.soak.kills import end_of
from tests.train.test_resume import broken_off
from tests.train.tiny_run import tiny_config, tiny_train

JOB = "tests.train.elastic_job"


@pytest.fixture
def job(monkeypatch):
    """As if torchrun had started this process."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-7")


def test_a_start_of_the_same_job_goes_on_and_another_is_refused(tmp_path, job, monkeypatch):
    whole = tiny_train(out=str(tmp_path / "whole"))
    out = tmp_path / "run"
    broken_off(8, out=str(out), save_every=3)
    assert last_step(out)[0] == 8
    assert [(one.job, one.step, one.recovery) for one in starts(out)] == [("job-7", 0, None)]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-8")
    with pytest.raises(ValueError, match="holds a run already"):
        tiny_train(out=str(out), save_every=3)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-7")
    result = tiny_train(out=str(out), save_every=3)
    assert end_of(out) == end_of(tmp_path / "whole")
    assert result.losses == whole.losses
    assert (result.recovery.step, result.recovery.last, result.recovery.again) == (6, 8, 2)
    assert starts(out)[-1].recovery == result.recovery
    assert last_step(out) is None  # of a run that came to its end nothing is recovered


def test_what_a_recovery_says():
    recovery = Recovery(step=700, last=730, launched=1.5, joined=4.0, ready=0.5, stepped=0.25)
    assert recovery.seconds == 6.25
    assert str(recovery).startswith("recovered in 6.2 s: 30 steps done again, from step 700 (1.5 s until")
    line = {"job": "a", "ranks": 2, "step": 0, "at": 1.0, "recovery": None}
    assert Start(**line).ranks == 2


def test_lines_that_are_no_starts_are_passed_over(tmp_path):
    good = json.dumps({"job": "a", "ranks": 2, "step": 0, "at": 1.0, "recovery": None})
    (tmp_path / "starts.jsonl").write_text(f'{good}\n{good[:20]}\n[]\n7\n{{"job": 1}}\n')
    (tmp_path / "last_step").write_text("12 half")
    assert starts(tmp_path) == [Start("a", 2, 0, 1.0)]
    assert last_step(tmp_path) is None


def test_lost_ranks_become_micro_batches(tmp_path, job):
    """8 rows: 2 ranks x 4; one rank has 2 x 4, so that it holds no more rows at once than before."""
    config = tiny_config(out=str(tmp_path), layout=Layout(zero=1), save_every=2)
    two = replace(config, layout=Layout(data=2, zero=1)).to_dict()
    folder = checkpoint.folder_of(tmp_path, 2)
    folder.mkdir(parents=True)
    state = checkpoint.RunState(2, 2, {}, [1.0, 1.0], two)
    (folder / "run.json").write_text(json.dumps(vars(state)))
    _list(folder)
    (tmp_path / "starts.jsonl").write_text(
        json.dumps({"job": "job-7", "ranks": 2, "step": 0, "at": 1.0, "recovery": None}) + "\n"
    )
    found = go_on(config, World())
    assert found.resume
    assert found.layout == Layout(data=1, zero=1, micro_batches=2)
    assert go_on(replace(config, resume=True), World()).layout == config.layout


def _list(folder: Path) -> None:
    from fmlab import storage

    storage.enter_files(folder, {}, {"run.json"}, None)


def test_a_layout_that_cannot_shrink_names_what_it_can_be(job):
    config = tiny_config(layout=Layout(tensor=2, pipeline=2, micro_batches=2))
    said = r"torchrun started 2 ranks, and the layout can have 4, 8, 16; its --nnodes MIN:MAX waits until MIN"
    with pytest.raises(ValueError, match=said):
        go_on(config, World(0, 2))
    assert config.layout_for(8).data == 2
    with pytest.raises(ValueError, match=r"can have 2; .*leave --data out"):
        go_on(tiny_config(layout=Layout(data=2)), World(0, 1))


def test_ranks_meet_beside_what_earlier_starts_left(monkeypatch, tmp_path):
    """Launchers that send their ranks to two stores, each with an address of a start that is dead: they meet
    through the folder."""
    lent = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(2)]
    dead = {"address": "127.0.0.1", "port": free_port(), "proof": "old", "ranks": 2}
    for store in lent:
        store.set("fmlab/meeting", json.dumps(dead))
    (tmp_path / ".meeting").write_text(json.dumps({**dead, "port": lent[0].port}))  # another store's port
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_PORT", str(lent[1].port))
    found = []
    second = threading.Thread(target=lambda: found.append(meet(1, 2, str(tmp_path), 30)))
    second.start()
    time.sleep(0.3)
    assert not found
    os.environ["MASTER_PORT"] = str(lent[0].port)
    first = meet(0, 2, str(tmp_path))
    os.environ["MASTER_PORT"] = str(lent[1].port)
    second.join(30)
    first.set("a", "b")
    assert found[0].get("a") == b"b"
    with pytest.raises(ConnectionError, match="rank 1 has not found the first of 3 ranks within"):
        meet(1, 3, str(tmp_path), 0.2)


@pytest.mark.multirank
@pytest.mark.slow
def test_a_killed_rank_is_started_again_to_the_same_bits(ranks2, tmp_path):
    """As `torchrun --standalone`, which lends the ranks of every start the same store."""
    settings = {"steps": 10, "save_every": 3, "eval_every": 5}
    ranks2.run(tiny_train, out=str(tmp_path / "whole"), **settings)
    words = [f"{name}={value}" for name, value in settings.items()]
    out = tmp_path / "run"
    options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "2"]
    launched = Launched(options, [JOB, str(out), *words, "log_every=5", "die=8:1"], tmp_path / "log")
    try:
        assert launched.wait(150) == 0, launched.said
    finally:
        launched.close()
    assert end_of(out) == end_of(tmp_path / "whole")
    assert [one.step for one in starts(out)] == [0, 6]
    assert "recovered in" in launched.said
    assert "2 steps done again, from step 6" in launched.said


@pytest.mark.multirank
@pytest.mark.slow
def test_a_lost_host_shrinks_the_job_and_a_new_one_lets_it_grow(tmp_path):
    """Two launchers as two hosts, the rendezvous kept by a third process. One is killed for good, the job
    goes on with one rank; another one comes, and it goes on with two."""
    keeper = keep(0)
    whole = tiny_train(steps=160)
    out = tmp_path / "run"
    command = [JOB, str(out), "steps=160", "save_every=2", "pace=0.5", "log_every=1"]
    hosts = []

    def host() -> Launched:
        options = host_options(keeper.port)
        log = tmp_path / f"log-{len(hosts)}"
        hosts.append(Launched(options, command, log, "fmlab.torchrun"))
        return hosts[-1]

    def said() -> str:
        return "\n".join(one.said for one in hosts)

    def until(ranks: int, number: int) -> None:
        deadline = time.monotonic() + 100
        while not (len(found := starts(out)) >= number and found[-1].ranks == ranks):
            assert time.monotonic() < deadline, said()
            time.sleep(0.1)

    try:
        first, second = host(), host()
        until(ranks=2, number=1)
        time.sleep(1.5)
        second.kill_host()
        until(ranks=1, number=2)
        third = host()
        until(ranks=2, number=3)
        (tmp_path / "hurry").touch()
        assert [one.wait(60) for one in (first, third)] == [0, 0], said()
    finally:
        for one in hosts:
            one.close()
    assert [one.ranks for one in starts(out)] == [2, 1, 2]
    state = checkpoint.run_state(checkpoint.latest(out))
    assert state.step == 160
    assert state.losses == pytest.approx(whole.losses, abs=1e-4)
