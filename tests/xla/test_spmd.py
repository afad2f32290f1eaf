"""One program on eight virtual devices: data, tensor and fully sharded, each equal to one device."""

import pytest
import torch

from fmlab.models import GPT
from fmlab.models.plan import ParallelPlan
from fmlab.parallel.spmd import SPMDReport, spmd_parity

MESHES = {"data": {"data": 8}, "tensor": {"data": 2, "model": 4}, "fsdp": {"data": 8}}


def model() -> GPT:
    from fmlab.models import GPT

    return GPT.from_preset("gpt2-tiny", num_layers=2, hidden_size=64, num_heads=4, vocab_size=512)


@pytest.fixture(scope="module")
def reports() -> dict[str, SPMDReport]:
    torch.manual_seed(1)
    tokens = torch.randint(512, (16, 33))
    batch = {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
    return spmd_parity(model, batch, MESHES)


@pytest.mark.parametrize("name", MESHES)
def test_loss_and_every_gradient_are_those_of_one_device(reports: dict[str, SPMDReport], name: str) -> None:
    report = reports[name]
    assert report.loss == pytest.approx(report.reference, rel=1e-6)
    assert report.worst < 5e-6, report.worst_name


def test_the_compiler_puts_in_the_collectives_of_each_strategy(reports: dict[str, SPMDReport]) -> None:
    parameters = len(list(model().parameters()))
    data, tensor, fsdp = (reports[name] for name in MESHES)
    assert data.sharded == (0, parameters)
    assert data.collectives["all-reduce"] >= parameters, "each gradient is summed"
    assert tensor.collectives["all-reduce"] > data.collectives["all-reduce"], "and two a layer each way"
    assert fsdp.sharded == (parameters, parameters)
    assert fsdp.collectives["all-gather"] > data.collectives.get("all-gather", 0), "weights are gathered"


def test_tensor_parallel_follows_the_models_own_plan(reports: dict[str, SPMDReport]) -> None:
    one = model()
    plan: ParallelPlan = one.parallel_plan()
    divided = [name for name, _ in one.named_parameters() if plan.rule(name).kind != "replicate"]
    assert reports["tensor"].sharded[0] == len(divided)


def test_what_cannot_be_is_refused_before_a_process_starts() -> None:
    with pytest.raises(ValueError, match="strategy 'pipeline': legal are data, tensor, fsdp"):
        spmd_parity(model, {}, {"pipeline": {"data": 8}})
    with pytest.raises(ValueError, match="the same number of devices"):
        spmd_parity(model, {}, {"data": {"data": 8}, "fsdp": {"data": 4}})
