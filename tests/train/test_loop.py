"""The loop: it learns, it resumes to the bit, it does not care about micro-batches, it refuses bad input."""

import gc
import json
import math
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fmlab import cli, storage
from fmlab.backends import get_backend
from fmlab.data import ByteBPE
from fmlab.models import GPT
from fmlab.parallel import Layout
from fmlab.storage import StorageError
from fmlab.train import Callback, TrainConfig, checkpoint, setup, train
from fmlab.train import __main__ as command_line
from fmlab.train.__main__ import main
from fmlab.train.callbacks import Progress
from fmlab.train.launch import World
from tests.train.tiny_run import SEQ, VOCAB, tiny_config, tiny_corpus, tiny_model, tiny_tokenizer, tiny_train


class Recorder(Callback):
    def __init__(self):
        self.events, self.metrics = [], []

    def on_start(self, run):
        self.events.append("start")
        self.run = run

    def on_step(self, metrics):
        self.metrics.append(metrics)
        self.events.append("step")

    def on_evaluation(self, step, evaluation):
        self.events.append(f"evaluation {step}")

    def on_checkpoint(self, step, path):
        self.events.append(f"checkpoint {step}")

    def on_end(self, result):
        self.events.append("end" if result else "broken off")


def same_weights(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def test_it_learns_from_ln_v_downwards_and_reports_what_happens(tmp_path):
    watcher = Recorder()
    out = str(tmp_path / "run")
    result = tiny_train(steps=40, eval_every=20, save_every=30, out=out, callbacks=(watcher,))
    assert result.losses[0] == pytest.approx(math.log(VOCAB), abs=0.1)
    assert result.losses[-1] < 3.0
    assert result.validation[-1][1].loss < 3.0
    kinds = [event for event in watcher.events if event != "step"]
    assert kinds == ["start", "evaluation 20", "checkpoint 30", "evaluation 40", "checkpoint 40", "end"]
    assert watcher.run.tokens_per_step == 8 * SEQ
    assert watcher.metrics[-1].lr == pytest.approx(1e-3)
    assert [m.step for m in watcher.metrics] == list(range(1, 41))

    loaded = GPT.from_pretrained(tmp_path / "run" / "model")
    tokenizer = ByteBPE.load(tmp_path / "run" / "model")
    assert same_weights(loaded, result.model)
    ids = torch.tensor([tokenizer.encode("item 7 comes before item")])
    torch.testing.assert_close(loaded.eval()(ids).logits, result.model.eval()(ids).logits)


def test_the_same_settings_give_the_same_run_and_another_seed_another():
    first, again = tiny_train(dropout=0.1), tiny_train(dropout=0.1)
    assert first.losses == again.losses
    assert same_weights(first.model, again.model)
    assert tiny_train(dropout=0.1, seed=1).losses != first.losses


def test_ten_steps_equal_five_and_five_more_to_the_bit(tmp_path):
    """With dropout, so that the random state counts too; the model that goes on starts from other weights."""
    whole = tiny_train(dropout=0.2, out=str(tmp_path / "whole"))

    class Stop(Callback):
        def on_step(self, metrics):
            if metrics.step == 6:
                raise KeyboardInterrupt

    out = str(tmp_path / "parts")
    with pytest.raises(KeyboardInterrupt):
        tiny_train(dropout=0.2, out=out, save_every=5, callbacks=(Stop(),))
    resumed = tiny_train(model=tiny_model(seed=99, dropout=0.2), out=out, save_every=5, resume=True)
    assert resumed.losses == whole.losses
    assert same_weights(resumed.model, whole.model)
    files = [checkpoint.latest(tmp_path / name) / "optimizer.safetensors" for name in ("whole", "parts")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert checkpoint.steps(out) == [5, 10]


def test_losses_do_not_depend_on_micro_batches():
    one = tiny_train(pack_documents=True)  # packed: micro-batches have different numbers of targets
    four = tiny_train(pack_documents=True, layout=Layout(micro_batches=4))
    assert four.losses == pytest.approx(one.losses, abs=2e-5)


def test_bf16_follows_fp32():
    fp32, bf16 = tiny_train(steps=20), tiny_train(steps=20, layout=Layout(precision="bf16"))
    assert bf16.losses != fp32.losses
    assert bf16.losses == pytest.approx(fp32.losses, abs=0.1)
    assert all(p.dtype == torch.float32 for p in bf16.model.parameters())


def test_no_logits_and_no_graph_outlive_a_step():
    def count():
        gc.collect()
        tensors = [o for o in gc.get_objects() if type(o) is torch.Tensor]
        logits = sum(t.dim() >= 2 and t.shape[-1] == VOCAB for t in tensors)
        return logits, sum(t.grad_fn is not None for t in tensors)

    alive = []

    class Look(Callback):
        def on_step(self, metrics):
            alive.append(count())

    before = count()  # what other tests of this process have left
    tiny_train(steps=4, callbacks=(Look(),))
    assert alive == [before] * 4


def test_retention_keeps_the_newest(tmp_path):
    tiny_train(out=str(tmp_path), save_every=2, keep=3)
    assert checkpoint.steps(tmp_path) == [6, 8, 10]
    assert checkpoint.latest(tmp_path).name == "000010"
    state = json.loads((checkpoint.latest(tmp_path) / "run.json").read_text())
    assert state["step"] == 10
    assert state["settings"]["lr"] == 1e-2


def test_going_back_to_an_earlier_checkpoint_drops_the_later_ones(tmp_path):
    whole = tiny_train(out=str(tmp_path), save_every=2, keep=5)
    assert checkpoint.steps(tmp_path) == [2, 4, 6, 8, 10]
    (tmp_path / "latest").write_text("000004")
    tiny_train(out=str(tmp_path), save_every=2, keep=2, resume=True, steps=6)
    assert checkpoint.steps(tmp_path) == [4, 6]
    assert checkpoint.latest(tmp_path).name == "000006"
    (tmp_path / "latest").write_text("000004")
    again = tiny_train(out=str(tmp_path), save_every=2, keep=2, resume=True)
    assert again.losses == whole.losses


def test_a_full_disk_at_a_checkpoint_keeps_the_run_resumable(tmp_path, monkeypatch):
    whole = tiny_train(out=str(tmp_path / "whole"))
    out = tmp_path / "run"
    real = storage.enter_files

    def full(folder, *others):
        if "000010" in str(folder):
            raise StorageError(28, "the disk is full")
        real(folder, *others)

    monkeypatch.setattr(storage, "enter_files", full)
    with pytest.raises(StorageError, match="disk is full"):
        tiny_train(out=str(out), save_every=5)
    assert [p.name for p in (out / "steps").iterdir()] == ["000005"]
    monkeypatch.undo()
    resumed = tiny_train(out=str(out), save_every=5, resume=True)
    assert resumed.losses == whole.losses
    assert same_weights(resumed.model, whole.model)


def test_a_checkpoint_of_another_model_is_refused_by_name(tmp_path):
    tiny_train(out=str(tmp_path), steps=3)
    other = tiny_model(vocab_size=VOCAB + 1)
    with pytest.raises(ValueError, match=r"blocks\.0\.tokens\.weight"):
        tiny_train(out=str(tmp_path), resume=True, model=other)
    with pytest.raises(ValueError, match="seed: 0 in the checkpoint, 5 now"):
        tiny_train(out=str(tmp_path), resume=True, seed=5)
    with pytest.raises(ValueError, match="has done 3 steps already"):
        tiny_train(out=str(tmp_path), resume=True, steps=3)
    with pytest.raises(ValueError, match="holds a run already, with checkpoints up to step 3"):
        tiny_train(out=str(tmp_path))
    file = checkpoint.latest(tmp_path) / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(StorageError, match=r"model\.safetensors is damaged"):
        tiny_train(out=str(tmp_path), resume=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_len": 33}, "longer than the model's 32 positions"),
        ({"batch_size": 6, "layout": Layout(micro_batches=4)}, "cannot be cut"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"steps": 2.5}, "steps must be a whole number, got 2.5"),
        ({"keep": None}, "keep must be a whole number, got None"),
        ({"clip": "1"}, "clip must be a number, got '1'"),
        ({"resume": "no"}, "resume must be True or False, got 'no'"),
        ({"layout": {"data": 2}}, "layout must be a fmlab.parallel.Layout"),
        ({"warmup": 10}, "warmup must be 0 to 9, got 10"),
        ({"lr": 0.0}, "lr must be above 0"),
        ({"lr": float("inf")}, "lr must be above 0 and finite"),
        ({"seed": -1}, "seed must be 0 or more"),
        ({"beta2": 1.0}, "beta2 must be at least 0 and below 1"),
        ({"validation": 0.0}, "validation must be above 0"),
        ({"resume": True}, "resume needs a folder"),
        ({"tensorboard": True}, "tensorboard needs a folder"),
        ({"backend": "gpu"}, "unknown backend 'gpu'; legal: auto, cpu"),
        ({"engine": "torhc"}, "no engine 'torhc'"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes, message):
    watcher = Recorder()
    with pytest.raises(ValueError, match=message):
        tiny_train(callbacks=(watcher,), **changes)
    assert watcher.events == []


def test_settings_of_other_libraries_can_be_written_down(tmp_path, monkeypatch):
    """A checkpoint holds them as JSON: what json cannot write would be met after the first steps."""
    given = TrainConfig(out=tmp_path, steps=np.int64(20), lr=np.float32(0.5), layout=Layout(data=np.int64(2)))
    assert json.loads(json.dumps(given.to_dict()))["out"] == str(tmp_path)
    assert given == TrainConfig(out=str(tmp_path), steps=20, lr=0.5, layout=Layout(data=2))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert TrainConfig(out="~/run").out == str(tmp_path / "run")


def test_what_only_one_rank_meets_is_told_with_its_number(monkeypatch, capsys):
    def absent(**_):
        raise ValueError("no corpus here")

    monkeypatch.setattr(command_line, "main", absent)
    monkeypatch.setattr(command_line, "_FIRST_SPEAKS", 0)
    monkeypatch.setenv("RANK", "3")
    assert command_line.run() == 2
    assert capsys.readouterr().err == "fmlab: train: rank 3: no corpus here\n"


def test_presets_corpora_vocabularies_and_folders_that_cannot_work(tmp_path):
    with pytest.raises(ValueError, match=r"Did you mean 'gpt2-tiny'"):
        train(TrainConfig(model="gpt2-tny"))
    with pytest.raises(ValueError, match="unknown corpus 'pyton-docs'"):
        train(TrainConfig(corpus="pyton-docs"))
    with pytest.raises(ValueError, match="tokenizer has 300 tokens and the model only 280"):
        tiny_train(model=tiny_model(vocab_size=280))
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="cannot write to"):
        tiny_train(out=str(tmp_path / "file" / "run"))
    with pytest.raises(ValueError, match="no checkpoint in"):
        tiny_train(out=str(tmp_path / "empty"), resume=True)
    with pytest.raises(StorageError, match="are needed"):
        checkpoint.check_space(tmp_path, 10**15, 2)


def test_a_model_too_large_to_train_is_refused_before_it_is_built():
    with pytest.raises(ValueError, match=r"takes at least 2793\.\d GB .* free; choose a smaller model"):
        train(TrainConfig(model="gpt3-175b"))


def test_a_second_run_in_the_same_folder_is_refused_and_the_first_goes_on(tmp_path):
    alone = tiny_train(out=str(tmp_path / "alone"))
    refused = []

    class Intruder(Callback):
        def on_step(self, metrics):
            if metrics.step == 3:
                with pytest.raises(StorageError, match="another run is writing to"):
                    tiny_train(out=str(tmp_path / "shared"), seed=1)
                refused.append(metrics.step)

    first = tiny_train(out=str(tmp_path / "shared"), callbacks=(Intruder(),))
    assert refused == [3]
    assert first.losses == alone.losses
    tiny_train(out=str(tmp_path / "shared"), resume=True, steps=11)  # and the folder is free again


def test_a_killed_run_goes_on_to_the_same_end_and_leaves_no_rubbish(tmp_path):
    whole = tiny_train(out=str(tmp_path / "whole"))
    out = tmp_path / "run"
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(out)], check=False, cwd=Path(__file__).parents[2]
    )
    assert killed.returncode == -signal.SIGKILL
    assert any(path.name.startswith(".") for path in (out / "steps").iterdir())
    shutil.copytree(out / "steps" / "000003", out / "steps" / "000003 (copy)")  # the learner's
    (out / "latest").write_bytes(b"\xff\x00damaged")
    resumed = tiny_train(out=str(out), save_every=3, resume=True)
    assert resumed.losses == whole.losses
    assert same_weights(resumed.model, whole.model)
    assert sorted(p.name for p in (out / "steps").iterdir()) == ["000003 (copy)", "000009", "000010"]


KILLED = """
import os, signal, sys
from fmlab.storage import tensors
from tests.train.tiny_run import tiny_train
write = tensors._write
def write_and_die(file, content):
    entry = write(file, content)
    if "000006" in str(file):
        os.kill(os.getpid(), signal.SIGKILL)
    return entry
tensors._write = write_and_die
tiny_train(out=sys.argv[1], save_every=3)
"""


def test_two_ranks_need_a_batch_that_divides():
    with pytest.raises(ValueError, match="data x micro_batches"):
        setup.prepare(tiny_config(batch_size=7), World(0, 2), get_backend("cpu"), model=tiny_model())


def test_tensorboard_files_hold_the_losses(tmp_path):
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs: pip install '.[log]'"
    )
    result = tiny_train(steps=3, warmup=1, eval_every=3, out=str(tmp_path), tensorboard=True)
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [e.value for e in events.Scalars("train/loss")] == pytest.approx(result.losses)
    assert [e.step for e in events.Scalars("validation/loss")] == [3]


def test_the_command_trains_shows_text_and_refuses_in_one_line(capsys):
    assert main(["gpt2-tiny", "--steps", "2", "--batch-size", "2", "--seq-len", "16"]) == 0
    out = capsys.readouterr().out
    assert "1,350,400 parameters" in out
    assert "step      2: loss" in out
    assert 'The "with" statement' in out
    assert cli.main(["train", "gpt2-tiny", "--seq-len", "512"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("fmlab: train: seq_len 512")
    assert err.count("\n") == 1
    module = [sys.executable, "-m", "fmlab.train", "gpt2-tiny", "--seq-len", "512"]
    ran = subprocess.run(module, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (2, err)


def test_a_bar_where_someone_watches_and_lines_elsewhere(capsys):
    for interactive in (True, False):
        tiny_train(steps=4, callbacks=(Progress(2, interactive),))
        out, err = capsys.readouterr()
        assert ("4/4" in err) is interactive
        assert ("step      2: loss" in out) is not interactive
        assert "4 steps in" in out


def test_a_run_that_breaks_tells_its_watchers():
    class Break(Recorder):
        def on_step(self, metrics):
            raise RuntimeError("in the callback")

    watcher = Break()
    with pytest.raises(RuntimeError, match="in the callback"):
        tiny_train(callbacks=(watcher,))
    assert watcher.events == ["start", "broken off"]


def test_the_corpus_is_the_one_the_helpers_promise():
    assert tiny_tokenizer().vocab_size == VOCAB
    assert len(tiny_corpus().documents) == 20
