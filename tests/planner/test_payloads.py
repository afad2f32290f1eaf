"""Bytes that a plan says a rank hands to collectives, beside what a meter counts on two ranks."""

from collections import Counter
from typing import Any

import pytest
import torch

from fmlab import Ranks
from fmlab.meter import traffic
from fmlab.models.families import family_of
from fmlab.objectives.choice import objective_of
from fmlab.parallel import Layout, parallelize
from fmlab.planner import plan
from fmlab.train import adamw

SMALL = 16_000  # bytes of counts, losses, norms' gradients and what a divided softmax exchanges
TWO = dict(pipeline=2, micro_batches=2)


def sent(name: str, layout: Layout) -> dict[str, int]:
    """Payload of a second step, by collective."""
    torch.manual_seed(0)
    model = family_of(name).from_preset(name)
    engine = parallelize(model, layout, objective_of(model), adamw(1e-3))
    ids = torch.randint(5, 900, (2, 64), generator=torch.Generator().manual_seed(0))
    batches = [dict(input_ids=ids, labels=ids) for _ in range(layout.micro_batches)]
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
    ],
    ids=str,
)
def test_payloads_are_those_of_an_engine(ranks2: Ranks, name: str, settings: dict[str, Any]) -> None:
    layout = Layout(**settings)
    batch = 2 * layout.data * layout.micro_batches
    one = plan(
        name, chip="h100", layout=layout, global_batch=batch, seq_len=64, precision="fp32", states="fp32-16"
    )
    for rank, measured in enumerate(ranks2.run(sent, name, layout)):
        expected: Counter[str] = Counter()
        for ways in one.payloads(rank if layout.pipeline > 1 else 0).values():
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
