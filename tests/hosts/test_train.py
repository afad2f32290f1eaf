"""`fmlab train` on two hosts by the launch files that the planner writes: bitwise what one host learns,
also after one of them was gone."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from fmlab import Ranks
from fmlab.parallel import Layout
from fmlab.planner.launchers import deepspeed, torchrun
from fmlab.planner.launchers.job import Job
from fmlab.train import TrainConfig, checkpoint, train
from tests.hosts.namespaces import Host, Hosts

pytestmark = [pytest.mark.multirank, pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parents[2]
STEPS = 24
LIMIT = 240  # seconds for a run to start and end; 10 to 20 on a quiet machine


def config(folder: Path) -> TrainConfig:
    return TrainConfig(
        model="gpt2-tiny",
        corpus=str(folder / "corpus.txt"),
        layout=Layout(data=2, zero=1),
        batch_size=4,
        seq_len=32,
        steps=STEPS,
        eval_every=0,
        save_every=4,
        backend="cpu",
        log_every=1,
        out=str(folder / "run"),
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that all hosts see, with the launch files and a corpus."""
    (tmp_path / "corpus.txt").write_text(
        "".join(f"item {i} comes before item {i + 1}.\n" for i in range(900))
    )
    job = Job(config(tmp_path), "cpu", "", 2, 1, 1, whole_hosts=True, rows=2)
    for name, text in {**torchrun.files(job), "run.toml": job.settings}.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def start(host: Host, folder: Path, head: str, *words: str, **more: str) -> "subprocess.Popen[str]":
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HEAD": head, **more}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    with open(folder / f"{host.name}.log", "a") as log:
        return host.start(["bash", folder / "launch.sh", *words], env=env, stdout=log, stderr=log)


def log_of(host: Host, folder: Path) -> str:
    return (folder / f"{host.name}.log").read_text()


def end_of(runs: "list[subprocess.Popen[str]]", hosts: Hosts, folder: Path) -> None:
    codes = [run.wait(LIMIT) for run in runs]
    assert codes == [0, 0], "\n".join(log_of(host, folder) for host in hosts)


def result(out: str) -> tuple[list[float], dict[str, Any]]:
    """(losses, weights and optimizer state) of a finished run."""
    record = json.loads((checkpoint.latest(out) / "run.json").read_text())
    files = sorted(checkpoint.latest(out).glob("**/*.safetensors"))
    assert files
    return record["losses"], {
        str(file.relative_to(checkpoint.latest(out))): file.read_bytes() for file in files
    }


@pytest.fixture(scope="module")
def on_one_host(_pool2: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], dict[str, Any]]:
    """The same run, never disturbed, on two ranks of this host."""
    folder = tmp_path_factory.mktemp("one-host")
    (folder / "corpus.txt").write_text("".join(f"item {i} comes before item {i + 1}.\n" for i in range(900)))
    ranks: Ranks = _pool2.get()
    ranks.run(lambda one: _with_one_thread(one), config(folder), timeout=LIMIT)
    return result(str(folder / "run"))


def _with_one_thread(one: TrainConfig) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        train(one)
    finally:
        torch.set_num_threads(threads)


def test_two_hosts_learn_what_one_does_bitwise(
    folder: Path, on_one_host: Any, hosts_can_be_made: None
) -> None:
    """Known by addresses alone, without a word on the network interface; names of Debian's kind are below."""
    with Hosts(2, own_name="none") as hosts:
        end_of([start(host, folder, hosts[0].address) for host in hosts], hosts, folder)
    assert result(str(folder / "run")) == on_one_host


def until_saved(folder: Path) -> None:
    out, deadline = config(folder).out, time.monotonic() + LIMIT
    assert out is not None
    while not checkpoint.steps(out) and time.monotonic() < deadline:
        time.sleep(0.02)


def test_a_host_that_is_shut_down_is_named(two_hosts: Hosts, folder: Path) -> None:
    """Its connections are closed, which the other sees at once."""
    runs = [start(host, folder, "host-0") for host in two_hosts]
    until_saved(folder)
    two_hosts[1].power_off()
    assert runs[0].wait(60) != 0
    assert "rank 1 on host-1 (10.77.0.2)" in log_of(two_hosts[0], folder)


def test_a_host_that_is_cut_off_is_named_and_the_run_goes_on_when_it_is_back(
    two_hosts: Hosts, folder: Path, on_one_host: Any
) -> None:
    """Nothing is heard of it: the others end within the time limit."""
    limit = ["--collective-timeout", "8"]
    runs = [start(host, folder, "host-0", *limit) for host in two_hosts]
    until_saved(folder)
    two_hosts[1].unplug()
    assert runs[0].wait(60) != 0
    assert "rank 1 on host-1 (10.77.0.2)" in log_of(two_hosts[0], folder)
    two_hosts[1].power_off()
    two_hosts[1].power_on()
    end_of([start(host, folder, "host-0", "--resume", *limit) for host in two_hosts], two_hosts, folder)
    assert result(str(folder / "run")) == on_one_host


@pytest.mark.slow
def test_deepspeeds_launcher_starts_two_hosts_without_ssh(two_hosts: Hosts, folder: Path) -> None:
    """The launcher and its options; the engine is ours, since DeepSpeed's wants a GPU here."""
    pytest.importorskip("deepspeed", reason="needs the extra deepspeed")
    job = Job(config(folder), "cpu", "", 2, 1, 1, whole_hosts=True, rows=2)
    (folder / "launch.sh").write_text(deepspeed.files(job)["launch.sh"])
    (folder / "hosts").write_text("host-0 slots=1\nhost-1 slots=1\n")
    runs = [
        start(
            host, folder, two_hosts[0].address, "--steps", "2", HOSTFILE="hosts", NODE_RANK=str(host.number)
        )
        for host in two_hosts
    ]
    end_of(runs, two_hosts, folder)
    assert "2 ranks" in log_of(two_hosts[0], folder)
    assert len(result(str(folder / "run"))[0]) == 2
