"""The port as far as a machine without a Trainium can take it."""

import copy

import pytest
from accept import reasons
from train import batches, program, train

from fmlab.backends.preflight import preflight, signatures


@pytest.fixture(scope="module")
def reports():
    return {device: train(device, 12) for device in ("cpu", "sim:trn2-lnc2")}


def test_an_epoch_has_three_shapes():
    assert signatures(batches()).compilations == 3


def test_the_pre_flight_finds_nothing_to_put_right():
    model, rows, loss = program()
    first = {batch["input_ids"].shape: batch for batch in rows[:60]}
    report = preflight(model, list(first.values()), loss, chip="trn2")
    worse = [finding for finding in report.findings if finding.severity != "note"]
    assert [finding.check for finding in worse] == ["shapes"], report  # three, chosen by us


def test_the_simulated_chip_learns_what_the_cpu_learns(reports):
    chip = reports["sim:trn2-lnc2"]
    chip = chip | {"seconds": [chip["modelled seconds of a step"]] * 12}  # the host's say nothing of a chip
    assert reasons(reports["cpu"], chip, planned=chip["modelled seconds of a step"]) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"losses": [float("nan")] * 12}, "loss nan"),
        ({"shapes": 9}, "9 shapes"),
        ({"seconds": [0.01] * 9 + [40.0] + [0.01] * 2}, "compiled again"),
        ({"seconds": [0.05] * 12}, "5.0 times the 0.01 s planned"),
        ({"seconds": [0.01] * 8}, "2 steps after"),
    ],
)
def test_what_is_wrong_is_refused(reports, change, said):
    sound = copy.deepcopy(reports["cpu"]) | {"seconds": [0.01] * 12}
    assert reasons(reports["cpu"], sound, planned=0.01) == []
    (reason,) = reasons(reports["cpu"], sound | change, planned=0.01)
    assert said in reason
