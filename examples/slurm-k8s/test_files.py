"""The files are those that the planner writes, they can be read, and their settings start a run."""

import subprocess
import sys
from pathlib import Path

import pytest

from fmlab.cli import main

HERE = Path(__file__).parent
PLAN = (
    "gpt2 --chip a100-80gb --host p4de.24xlarge --data 16 --zero 1 --micro-batches 2 "
    "--global-batch 512 --seq-len 1024 --states fp32-16 --tokens 10e9"
)
FORMS = {
    "slurm": ["--form", "slurm"],
    "kubernetes": ["--form", "kubernetes", "--image", "registry.example/fmlab:0.1"],
}


@pytest.mark.parametrize("form", FORMS)
def test_the_files_are_those_that_the_planner_writes(form, tmp_path):
    assert main(["plan", *PLAN.split(), "--emit", str(tmp_path / form), *FORMS[form]]) == 0
    for file in (tmp_path / form).iterdir():
        assert (HERE / form / file.name).read_text() == file.read_text()


def test_the_shell_and_yaml_can_read_them():
    subprocess.run(["bash", "-n", HERE / "slurm" / "job.sbatch"], check=True)
    yaml = pytest.importorskip("yaml")
    settings, job = yaml.safe_load_all((HERE / "kubernetes" / "pytorchjob.yaml").read_text())
    assert settings["data"]["run.toml"] == (HERE / "kubernetes" / "run.toml").read_text()
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert sum(one["replicas"] for one in replicas.values()) == 2


def test_the_settings_start_a_run_of_two_ranks():
    """The launcher and the program of the job; model, batch and device are those of a laptop."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    small = "gpt2-tiny --backend cpu --data 2 --batch-size 4 --seq-len 64 --steps 2 --eval-every 0"
    program = ["-m", "fmlab.train", "--config", HERE / "slurm" / "run.toml", *small.split()]
    done = subprocess.run([sys.executable, *launcher, *program], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "2 steps" in done.stdout
