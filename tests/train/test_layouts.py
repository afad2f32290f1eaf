"""The loop under any layout: the losses, the validation and the model of one device; one rank writes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fmlab import Ranks, cli
from fmlab.backends import get_backend
from fmlab.models import GPT
from fmlab.parallel import Layout
from fmlab.train import Callback, checkpoint, setup, train
from fmlab.train.launch import World
from fmlab.train.setup import state_bytes
from tests.train.tiny_run import tiny_config, tiny_corpus, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.multirank

SETTINGS = dict(steps=4, warmup=1, eval_every=4, pack_documents=False)
TWO = {
    "tensor": Layout(tensor=2, sequence_parallel=True),
    "pipeline": Layout(pipeline=2, micro_batches=4),
    "context": Layout(context=2),
    "fsdp": Layout(data=2, fsdp=True),
    "zero3": Layout(data=2, zero=3, micro_batches=2),
}


class Watch(Callback):
    def __init__(self):
        self.steps = 0

    def on_step(self, metrics):
        self.steps += 1


def on_rank(config):
    """Train; what can be compared, what the model writes, and how many steps were shown here."""
    import torch.distributed as dist

    watch = Watch()
    seed = (
        dist.get_rank() if dist.is_initialized() else 0
    )  # other weights on each rank: the first one's count
    result = train(
        config, model=tiny_model(seed), tokenizer=tiny_tokenizer(), corpus=tiny_corpus(), callbacks=(watch,)
    )
    weights = {name: p.detach().clone() for name, p in result.model.named_parameters()}
    text = result.generate("item 7", max_new_tokens=4, greedy=True)
    return result.losses, [e.loss for _, e in result.validation], weights, text, watch.steps


def same(found, one):
    assert found[0] == pytest.approx(one[0], abs=2e-5)
    assert found[1] == pytest.approx(one[1], abs=2e-5)
    assert found[2].keys() == one[2].keys()
    for name, weight in one[2].items():
        torch.testing.assert_close(found[2][name], weight, atol=1e-3, rtol=1e-3)


@pytest.fixture(scope="module")
def one():
    return on_rank(tiny_config(**SETTINGS))


@pytest.mark.parametrize("name", list(TWO))
def test_a_layout_trains_as_one_device_and_one_rank_logs(ranks2: Ranks, one, name, tmp_path: Path) -> None:
    out = tmp_path / "run"
    ranks = ranks2.run(on_rank, tiny_config(**SETTINGS, layout=TWO[name], out=str(out)), timeout=90)
    for found in ranks:
        same(found, one)
        assert found[3] == one[3]
    assert [found[4] for found in ranks] == [4, 0]
    assert checkpoint.steps(out) == [4]
    loaded = dict(GPT.from_pretrained(out / "model").named_parameters())
    assert all(torch.equal(loaded[name], weight) for name, weight in ranks[0][2].items())


def test_a_run_goes_on_under_another_layout_and_another_number_of_ranks(
    ranks2, ranks4, one, tmp_path
) -> None:
    """Two of four steps on 2 x 2 ranks, the others on one, and on a pipeline."""
    settings = SETTINGS | dict(out=str(tmp_path), save_every=2, keep=5)
    layout = Layout(data=2, tensor=2, zero=1, micro_batches=2)
    ranks4.run(on_rank, tiny_config(**settings, layout=layout), timeout=90)
    for ranks, later in ((None, Layout()), (ranks2, Layout(pipeline=2, micro_batches=2))):
        (tmp_path / "latest").write_text("000002")
        config = tiny_config(**settings, layout=later, resume=True)
        same(on_rank(config) if ranks is None else ranks.run(on_rank, config, timeout=90)[1], one)


def test_what_cannot_be_trained_is_refused_before_the_corpus_is_read() -> None:
    for layout, message in (
        (Layout(tensor=4), r"\(2 heads\).*legal are 1, 2"),
        (Layout(pipeline=5), "GPT can be cut into 4 at most"),
        (Layout(data=2, expert=2), "GPT has no experts"),
        (Layout(data=3, tensor=2), "needs 6 ranks"),
    ):
        world = World(0, layout.world_size if layout.data < 3 else 4)
        with pytest.raises(ValueError, match=message):
            setup.prepare(tiny_config(layout=layout), world, get_backend("cpu"), model=tiny_model())


def test_the_command_line_has_every_field_of_a_layout(capsys) -> None:
    assert cli.main(["train", "gpt2-tiny", "--tensor", "2", "--sequence-parallel", "--steps", "2"]) == 2
    assert "needs 2 ranks (data=1 x tensor=2), but there are 1" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["train", "gpt2-tiny", "--pipeline", "2", "--schedule", "1f2b"])
    assert "legal are gpipe, 1f1b" in capsys.readouterr().err


def test_memory_that_a_layout_needs() -> None:
    """Rajbhandari et al. 2019, figure 1, in fp32: 16 bytes a parameter, divided more and more."""
    shown = {n: state_bytes(Layout(data=4, zero=n)) for n in range(4)}
    assert shown == {0: 16, 1: 10, 2: 7, 3: 4}
    assert state_bytes(Layout(data=4, fsdp=True, replicas=2)) == 8
    assert state_bytes(Layout(tensor=2, pipeline=2)) == 4


@pytest.mark.slow
@pytest.mark.launched
def test_torchrun_with_a_layout_from_the_command_line(tmp_path) -> None:
    args = "-m fmlab.train gpt2-tiny --steps 4 --warmup 1 --batch-size 4 --seq-len 32 --backend cpu"
    env = {k: v for k, v in os.environ.items() if k not in {"RANK", "WORLD_SIZE", "LOCAL_RANK"}}
    env["OMP_NUM_THREADS"] = "1"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    curves = []
    for launcher, layout in (([], ""), (torchrun, "--pipeline 2 --micro-batches 2")):
        out = str(tmp_path / f"run{len(curves)}")
        command = [sys.executable, *launcher, *args.split(), *layout.split(), "--out", out]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=180)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("A sample") == 1, "one rank prints"
        curves.append(json.loads((checkpoint.latest(out) / "run.json").read_text())["losses"])
    assert curves[1] == pytest.approx(curves[0], abs=1e-5)
