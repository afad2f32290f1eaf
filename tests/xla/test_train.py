"""`fmlab train --backend xla`: the run of the CPU, saved through the host."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fmlab.backends.xla_environment import FAST_COMPILE
from fmlab.models import GPT
from fmlab.storage import load_tensors
from fmlab.train import TrainConfig, TrainResult, train

STEPS = 20


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run") / "xla"
    command = [sys.executable, "-m", "fmlab.cli", "train", "gpt2-tiny", "--backend", "xla"]
    command += ["--steps", str(STEPS), "--batch-size", "4", "--seq-len", "32", "--eval-every", "0"]
    env = {**os.environ, "PJRT_DEVICE": "CPU", "XLA_FLAGS": " ".join(FAST_COMPILE)}
    done = subprocess.run([*command, "--out", str(out)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return out


@pytest.fixture(scope="module")
def on_cpu() -> TrainResult:
    return train(
        TrainConfig(
            "gpt2-tiny", steps=STEPS, batch_size=4, seq_len=32, eval_every=0, backend="cpu", log_every=0
        )
    )


def test_twenty_steps_equal_the_cpus(run: Path, on_cpu: TrainResult) -> None:
    losses = json.loads((run / "steps" / f"{STEPS:06d}" / "run.json").read_text())["losses"]
    assert losses == pytest.approx(on_cpu.losses, abs=1e-5)
    assert losses[-1] < losses[0] - 1


def test_what_was_saved_loads_on_the_host_with_its_ties(run: Path, on_cpu: TrainResult) -> None:
    model = GPT.from_pretrained(run / "model")
    assert model.embedding.tokens.weight is model.head.tokens.weight
    wanted = dict(on_cpu.model.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.device.type == "cpu"
        # AdamW makes a whole step of the rounding in a gradient that is nearly 0
        torch.testing.assert_close(parameter, wanted[name], rtol=0, atol=5e-3)


def test_moments_of_one_shape_are_not_taken_for_one_tensor(run: Path) -> None:
    """torch_xla shows no address of a tensor, which storage once took for the same place."""
    state = load_tensors(run / "steps" / f"{STEPS:06d}", name="optimizer")
    first = {name.rpartition("/")[0]: tensor for name, tensor in state.items() if name.endswith("/exp_avg")}
    assert len(first) == 52
    for name, mean in first.items():
        squared = state[f"{name}/exp_avg_sq"]
        assert not torch.equal(mean, squared), name
        assert (squared >= 0).all(), name
