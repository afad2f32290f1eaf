"""Slow ranks and flipped bits are named, under every layout that has replicas."""

import time

import pytest
import torch
import torch.distributed as dist

from fmlab.meter import FlightRecorder
from fmlab.parallel import Layout
from fmlab.train import train
from fmlab.train.replicas import differences, replica_error
from fmlab.train.stragglers import EVERY, StragglerWatch
from tests.train.tiny_run import tiny_config, tiny_corpus, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.multirank


def flipped(layout, engine, rank, where):
    """Two steps with comparison, then one bit of rank `rank` is flipped; what the comparison says."""
    import fmlab.train.loop as loop

    said = []
    real = loop._step

    def step(run, result, updates):
        metrics = real(run, result, updates)
        if run.sampler.step == 2:
            assert not differences(run.engine), "equal so far"
            if dist.get_rank() == rank:
                flip(run.engine, where)
        return metrics

    loop._step = step
    try:
        config = tiny_config(steps=4, eval_every=0, layout=layout, engine=engine, compare_replicas=2)
        train(config, model=tiny_model(seed=0), tokenizer=tiny_tokenizer(), corpus=tiny_corpus())
    except ValueError as error:
        said.append(str(error))
    finally:
        loop._step = real
    return said


def flip(engine, where):
    """The lowest bit of the first number of a tensor: of a weight, of a moment, of what the model uses."""
    name, parameter = next((n, p) for n, p in engine.ledger.parameters() if p.numel() and "norm" in n)
    tensor = parameter.detach()
    if where == "moment":
        tensor = engine.optimizer.state[parameter]["exp_avg"]
    elif where == "in use":
        tensor = dict(engine.model.named_parameters())[name].detach()
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    tensor.view(-1)[:1].view(torch.int32).bitwise_xor_(1)


@pytest.mark.parametrize(
    ("layout", "engine", "where", "suspects"),
    [
        (Layout(data=4), "fmlab", "weight", "suspect rank 2"),
        (Layout(data=4), "fmlab", "moment", "suspect rank 2"),
        (Layout(data=4), "torch", "weight", "suspect rank 2"),
        (Layout(data=4, zero=1), "fmlab", "in use", "suspect rank 2"),
        (Layout(data=2, tensor=2), "fmlab", "weight", "suspect rank 2"),  # a norm is on all four
        (Layout(data=2, pipeline=2, micro_batches=2), "fmlab", "weight", "suspect ranks"),
        (Layout(data=4, fsdp=True, replicas=2), "fmlab", "weight", "suspect ranks"),
    ],
    ids=str,
)
def test_one_flipped_bit_is_named(ranks4, layout, engine, where, suspects):
    every = ranks4.run(flipped, layout, engine, 2, where)
    assert all(said == every[0] and len(said) == 1 for said in every), every
    assert "step 2: replicas differ in 1 tensors" in every[0][0]
    assert suspects in every[0][0]
    assert "norm" in every[0][0]


def slow(late):
    """Four looks of steps in which rank `late` computes longer; what each rank is told."""
    told = []
    with FlightRecorder() as flight:
        watch = StragglerWatch(flight, 0.25, dist.group.WORLD)
        for _ in range(4 * EVERY):
            time.sleep(0.02 if dist.get_rank() == late else 0.005)
            dist.all_reduce(torch.ones(4))
            told.append(watch.step())
    return [text for text in told if text]


def test_a_slow_rank_is_named_once_and_equal_ones_are_not(ranks2):
    for told in ranks2.run(slow, 1):
        assert len(told) == 1, "in the third look, and not again in the fourth"
        assert told[0].startswith("rank 1 keeps the others waiting")
        assert "all_reduce" in told[0]


def test_the_error_names_the_minority():
    from fmlab.train.replicas import Difference

    error = str(replica_error(7, [Difference("h.0.weight", ((0, 1, 3), (2,)))]))
    assert error.startswith("step 7: replicas differ in 1 tensors, suspect rank 2: h.0.weight: ranks 0-1, 3 ")
    assert "suspect ranks 0-1" in str(replica_error(7, [Difference("w", ((0,), (1,)))]))


def test_a_comparison_of_one_rank_is_said_to_be_none() -> None:
    config = tiny_config(steps=1, warmup=0, eval_every=0, compare_replicas=1)
    with pytest.warns(UserWarning, match="one rank: compare_replicas will compare nothing"):
        train(config, model=tiny_model(seed=0), tokenizer=tiny_tokenizer(), corpus=tiny_corpus())
