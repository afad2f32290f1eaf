"""Many ranks do the training of one: same losses, disjoint data, one checkpoint for any number of ranks."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch

from fmlab import storage
from fmlab.backends import get_backend
from fmlab.data import TokenSampler, encode, evaluation_batches
from fmlab.objectives import CausalLM
from fmlab.parallel import Layout
from fmlab.train import checkpoint, evaluate, train
from fmlab.train.launch import World, step_seed
from tests.train.tiny_run import tiny_config, tiny_corpus, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.multirank


def on_rank(config, dropout=0.0):
    """Train and return what can be compared; every rank starts from its own weights on purpose."""
    import torch.distributed as dist

    model = tiny_model(seed=dist.get_rank() if dist.is_initialized() else 0, dropout=dropout)
    result = train(config, model=model, tokenizer=tiny_tokenizer(), corpus=tiny_corpus())
    weights = {name: p.detach().clone() for name, p in result.model.named_parameters()}
    return result.losses, [e.loss for _, e in result.validation], weights


@pytest.mark.parametrize("engine", ["fmlab", "torch"])
def test_two_ranks_follow_the_curve_of_one(ranks2, engine):
    """Packed documents, so that ranks and micro-batches hold different numbers of targets."""
    settings = dict(steps=6, eval_every=3, engine=engine, pack_documents=True)
    config = tiny_config(**settings, layout=Layout(micro_batches=2))
    losses, validation, _ = on_rank(config)
    first, second = ranks2.run(on_rank, config)
    for theirs in (first, second):
        assert theirs[0] == pytest.approx(losses, abs=2e-5)
        assert theirs[1] == pytest.approx(validation, abs=2e-5)
    assert all(torch.equal(first[2][name], second[2][name]) for name in first[2])


def test_a_checkpoint_of_two_ranks_goes_on_with_one(ranks2, tmp_path):
    whole, _, _ = on_rank(tiny_config())
    settings = dict(out=str(tmp_path), save_every=4, keep=5)
    ranks2.run(on_rank, tiny_config(**settings))
    (tmp_path / "latest").write_text("000004")
    losses, _, _ = on_rank(tiny_config(**settings, resume=True))
    assert losses == pytest.approx(whole, abs=2e-5)


def evaluated(share):
    """The validation loss over this world, with the rows of this rank."""
    import torch.distributed as dist

    world = World(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else World()
    tokens = encode(tiny_corpus(), tiny_tokenizer())
    tokens = type(tokens)(tokens.ids[: 16 * 13 + 5], tokens.borders, tokens.end_of_text, "cut")
    batches = evaluation_batches(tokens, 16, share, world.rank, world.size)
    result = evaluate(tiny_model(), batches, CausalLM(), get_backend("cpu"), world=world)
    return result.loss, result.count


def test_evaluation_over_ranks_counts_each_token_once(ranks2):
    """13 whole windows and a bit, in batches of 4: the last batch is not full on any number of ranks."""
    loss, count = evaluated(4)
    assert count == 16 * 13 + 4
    for theirs in ranks2.run(evaluated, 4):
        assert theirs[1] == count
        assert theirs[0] == pytest.approx(loss, abs=1e-6)


def first_batch(_):
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    tokens = encode(tiny_corpus(), tiny_tokenizer())
    return TokenSampler(tokens, 16, 8, 0, rank, size).batch(0)["input_ids"], step_seed(0, 0, rank)


def test_ranks_read_different_rows_and_draw_different_dropout(ranks2):
    (a, seed_a), (b, seed_b) = ranks2.run(first_batch, None)
    assert len(a) == len(b) == 4
    assert not any(torch.equal(x, y) for x in a for y in b)
    assert seed_a != seed_b


def disk_full(config):
    """The first rank cannot write; what each rank raises."""
    import torch.distributed as dist

    from fmlab.storage import StorageError

    real = storage.enter_files

    def full(*_):
        raise StorageError(28, "the disk is full")

    if dist.get_rank() == 0:
        storage.enter_files = full
    try:
        on_rank(config)
    except StorageError as error:
        return str(error)
    finally:
        storage.enter_files = real
    return "nothing"


def test_a_full_disk_on_the_writing_rank_is_raised_on_all(ranks2, tmp_path):
    answers = ranks2.run(disk_full, tiny_config(steps=3, out=str(tmp_path)))
    assert all("disk is full" in answer for answer in answers)
    assert list((tmp_path / "steps").iterdir()) == []


def refused(config):
    try:
        on_rank(config)
    except ValueError as error:
        return str(error)
    return "nothing"


def test_wrong_input_is_raised_on_every_rank_before_work(ranks2, tmp_path):
    assert all("7 rows" in text for text in ranks2.run(refused, tiny_config(batch_size=7)))
    resume = tiny_config(resume=True, out=str(tmp_path))
    assert all("no checkpoint" in text for text in ranks2.run(refused, resume))
    wrong = tiny_config(layout=Layout(data=4))
    assert all("needs 4 ranks" in text for text in ranks2.run(refused, wrong))


@pytest.mark.slow
@pytest.mark.launched
def test_torchrun_and_one_process_do_the_same_training(tmp_path):
    args = "-m fmlab.train gpt2-tiny --steps 6 --warmup 2 --batch-size 4 --seq-len 32 --backend cpu --out"
    env = {k: v for k, v in os.environ.items() if k not in {"RANK", "WORLD_SIZE", "LOCAL_RANK"}}
    env["OMP_NUM_THREADS"] = "1"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    curves = []
    for launcher in ([], torchrun):
        out = str(tmp_path / f"run{len(curves)}")
        command = [sys.executable, *launcher, *args.split(), out]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=180)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("A sample") == 1, "one rank prints"
        curves.append(json.loads((checkpoint.latest(out) / "run.json").read_text())["losses"])
    assert len(curves[0]) == 6
    assert curves[1] == pytest.approx(curves[0], abs=1e-5)


@pytest.mark.parametrize(
    ("n", "engine", "layout"),
    [
        (4, "torch", Layout(data=4)),  # whose buckets change after the first step of a process
        (2, "torch", Layout(data=2, zero=2)),  # whose weights are divided between steps
        (2, "fmlab", Layout(data=2, fsdp=True)),
    ],
)
def test_a_run_that_stopped_ends_with_the_same_files(ranks2, ranks4, n, engine, layout, tmp_path):
    """Written beside the steps, so that no rank sends anything for it meanwhile."""
    settings = dict(
        steps=4, eval_every=2, save_every=2, keep=3, engine=engine, layout=layout, async_save=True
    )
    ranks = {2: ranks2, 4: ranks4}[n]
    a, b = tmp_path / "a", tmp_path / "b"
    whole = ranks.run(on_rank, tiny_config(**settings, out=str(a)), 0.1, timeout=90)
    shutil.copytree(a, b)
    (b / "latest").write_text("000002")
    resumed = ranks.run(on_rank, tiny_config(**settings, out=str(b), resume=True), 0.1, timeout=90)
    assert [found[:2] for found in resumed] == [found[:2] for found in whole]
    ends = [storage.read_manifest(checkpoint.latest(out)) for out in (a, b)]
    for name in ends[0].keys() - {"run.json"}:  # which has the path of the folder
        assert ends[0][name] == ends[1][name], name
