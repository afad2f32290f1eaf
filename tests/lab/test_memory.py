"""The memory panel's model of a step, and its cheapest fix."""

from itertools import product

import pytest
import torch

from fmlab.lab.memory import HALF, STATES, Step, cheapest, fixes, memory_panel
from fmlab.models import GPT


@pytest.mark.parametrize("name", ["gpt2", "gpt3-13b"])
def test_parameters_and_states(name: str) -> None:
    with torch.device("meta"):
        model = GPT.from_preset(name)
    assert Step(model=name).parameters == model.num_parameters()
    whole, divided = Step(model=name).terms(), Step(model=name, states="ZeRO-1 on 8 chips").terms()
    assert sum(whole[term] for term in ("weights", "gradients", "optimizer")) == 16 * model.num_parameters()
    assert divided["optimizer"] == whole["optimizer"] / 8
    assert divided["weights"] == whole["weights"]


def test_recomputation_frees_more_and_more() -> None:
    for attention in ("fused", "tables"):
        kept = [
            Step(attention=attention, recompute=how).terms()["activations"] for how in ("none", HALF, "full")
        ]
        assert kept == sorted(kept, reverse=True)
    tables = [Step(attention="tables", recompute=how).bytes for how in ("none", "selective")]
    assert tables[1] < tables[0] / 1.5


def test_the_cheapest_fix_is_not_beaten() -> None:
    step = Step(model="gpt3-1.3b", rows=32, length=2048, attention="tables")
    assert cheapest(step, step.bytes) == (step, [])
    assert cheapest(step, 1e6) is None
    for room in (60e9, 120e9, 200e9):
        found = cheapest(step, room)
        assert found is not None
        changed, chosen = found
        assert changed.bytes <= room
        price = STATES[changed.states][0], sum(fix.time for fix in chosen)
        extra = {fix.change["recompute"]: fix.time for fix in fixes(step) if "recompute" in fix.change}
        for attention, recompute, loss, states in product(
            ("tables", "fused"), ("none", HALF, "full"), ("whole", "in chunks"), STATES
        ):
            other = Step(step.model, step.rows, step.length, attention, recompute, loss, states)
            if (
                other.bytes <= room
                and sum(a != b for a, b in zip(*map(_values, (step, other)), strict=True)) <= 3
            ):
                assert (STATES[states][0], extra.get(recompute, 0.0)) >= price


def _values(step: Step) -> list[object]:
    return list(vars(step).values())


def test_panel_says_what_does_not_fit() -> None:
    panel = memory_panel()
    assert (
        "The largest is activations. Cheapest fix: the loss in chunks and half of the layers" in panel.summary
    )
    panel.set(model="gpt2", rows=8)
    assert panel.summary.endswith("It fits.")
    panel.set(model="gpt3-175b", rows=64, length=8192)
    assert "no fix here is enough" in panel.summary


def test_what_fits_is_shown_alone() -> None:
    """Fewer chips would do as well, but nobody asked."""
    panel = memory_panel()
    panel.set(model="gpt2", states="ZeRO-3 on 64 chips")
    assert panel.summary.endswith("It fits.")
    fig, _ = panel.draw(**panel.values)
    assert [label.get_text() for label in fig.axes[0].get_yticklabels()] == ["as it is"]
