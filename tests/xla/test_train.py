"""`fmlab train --backend xla`: the run of the CPU, saved through the host."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fmlab.backends.xla_environment import FAST_COMPILE
from fmlab.models import GPT
from fmlab.train import TrainConfig, train

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


def test_twenty_steps_equal_the_cpus(run: Path) -> None:
    config = TrainConfig(
        "gpt2-tiny", steps=STEPS, batch_size=4, seq_len=32, eval_every=0, backend="cpu", log_every=0
    )
    losses = json.loads((run / "steps" / f"{STEPS:06d}" / "run.json").read_text())["losses"]
    assert losses == pytest.approx(train(config).losses, abs=1e-5)
    assert losses[-1] < losses[0] - 1


def test_what_was_saved_loads_on_the_host_with_its_ties(run: Path) -> None:
    model = GPT.from_pretrained(run / "model")
    assert model.embedding.tokens.weight is model.head.tokens.weight
    assert {p.device.type for p in model.parameters()} == {"cpu"}
