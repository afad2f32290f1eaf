"""Bytes that a plan says a rank hands to collectives, beside what a meter counts on two ranks."""

from collections import Counter
from typing import Any

import pytest
import torch

from fmlab import Ranks
from fmlab.meter import traffic
from fmlab.models.families import FAMILIES, family_of
from fmlab.objectives.choice import objective_of
from fmlab.parallel import Layout, parallelize
from fmlab.planner import model_shape, plan
from fmlab.train import adamw

SMALL = 16_000  # bytes of counts, losses, norms' gradients, a divided softmax, and embeddings of CLIP's rows
TWO = dict(pipeline=2, micro_batches=2)


LENGTHS: dict[str, Any] = {"clip-tiny": dict(text=16), "unet-tiny": dict(text=11)}


def batch_for(name: str) -> dict[str, torch.Tensor]:
    """Two rows: tokens, or a picture of 32 x 32 with its caption."""
    generator = torch.Generator().manual_seed(0)
    if name not in LENGTHS:
        ids = torch.randint(5, 900, (2, 64), generator=generator)
        return dict(input_ids=ids, labels=ids)
    pictures = torch.randn(2, 3, 32, 32, generator=generator)
    if name == "clip-tiny":
        return dict(pixel_values=pictures, input_ids=torch.full((2, 16), 3))  # 3 ends a text
    text = torch.randn(2, 11, 128, generator=generator)
    return dict(pixel_values=pictures, noise_seed=torch.tensor([1, 2]), encoder_hidden_states=text)


def sent(name: str, layout: Layout, changes: dict[str, Any]) -> dict[str, int]:
    """Payload of a second step, by collective."""
    torch.manual_seed(0)
    model = family_of(name, FAMILIES).from_preset(name, **changes)
    engine = parallelize(model, layout, objective_of(model), adamw(1e-3))
    batches = [batch_for(name) for _ in range(layout.micro_batches)]
    engine.step(batches)
    with traffic() as found:
        engine.step(batches)
    engine.close()
    total: Counter[str] = Counter()
    for call in found.calls:
        total[call.op] += call.bytes
    return dict(total)


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("gpt2-tiny", dict(data=2)),
        ("gpt2-tiny", dict(data=2, zero=1)),
        ("gpt2-tiny", dict(data=2, zero=2, micro_batches=2)),
        ("gpt2-tiny", dict(data=2, zero=3, micro_batches=2)),
        ("gpt2-tiny", dict(data=2, fsdp=True, micro_batches=2)),
        ("gpt2-tiny", dict(data=2, fsdp=True, reshard=False)),
        ("gpt2-tiny", dict(tensor=2, recompute="full")),
        ("gpt2-tiny", dict(tensor=2, sequence_parallel=True)),
        ("gpt2-tiny", dict(context=2)),
        ("gpt2-tiny", dict(context=2, context_method="ulysses")),
        ("gpt2-tiny", TWO | dict(schedule="interleaved", virtual_stages=2)),
        ("gpt2-tiny", TWO | dict(schedule="zbv", virtual_stages=2)),
        ("llama-tiny", dict(tensor=2)),
        ("bert-tiny", dict(tensor=2)),
        ("t5-tiny", dict(tensor=2)),
        ("t5-tiny", TWO),
        ("mixtral-tiny", dict(tensor=2)),
        ("mixtral-tiny", dict(data=2, expert=2)),
        ("clip-tiny", dict(data=2)),
        ("clip-tiny", dict(data=2, zero=1)),
        ("clip-tiny", dict(data=2, zero=3)),
        ("clip-tiny", dict(data=2, fsdp=True)),
        ("clip-tiny", dict(tensor=2)),
        ("clip-tiny", dict(pipeline=2)),
        ("unet-tiny", dict(data=2)),
        ("unet-tiny", dict(data=2, zero=2)),
        ("unet-tiny", dict(data=2, zero=3)),
        ("unet-tiny", dict(data=2, fsdp=True)),
        ("unet-tiny", dict(data=2, fsdp=True, reshard=False, micro_batches=2)),
        ("unet-tiny", dict(tensor=2)),
        ("unet-tiny", dict(tensor=2, recompute="full")),
        ("unet-tiny", TWO),
    ],
    ids=str,
)
def test_payloads_are_those_of_an_engine(ranks2: Ranks, name: str, settings: dict[str, Any]) -> None:
    compare(ranks2, name, settings)


@pytest.mark.multirank
def test_an_output_matrix_of_its_own_is_gathered_once(ranks2: Ranks) -> None:
    """The last block is not given back between its passes."""
    compare(ranks2, "llama-tiny", dict(data=2, fsdp=True), tie_embeddings=False)


@pytest.mark.multirank
@pytest.mark.parametrize("settings", [dict(tensor=2, zero=1), TWO], ids=str)
def test_payloads_of_four_ranks(ranks4: Ranks, settings: dict[str, Any]) -> None:
    compare(ranks4, "gpt2-tiny", dict(data=2) | settings)


def compare(ranks: Ranks, name: str, settings: dict[str, Any], **changes: Any) -> None:
    """Every rank's bytes, collective by collective."""
    layout = Layout(**settings)
    batch, length = 2 * layout.data * layout.micro_batches, LENGTHS.get(name, 64)
    keeps: dict[str, Any] = dict(chip="h100", precision="fp32", states="fp32-16")
    one = plan(model_shape(name, **changes), layout=layout, global_batch=batch, seq_len=length, **keeps)
    for rank, measured in enumerate(ranks.run(sent, name, layout, changes)):
        expected: Counter[str] = Counter()
        for ways in one.payloads(rank // one.setup.stride("pipeline") % layout.pipeline).values():
            expected.update(ways)
        within = 0.1 if layout.expert > 1 else 0.01
        for collective in {*measured, *expected} - {"recv", "broadcast", "barrier"}:
            found = measured.get(collective, 0)
            assert found == pytest.approx(expected[collective], rel=within, abs=SMALL), collective


def test_a_line_is_there_where_it_takes_time() -> None:
    layout = Layout(data=4, tensor=2, pipeline=2, micro_batches=4, zero=1)
    one = plan("gpt3-1.3b", chip="h100", layout=layout, global_batch=16, seq_len=1024)
    assert set(one.payloads(0)) == {
        "tensor messages",
        "pipeline messages",
        "gradient messages",
        "tied tables",
    }
    assert plan("gpt2", chip="h100", global_batch=1, seq_len=64).payloads() == {}
    with pytest.raises(ValueError, match="legal are 0 to 1"):
        one.payloads(2)
