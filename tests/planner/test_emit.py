"""From a plan to a run: what is written is what `fmlab train` runs, on as many ranks as were planned."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from fmlab.cli import main as fmlab
from fmlab.parallel import Layout
from fmlab.parallel.engines.deepspeed_engine import settings
from fmlab.planner import Plan, emit, gpt_shape, plan
from fmlab.train import checkpoint, read_config

FORMS = ("torchrun", "deepspeed", "slurm", "kubernetes")
IMAGE = {"kubernetes": "registry.example/fmlab:1"}


def planned(model: Any = "gpt2", **changes: Any) -> Plan:
    given: dict[str, Any] = dict(chip="h100", global_batch=64, seq_len=128, states="fp32-16")
    return plan(model, **{**given, "layout": Layout(data=16, zero=1, micro_batches=2), **changes})


def written(one: Plan, folder: Path, form: str, **options: Any) -> dict[str, str]:
    paths = emit(one, folder, form, image=IMAGE.get(form), **options)
    assert sorted(paths) == sorted(folder.iterdir())
    return {path.name: path.read_text() for path in paths}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("hosts", [1, 2])
def test_the_config_is_the_plan_and_hosts_times_chips_are_its_ranks(
    form: str, hosts: int, tmp_path: Path
) -> None:
    layout = Layout(data=8 * hosts, zero=2, micro_batches=2, bucket_mb=10.0)
    one = planned(layout=layout, recompute="full")
    files = written(one, tmp_path / "run", form, steps=9)
    config = read_config(tmp_path / "run" / "run.toml")
    assert config.layout == Layout(
        data=8 * hosts, zero=2, micro_batches=2, bucket_mb=10.0, recompute="full", precision="bf16"
    )
    assert (config.model, config.batch_size, config.seq_len, config.steps) == ("gpt2", 64, 128, 9)
    assert (config.engine, config.backend) == ("deepspeed" if form == "deepspeed" else "fmlab", "cuda")
    text = next(text for name, text in files.items() if name not in ("run.toml", "ds_config.json"))
    ranks = re.search(r"(?:--nproc-per-node|--num_gpus) (\d+)", text)
    nodes = re.search(r"(?:--nnodes|--num_nodes) (\d+)", text)
    assert ranks is not None
    assert int(ranks[1]) * (int(nodes[1]) if nodes else 1) == one.chips
    for name in files.keys() & {"launch.sh", "job.sbatch"}:
        subprocess.run(["bash", "-n", str(tmp_path / "run" / name)], check=True)


def test_deepspeed_is_told_the_same_as_the_engine_tells_it(tmp_path: Path) -> None:
    one = planned(layout=Layout(data=16, zero=3, micro_batches=2))
    found = json.loads(written(one, tmp_path / "run", "deepspeed")["ds_config.json"])
    config = read_config(tmp_path / "run" / "run.toml")
    engine = settings(config.layout, config.clip)
    for name in ("zero_optimization", "gradient_clipping"):
        assert found[name] == engine[name]
    assert found["zero_optimization"]["stage"] == 3
    rows, parts = found["train_micro_batch_size_per_gpu"], found["gradient_accumulation_steps"]
    assert rows * parts * 16 == found["train_batch_size"] == config.batch_size
    assert found["torch_autocast"]["enabled"]
    assert not found["bf16"]["enabled"]  # which would keep the weights in 16 bits


def test_slurm_is_asked_for_the_planned_hosts(tmp_path: Path) -> None:
    text = written(planned(), tmp_path / "run", "slurm")["job.sbatch"]
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", text, re.MULTILINE))
    assert asked["nodes"] == "2"
    assert asked["gpus-per-node"] == "8"
    assert asked["ntasks-per-node"] == "1"  # torchrun, which starts the ranks
    assert "#SBATCH --exclusive" in text
    few = written(planned(layout=Layout(data=4)), tmp_path / "few", "slurm")["job.sbatch"]
    assert "--gpus-per-node=4\n" in few
    assert "--exclusive" not in few


@pytest.mark.parametrize(
    ("chip", "ranks", "resource", "chips", "hosts", "per_host"),
    [
        ("h100", 16, "nvidia.com/gpu", 8, 2, 8),
        ("mi300x", 8, "amd.com/gpu", 8, 1, 8),
        ("trn2-lnc2", 128, "aws.amazon.com/neuron", 16, 2, 64),  # 16 chips of 4 devices
        ("trn2-lnc2", 2, "aws.amazon.com/neuron", 1, 1, 2),
        ("tpu-v5e", 1, "google.com/tpu", 1, 1, 1),
    ],
)
def test_kubernetes_counts_chips_and_torchrun_counts_ranks(
    chip: str, ranks: int, resource: str, chips: int, hosts: int, per_host: int, tmp_path: Path
) -> None:
    one = planned("llama-tiny", chip=chip, layout=Layout(data=ranks), global_batch=ranks)
    settings_, job = yaml.safe_load_all(written(one, tmp_path / "run", "kubernetes")["pytorchjob.yaml"])
    assert settings_["data"]["run.toml"] == (tmp_path / "run" / "run.toml").read_text()
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert job["spec"]["nprocPerNode"] == str(per_host)  # the API wants a text
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert sum(one["replicas"] for one in replicas.values()) == hosts
    assert replicas["Master"]["replicas"] == 1
    for replica in replicas.values():
        (container,) = replica["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"  # the operator looks for it
        assert container["image"] == IMAGE["kubernetes"]
        assert container["resources"]["limits"] == {resource: chips}
        (script,) = container["args"]
        assert script.startswith(f"exec torchrun --nnodes {hosts} --nproc-per-node {per_host} ")
        subprocess.run(["bash", "-n", "-c", script], check=True)
        volume = replica["template"]["spec"]["volumes"][0]
        assert volume["configMap"]["name"] == settings_["metadata"]["name"]


@pytest.mark.parametrize(
    ("changes", "options", "says"),
    [
        ({"states": "mixed-16"}, {}, "plan with states='fp32-16'"),
        ({"precision": "fp8"}, {}, "precision='fp8': a layout trains in fp32 or bf16"),
        ({"logits": "full"}, {}, "logits='chunked'"),
        ({"dropout": True}, {}, "trains with dropout 0.0"),
        (
            {"model": gpt_shape(layers=12, hidden=768, heads=12, vocab=50257, positions=1024)},
            {},
            "from a preset",
        ),
        ({"model": "clip-vit-b-32", "seq_len": None}, {}, "fmlab train reads text"),
        ({"model": "t5-base", "seq_len": {"input": 512, "output": 100}}, {}, "input=512,output=114"),
        ({"chip": "gaudi3"}, {}, "no backend for chips of Intel"),
        ({"chip": "trn2"}, {}, "plan with chip='trn2-lnc2'"),
        ({"chip": "tpu-v5e"}, {}, "one rank"),
        ({"chip": "trn2-lnc2"}, {"form": "deepspeed"}, "runs on GPUs"),
        ({"layout": Layout(data=12), "global_batch": 12}, {}, "do not fill hosts of 8"),
        ({"layout": Layout(tensor=2)}, {"form": "deepspeed"}, "AutoTP"),
        ({"layout": Layout(context=2)}, {"engine": "torch"}, "context_parallel"),
        ({}, {"engine": "megatron"}, "no engine 'megatron'"),
        (
            {"model": "gpt3-175b", "layout": Layout(data=512, fsdp=True), "global_batch": 512},
            {},
            "builds the",
        ),
        ({"model": "gpt3-13b", "layout": Layout()}, {}, "does NOT fit"),
        ({}, {"form": "kubernetes"}, "needs image="),
        ({}, {"image": "fmlab:1"}, "takes no image="),
        ({}, {"form": "pbs"}, "legal are torchrun, deepspeed, slurm, kubernetes"),
        ({}, {"form": "deepspeed", "engine": "torch"}, "starts engine 'deepspeed'"),
        ({}, {"steps": 0}, "steps=0"),
    ],
)
def test_what_cannot_run_as_planned_is_refused_before_anything_is_written(
    changes: dict[str, Any], options: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        emit(planned(**changes), tmp_path / "run", **options)
    assert not list(tmp_path.iterdir())


def test_t5_rows_are_those_that_are_trained(tmp_path: Path) -> None:
    one = planned("t5-base", seq_len={"input": 512, "output": 114})
    written(one, tmp_path / "run", "torchrun")
    assert read_config(tmp_path / "run" / "run.toml").seq_len == 512


def test_nothing_is_overwritten_unless_it_is_forced(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    emit(planned(), folder, "torchrun")
    (folder / "notes.txt").write_text("mine")
    before = (folder / "run.toml").read_text()
    with pytest.raises(ValueError, match=r"has run\.toml, launch\.sh already"):
        emit(planned(), folder, "slurm", steps=5)
    assert (folder / "run.toml").read_text() == before
    emit(planned(), folder, "slurm", steps=5, force=True)
    # a launch.sh that is left would start the old plan's ranks with the new settings
    assert sorted(path.name for path in folder.iterdir()) == ["job.sbatch", "notes.txt", "run.toml"]
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        emit(planned(), tmp_path / "file")


def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = "gpt2-tiny --chip h100 --chips 2 --seq-len 32 --global-batch 4 --states fp32-16"
    base = ["plan", *command.split()]
    emitting = [*base, "--emit", str(tmp_path / "run"), "--form", "slurm", "--tokens", "1000"]
    assert fmlab(emitting) == 0
    assert f"wrote {tmp_path / 'run' / 'run.toml'}" in capsys.readouterr().out
    config = read_config(tmp_path / "run" / "run.toml")
    assert (config.steps, config.layout.data) == (8, 2)  # 1000 tokens at 128 a step
    assert fmlab(emitting) == 2
    assert "--force" in capsys.readouterr().err
    assert fmlab([*emitting, "--force"]) == 0
    assert fmlab([*base, "--form", "slurm", "--force"]) == 2
    assert "--form, --force: give --emit FOLDER too" in capsys.readouterr().err


def test_what_a_search_finds_is_emitted(tmp_path: Path) -> None:
    command = "gpt2-tiny --chip h100 --chips 4 --seq-len 32 --global-batch 8 --states fp32-16 --search"
    assert fmlab(["plan", *command.split(), "--emit", str(tmp_path / "run")]) == 0
    assert read_config(tmp_path / "run" / "run.toml").layout.world_size == 4


def test_the_documented_command_writes_what_it_says(tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "planner.md").read_text()
    block = page.split("## From a plan to a run")[1].split("```bash\nfmlab ")[1].split("```")[0]
    command = shlex.split(block, comments=True)
    folder = tmp_path / "run"
    assert fmlab([str(folder) if word == "runs/gpt2" else word for word in command if word.strip()]) == 0
    assert sorted(path.name for path in folder.iterdir()) == ["job.sbatch", "run.toml"]


@pytest.mark.launched
def test_the_emitted_launch_starts_and_takes_two_steps(tmp_path: Path) -> None:
    """On the CPU: what follows launch.sh goes before run.toml."""
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("".join(f"item {i} comes before item {i + 1}.\n" for i in range(2000)))
    layout = Layout(data=2, zero=1, micro_batches=2)
    one = planned("gpt2-tiny", layout=layout, global_batch=4, seq_len=32, precision="fp32")
    emit(one, tmp_path / "run", steps=2, corpus=str(corpus))
    env = {k: v for k, v in os.environ.items() if k not in {"RANK", "WORLD_SIZE", "LOCAL_RANK"}}
    env |= {"OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    launch = ["bash", str(tmp_path / "run" / "launch.sh"), "--backend", "cpu", "--eval-every", "0"]
    done = subprocess.run(
        [*launch, "--out", str(tmp_path / "out")], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    record = json.loads((checkpoint.latest(tmp_path / "out") / "run.json").read_text())
    assert len(record["losses"]) == 2
    found = record["settings"]["layout"]
    assert (found["data"], found["zero"], found["micro_batches"]) == (2, 1, 2)
