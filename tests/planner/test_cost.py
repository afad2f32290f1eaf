"""Cost, goodput, budgets: values that papers print, and a formula against a simulation of what it is of."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fmlab.chips import chip, host
from fmlab.planner.budget import chinchilla, chinchilla_loss, training_flops
from fmlab.planner.cli import main
from fmlab.planner.cost import rated_watts, run_cost, training_days
from fmlab.planner.goodput import LLAMA3, Failures, goodput_at, optimal_interval
from fmlab.planner.published import runs
from fmlab.planner.search import search

# Narayanan et al. 2021 (arXiv:2104.04473), table 2: parameters, GPUs, TFLOP/s a GPU, days for 300e9 tokens.
# Their days follow from 8 x tokens x parameters / (GPUs x rate), which is about 2 % less than they print.
SC21 = [
    (174.6e9, 384, 153, 84),
    (174.6e9, 768, 149, 43),
    (174.6e9, 1536, 141, 23),
    (529.6e9, 560, 171, 156),
    (529.6e9, 1120, 167, 80),
    (529.6e9, 2240, 159, 42),
]


@pytest.mark.parametrize(("parameters", "gpus", "tflops", "printed"), SC21)
def test_days_of_sc21(parameters: float, gpus: int, tflops: float, printed: float) -> None:
    got = training_days(8 / 6 * training_flops(parameters, 300e9), gpus, tflops * 1e12)
    assert got == pytest.approx(printed, rel=0.03)
    assert got < printed


def test_flops_of_gpt3_and_its_relatives() -> None:
    assert training_flops(174.6e9, 300e9) == pytest.approx(3.14e23, rel=0.002)
    # Table D.1 of Brown et al. 2020: petaflop/s-days
    assert training_flops(174.6e9, 300e9) / (1e15 * 86_400) == pytest.approx(3640, rel=0.002)
    for run in runs(group="GPT-3 Table D.1 (training FLOPs)"):
        if run.tokens and run.params and not run.model.startswith("T5"):
            assert training_flops(run.params, run.tokens) == pytest.approx(run.total_flops, rel=0.01), run.id


def test_a_run_priced_by_hand() -> None:
    # 22 billion tokens at 2048 x 64 a step of 13.75 s on 60 chips of hosts with 8
    one = run_cost(13.75, 131_072, 22e9, chips=60, host="p4de.24xlarge")
    assert one.steps == 167_847  # 167,846.7: the last step is run whole
    assert one.tokens == 167_847 * 131_072
    assert one.days == pytest.approx(167_847 * 13.75 / 86_400)
    assert one.chips_paid == 64
    assert one.usd == pytest.approx(27.44705 * 8 * one.seconds / 3600)
    assert one.price is host("p4de.24xlarge").prices[0]
    assert "on-demand, us-east-1, 2026-07-20" in str(one)
    block = run_cost(13.75, 131_072, 22e9, chips=64, host="p4d.24xlarge", price="capacity block")
    assert block.usd == pytest.approx(14.75 * 8 * block.seconds / 3600)
    own = run_cost(13.75, 131_072, 22e9, chips=60, usd_per_chip_hour=1.5)
    assert own.usd == pytest.approx(60 * 1.5 * own.seconds / 3600)
    assert own.usd_per_million_tokens == pytest.approx(own.usd / own.tokens * 1e6)
    assert "your price" in str(own)


def test_energy_from_a_power_that_is_known() -> None:
    # PaLM: 8,404,992 chip hours at 378.5 W are 3,181 MWh; its authors count 8 % on top for the data centre
    palm = next(run for run in runs() if run.id == "palm-540B-detail")
    one = run_cost(
        3600, 1, palm.chip_hours, chips=1, watts_per_chip=rated_watts(chip("tpu-v4")), overhead=1.08
    )
    assert one.kwh == pytest.approx(palm.chip_hours * 0.3785 * 1.08)
    assert rated_watts(chip("a100-80gb")) == 400
    with pytest.raises(ValueError, match="no source gives 'power' for trn1"):
        rated_watts(chip("trn1"))


def test_failures_stretch_a_run_and_its_price() -> None:
    plain, slowed = (run_cost(10, 1000, 1e6, 8, usd_per_chip_hour=1, goodput=share) for share in (1, 0.8))
    assert slowed.seconds == plain.seconds / 0.8
    assert slowed.usd == pytest.approx(plain.usd / 0.8)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"step_seconds": 0}, "above 0"),
        ({"step_seconds": float("nan")}, "above 0"),
        ({"tokens": -1}, "above 0"),
        ({"chips": 2.5}, "whole number"),
        ({"tokens_per_step": 0}, "whole number"),
        ({"goodput": 1.2}, "share above 0 and up to 1"),
        ({"overhead": 0.9}, "1 or more"),
        ({"host": "p9.huge"}, "unknown host"),
        ({"price": "on-demand"}, "give host= too"),
        ({"host": "p4d.24xlarge", "price": "spot"}, "no price of p4d.24xlarge of the kind spot"),
        ({"host": "trn2.48xlarge"}, "no price of trn2.48xlarge"),
        ({"host": "p4d.24xlarge", "price": "on-demand", "usd_per_chip_hour": 1.0}, "one of them"),
        ({"watts_per_chip": 0}, "watts above 0"),
    ],
)
def test_what_cannot_be_priced_is_refused(change: dict[str, object], says: str) -> None:
    plain: dict[str, object] = {"step_seconds": 1.0, "tokens_per_step": 1024, "tokens": 1e9, "chips": 8}
    with pytest.raises(ValueError, match=says):
        run_cost(**{**plain, **change})  # type: ignore[arg-type]


# Daly 2006, captions of figures 3 to 5: checkpoints of 5 minutes, failures every 24 h, 6 h and 15 min
@pytest.mark.parametrize(("mean", "best"), [(24 * 60, 117), (6 * 60, 57), (15, 9.1)])
def test_dalys_best_intervals(mean: float, best: float) -> None:
    assert optimal_interval(5 * 60, mean * 60) / 60 == pytest.approx(best, rel=0.006)
    assert optimal_interval(5 * 60, mean * 60, "young") == pytest.approx(60 * (10 * mean) ** 0.5)


@given(st.floats(1, 600), st.floats(3600, 1e6), st.floats(0, 1800))
def test_no_other_interval_is_much_better(checkpoint: float, mean: float, restart: float) -> None:
    best = goodput_at(optimal_interval(checkpoint, mean), checkpoint, mean, restart)
    assert 0 < best.share < 1
    assert best.share + best.checkpoints + best.lost == pytest.approx(1)
    for factor in (0.5, 0.8, 1.25, 2):
        other = goodput_at(factor * optimal_interval(checkpoint, mean), checkpoint, mean, restart)
        assert other.share < best.share + 1e-4


def test_goodput_is_what_a_simulated_run_reaches() -> None:
    interval, checkpoint, restart, mean = 1800.0, 120.0, 300.0, 4 * 3600.0
    rng, clock, segments = random.Random(7), 0.0, 4000
    for _ in range(segments):
        while (fails := rng.expovariate(1 / mean)) < interval + checkpoint:
            clock += fails
            while (again := rng.expovariate(1 / mean)) < restart:
                clock += again
            clock += restart
        clock += interval + checkpoint
    assert segments * interval / clock == pytest.approx(
        goodput_at(interval, checkpoint, mean, restart).share, rel=0.01
    )


def test_llama3_was_interrupted_every_three_hours() -> None:
    assert LLAMA3.mean_hours(16_384) == pytest.approx(3.1, rel=0.01)
    assert LLAMA3.mean_seconds(1) == 3600 * LLAMA3.chip_hours
    mean = LLAMA3.mean_seconds(16_384)  # they kept more than 90 % of the time: so do checkpoints of 20 s
    assert goodput_at(optimal_interval(20, mean), 20, mean, restart=300).share > 0.9


def test_what_never_ends_or_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="such a segment never ends; checkpoint more often"):
        goodput_at(interval=1e6, checkpoint=60, mean_time=1000)
    with pytest.raises(ValueError, match="above 0"):
        optimal_interval(0, 3600)
    with pytest.raises(ValueError, match="legal are daly, young"):
        optimal_interval(60, 3600, "best")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="0 or more"):
        goodput_at(60, 5, 3600, restart=-1)
    with pytest.raises(ValueError, match="above 0"):
        Failures(chip_hours=-5)


def test_budgets_like_chinchillas() -> None:
    # nanoGPT's scaling_laws.ipynb searches a grid: 316 million parameters on 11.65 billion tokens
    small = chinchilla(2.21e19)
    assert small.parameters == pytest.approx(316e6, rel=0.04)
    assert small.tokens == pytest.approx(11.65e9, rel=0.04)
    # Chinchilla itself: 70 billion parameters, 1.4 trillion tokens, by the first two approaches' proportion
    big = chinchilla(training_flops(70e9, 1.4e12), rule="20 tokens a parameter")
    assert (big.parameters, big.tokens) == (pytest.approx(70e9), pytest.approx(1.4e12))
    assert "70 billion parameters on 1400 billion tokens (20 a parameter" in str(big)
    assert chinchilla_loss(70e9, 1.4e12) < chinchilla_loss(280e9, 300e9)  # as they found: better than Gopher


@given(st.floats(1e16, 1e27))
def test_the_fits_optimum_is_one(flops: float) -> None:
    best = chinchilla(flops)
    assert 6 * best.parameters * best.tokens == pytest.approx(flops)
    for factor in (0.9, 1.1):
        assert chinchilla_loss(best.parameters * factor, best.tokens / factor) > best.loss


@pytest.mark.parametrize("flops", [0, -1, float("inf"), True])
def test_no_budget_is_refused(flops: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        chinchilla(flops)


def test_days_and_dollars_from_the_shell(capsys: pytest.CaptureFixture[str]) -> None:
    step = ["gpt2", "--host", "p4de.24xlarge", "--chips", "8", "--global-batch", "64"]
    step += ["--seq-len", "1024", "--micro-batches", "8"]
    assert main([*step, "--tokens", "1e9", "--goodput", "0.9"]) == 0
    said = capsys.readouterr().out
    assert "15,259 steps, 1.0 billion tokens" in said
    assert "USD at 3.43 a chip and hour (on-demand, us-east-1, 2026-07-20)" in said
    assert main([*step, "--tokens", "1e9", "--usd-per-chip-hour", "2"]) == 0
    assert "your price" in capsys.readouterr().out
    with pytest.raises(ValueError, match="give --tokens too"):
        main([*step, "--goodput", "0.9"])


def test_ranks_that_are_cores_are_bought_by_the_chip() -> None:
    """A trn1.32xlarge is 16 chips, 32 ranks and one price."""
    found = search(
        "llama2-7b", chip="trn1-core", host="trn1.32xlarge", hosts=1, global_batch=64, seq_len=4096, keep=1
    )
    assert found.best.chips == 32
    assert found.wanted.usd(32, 3600) == pytest.approx(host("trn1.32xlarge").prices[0].usd_per_hour)
    assert found.best.machine.whole_chips(33) == 17


def test_the_command_prices_cores_by_the_chip(capsys: pytest.CaptureFixture[str]) -> None:
    said = "llama2-7b --chip trn1-core --host trn1.32xlarge --chips 32 --zero 3 --recompute full"
    assert main([*said.split(), "--global-batch", "64", "--seq-len", "4096", "--tokens", "1e9"]) == 0
    assert "days on 16 chips" in capsys.readouterr().out
