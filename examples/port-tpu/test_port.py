"""The port as far as a machine without a TPU can take it."""

import pytest
from port import refused, run

from fmlab.cli import main


@pytest.fixture(scope="module")
def reports():
    return {device: run(device, 4) for device in ("cpu", "sim:tpu-v5e")}


def test_the_simulated_chip_is_accepted(reports):
    cpu, chip = reports["cpu"], reports["sim:tpu-v5e"]
    assert refused(cpu, chip) == []
    assert chip["shapes"] == 2
    assert len(chip["modelled"]) == 4
    assert all(len(text) > 0 for text in chip["written"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"losses": [9.0] * 4}, "step 1"),
        ({"evaluation": float("nan")}, "evaluation"),
        ({"shapes": 12}, "12 shapes"),
    ],
)
def test_what_is_wrong_is_refused(reports, change, said):
    (reason,) = refused(reports["cpu"], reports["cpu"] | change)
    assert said in reason


def test_the_pre_flight_finds_nothing_to_put_right():
    assert main(["preflight", "gpt2-tiny", "--chip", "tpu-v5e", "--batch", "4", "--seq-len", "64"]) == 0
