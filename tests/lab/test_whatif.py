"""The what-if panel: what it shows is the planner's, and what cannot be is said in words."""

import random
from dataclasses import replace

import pytest

from fmlab.lab import plan_panel
from fmlab.lab.whatif import TRAININGS, Choice
from fmlab.parallel import Layout
from fmlab.planner import plan


def test_shows_what_the_planner_says() -> None:
    panel = plan_panel()
    layout = Layout(data=8, zero=1, tensor=8, sequence_parallel=True, pipeline=16, micro_batches=192)
    one = plan("gpt3-175b", chip="a100-80gb", layout=layout, global_batch=1536, seq_len=2048)
    days = 95_368 * one.step_seconds / 86_400
    assert f"{one.tokens_per_second:,.0f} tokens/s, MFU {one.mfu:.1%}" in panel.summary
    # 1,024 chips in hosts of 8 that cost 27.44705 dollars an hour
    assert f"{days:,.1f} days and {days * 24 * 128 * 27.44705:,.0f} USD (on-demand, 2026" in panel.summary
    fig, _ = panel.draw(**panel.values)
    for ax, total in zip(fig.axes, (one.peak_memory / 1e9, one.step_seconds), strict=True):
        bars = [bar for bars in ax.containers for bar in bars]
        assert sum(bar.get_width() for bar in bars) == pytest.approx(total)
        assert bars[-1].get_x() + bars[-1].get_width() == pytest.approx(total)


def test_cores_are_paid_for_as_chips() -> None:
    """A trn1.32xlarge has 16 chips of two cores; a plan's ranks are cores."""
    choice = Choice("T5-3B", "trn1-core", 64, 2, 1, "fully sharded", 8)
    cost = choice.cost(choice.plan())
    assert (cost.chips, cost.usd_per_chip_hour) == (32, pytest.approx(21.5 / 16))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"chips": 64}, "one copy of the model takes 128 chips, and 64 are no multiple"),
        ({"rows": 32, "pipeline": 1}, "128 copies of the model with 32 rows at once take 4,096 rows"),
        ({"training": "Llama 3.1 8B", "pipeline": 64}, "64 stages for the 32 layers"),
        ({"training": "BERT-large", "tensor": 32, "pipeline": 1}, "cannot divide 16 heads"),
        ({"precision": "fp8"}, "no source gives a fp8 rate for a100-80gb"),
    ],
)
def test_illegal_combinations_say_why(change: dict[str, object], said: str) -> None:
    panel = plan_panel()
    panel.set(**change)
    assert panel.summary.startswith("This cannot be: ")
    assert said in panel.summary
    assert panel.picture


def test_a_fix_fits() -> None:
    choice = Choice(chips=64, pipeline=8, rows=4)
    one = choice.plan()
    assert one.fits is False
    panel = plan_panel()
    panel.set(chips=64, pipeline=8, rows=4)
    change, other = one.what_would_fit()[0]
    assert f"GB too much, most of it activations. Cheapest fix: {change}" in panel.summary
    assert other.fits


def test_every_combination_is_planned_or_refused() -> None:
    """Plans and costs alone: pictures are slow, and alike."""
    options = {name: control.options for name, control in plan_panel().controls.items()}
    draw = random.Random(0)
    planned = 0
    for _ in range(800):
        choice = replace(Choice(), **{name: draw.choice(list(values)) for name, values in options.items()})
        try:
            one = choice.plan()
        except ValueError:
            continue
        planned += 1
        run = TRAININGS[choice.training]
        assert choice.cost(one).steps == run.steps
        assert 0 < one.mfu < 1
    assert planned > 80
