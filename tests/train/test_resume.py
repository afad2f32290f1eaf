"""Going on: every setting has a rule, nothing is overwritten by a refusal, histories are those of one run."""

import hashlib
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from fmlab import cli
from fmlab.parallel import Layout
from fmlab.train import Callback, TrainConfig, checkpoint
from fmlab.train.checkpoints import find
from fmlab.train.images.config import ImageConfig
from fmlab.train.resume import RULES, check_settings
from tests.train.tiny_run import tiny_config, tiny_model, tiny_tokenizer, tiny_train

ROOT = Path(__file__).resolve().parents[2]


def fingerprint(folder: Path) -> dict[str, str]:
    files = (p for p in folder.rglob("*") if p.is_file() and p.name != ".lock")
    return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


class Stop(Callback):
    """Breaks a run off behind a step, as a kill does for what is on disk."""

    def __init__(self, step: int) -> None:
        self.at = step

    def on_step(self, metrics):
        if metrics.step == self.at:
            raise KeyboardInterrupt


def broken_off(step: int, **settings):
    with pytest.raises(KeyboardInterrupt):
        tiny_train(callbacks=(Stop(step),), **settings)


def test_every_setting_has_a_rule():
    assert set(RULES) == {each.name for each in fields(ImageConfig)}  # which has all of TrainConfig
    assert {each.name for each in fields(TrainConfig)} < set(RULES)
    assert {rule for rule, _ in RULES.values()} == {"same", "said", "free"}
    for name, (_, why) in RULES.items():
        assert len(why) > 5, name


OTHER = dict(
    model="llama-tiny", objective="prefix", batch_size=4, seq_len=8, pack_documents=True, optimizer="lamb"
) | dict(numbers="fp8-delayed", seed=1, validation=0.3, init="elsewhere", teacher="another", mask_versions=3)


def test_the_table_is_what_happens():
    """The rules by name: each setting that must be the same is refused, each other one is said or not."""
    before = tiny_config(layout=Layout(data=1))
    assert check_settings(before.to_dict(), before) == []
    of_text = {each.name for each in fields(TrainConfig)}
    same = {name for name, (rule, _) in RULES.items() if rule == "same" and name in of_text}
    assert same == set(OTHER)
    for name, value in OTHER.items():
        with pytest.raises(ValueError, match=f"cannot resume with other settings; {name}: "):
            check_settings(before.to_dict(), replace(before, **{name: value}))
    (said,) = check_settings(before.to_dict(), replace(before, steps=20))
    assert said.startswith("steps: 10 in the checkpoint, 20 now (the schedule of the learning rate is cut")
    (said,) = check_settings(before.to_dict(), replace(before, layout=Layout(data=2)))
    assert said.startswith("layout: {'data': 1} in the checkpoint, {'data': 2} now")
    assert check_settings(before.to_dict(), replace(before, keep=9, log_every=1, out="elsewhere")) == []


def test_a_refusal_changes_no_file_and_a_change_is_said(tmp_path):
    tiny_train(out=str(tmp_path), steps=4)
    before = fingerprint(tmp_path)
    for change in ({"seed": 5}, {"batch_size": 4}, {"numbers": "bf16-kahan"}, {"steps": 3}):
        with pytest.raises(ValueError, match=next(iter(change))):
            tiny_train(out=str(tmp_path), resume=True, **({"steps": 5} | change))
    assert fingerprint(tmp_path) == before
    with pytest.warns(UserWarning, match="goes on with other settings; steps: 4 in the checkpoint, 5 now"):
        tiny_train(out=str(tmp_path), resume=True, steps=5)


def test_the_histories_are_those_of_one_run(tmp_path):
    """Losses, validation and TensorBoard's files, of a run that was killed two steps behind its last
    checkpoint."""
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs: pip install '.[log]'"
    )
    settings = dict(steps=6, eval_every=2, save_every=2, tensorboard=True)
    whole = tiny_train(out=str(tmp_path / "a"), **settings)
    out = str(tmp_path / "b")
    broken_off(5, out=out, **settings)
    resumed = tiny_train(out=out, resume=True, **settings)
    assert resumed.losses == whole.losses
    assert resumed.validation == whole.validation
    assert [step for step, _ in whole.validation] == [2, 4, 6]
    events = accumulator.EventAccumulator(f"{out}/tensorboard")
    events.Reload()
    assert [e.step for e in events.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]
    assert [e.value for e in events.Scalars("train/loss")] == pytest.approx(whole.losses)
    assert [e.step for e in events.Scalars("validation/loss")] == [2, 4, 6]


def test_a_damaged_newest_one_is_passed_over_to_the_same_end(tmp_path, capsys):
    whole = tiny_train(out=str(tmp_path / "whole"))
    out = tmp_path / "run"
    broken_off(9, out=str(out), save_every=4, async_save=True)
    assert cli.main(["checkpoints", str(out)]) == 0
    file = checkpoint.latest(out) / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert [(one.step, bool(one.damage)) for one in find(out)] == [(4, False), (8, True)]
    assert cli.main(["checkpoints", str(out)]) == 1
    shown = capsys.readouterr().out.splitlines()[-3:]
    assert shown[0].startswith("* step      4")
    assert shown[0].endswith("fmlab, one device  whole")
    assert "optimizer.safetensors is damaged" in shown[1]
    assert shown[2] == "1 whole, 1 damaged; --resume goes on from step 4"
    with pytest.warns(UserWarning, match=r"optimizer\.safetensors is damaged.* goes on from step 4"):
        resumed = tiny_train(out=str(out), save_every=4, resume=True, model=tiny_model(seed=3))
    assert resumed.losses == whole.losses
    pairs = zip(resumed.model.parameters(), whole.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert cli.main(["checkpoints", str(tmp_path / "nothing")]) == 2


def test_the_tokenizer_of_a_run_is_proved_too(tmp_path):
    tiny_train(out=str(tmp_path), steps=3)
    file = checkpoint.latest(tmp_path) / "tokenizer.json"
    file.write_text(file.read_text().replace("item", "Item", 1) + " ")
    with pytest.raises(OSError, match=r"tokenizer\.json is damaged"):
        tiny_train(out=str(tmp_path), resume=True, steps=5)
    assert tiny_tokenizer().vocab_size == 300


@pytest.mark.launched
@pytest.mark.slow
def test_killed_at_random_moments(tmp_path):
    """A short form of `make soak`."""
    few = ["--kills", "4", "--files", "10", "--lines", "10", "--only", "fp16,sequence"]
    command = [sys.executable, "-m", "tests.soak", *few]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 kills" in done.stdout
