"""States in the host's memory: what an engine holds there, what a plan says of it, and what it costs."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from fmlab import Ranks
from fmlab.models.families import family_of
from fmlab.objectives import CausalLM
from fmlab.parallel import Layout, parallelize
from fmlab.parallel.zero import held_bytes
from fmlab.parallel.zero.memory import HeldBytes
from fmlab.planner import Calibration, model_shape, plan
from fmlab.planner.memory import host_lines, state_lines
from fmlab.planner.setup import STATES, Setup
from fmlab.planner.stages import parameters_of, parts_of_stage
from fmlab.train import adamw
from tests.parallel import common

KNOWN = Calibration(host_link=25e9, host_memory=20e9)
SMALL: dict[str, Any] = dict(vocab_size=509, num_layers=2)


def held(layout: Layout) -> HeldBytes:
    torch.manual_seed(0)
    model = family_of("gpt2-tiny").from_preset("gpt2-tiny", **SMALL)
    engine = parallelize(model, layout, CausalLM(), adamw(1e-3))
    engine.step([common.tokens(2, [12, 5], seed=dist.get_rank())])
    found = held_bytes(engine)
    engine.close()
    return found


@pytest.mark.multirank
@pytest.mark.parametrize(
    "settings", [(1, "optimizer"), (2, "optimizer"), (3, "optimizer"), (3, "parameters")]
)
def test_states_lie_where_an_engine_has_them(ranks2: Ranks, settings: tuple[int, str]) -> None:
    zero, offload = settings
    layout = Layout(data=2, zero=zero, offload=offload)
    shape = model_shape("gpt2-tiny", **SMALL)
    one = Setup(shape, layout, 2, shape.lengths(12), states=STATES["fp32-16"], precision="fp32")
    device = state_lines(one, *parameters_of(one, parts_of_stage(shape, layout, 0)))
    host = host_lines(one, 0)
    assert device["masters"] == device["moments"] == 0
    assert device["gradients"] == (4 * shape.parameters if zero == 1 else 0)
    for found in ranks2.run(held, layout):
        assert found.host.optimizer == pytest.approx(host["masters"] + host["moments"], rel=0.02)
        assert found.device.parameters == pytest.approx(device["weights"], rel=0.02)
        if zero > 1:
            assert found.host.gradients == pytest.approx(host["gradients"], rel=0.02)


def test_the_link_and_the_hosts_memory_take_their_time() -> None:
    """GPT-2 XL on 8 chips: an eighth of 4 bytes a parameter over the link, of 30 over the host's memory."""
    settings: dict[str, Any] = dict(chip="h100", global_batch=8, seq_len=1024, calibration=KNOWN)
    own = model_shape("gpt2-xl").parameters / 8
    here = plan("gpt2-xl", layout=Layout(data=8, zero=2), **settings)
    away = plan("gpt2-xl", layout=Layout(data=8, zero=2, offload="optimizer"), **settings)
    assert away.time["host messages"].value == pytest.approx(own * 4 / 25e9)
    assert away.time["optimizer"].value == pytest.approx(own * 30 / 20e9)
    assert "host messages" not in here.time
    assert away.step_seconds > here.step_seconds
    assert here.host_memory == {}
    assert away.host_memory == pytest.approx({"gradients": 2 * own, "masters": 4 * own, "moments": 8 * own})
    saved = sum(here.memory[line].value for line in ("gradients", "masters", "moments"))
    reserve = here.memory["reserve"].value - away.memory["reserve"].value
    assert here.peak_memory - away.peak_memory == pytest.approx(saved + reserve)
    assert "in the host memory" in str(away)
    assert "bytes / 2e+10 bytes a second" in away.explain("optimizer")
    layout = Layout(data=8, zero=3, micro_batches=4, offload="parameters")
    all_away = plan("gpt2-xl", layout=layout, **settings | dict(global_batch=32))
    assert all_away.time["host messages"].value == pytest.approx(own * 4 * (2 + 2 * 2) / 25e9)
    assert "weights" not in all_away.memory


def test_it_is_refused_without_rates_and_offered_with_them() -> None:
    settings: dict[str, Any] = dict(chip="a100-40gb", global_batch=8, seq_len=1024)
    with pytest.raises(ValueError, match="Calibration\\(host_link=…, host_memory=…\\) or --host-link"):
        plan("gpt3-2.7b", layout=Layout(data=8, zero=1, offload="optimizer"), **settings)
    tight = plan("gpt3-2.7b", layout=Layout(data=8), calibration=KNOWN, **settings)
    assert tight.fits is False
    offers = [said for said, other in tight.what_would_fit() if other.fits]
    assert "offload='optimizer', zero=1" in offers
    fitted = plan("gpt3-2.7b", layout=Layout(data=8), **settings)
    assert not any("offload" in said for said, _ in fitted.what_would_fit())
