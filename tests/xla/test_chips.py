"""The chips that torch_xla drives, on its CPU: the same loop, the right names. No chip was seen."""

from collections.abc import Callable
from typing import Any

import pytest


def test_trainium_one_and_tpus_train_through_torch_xla(run_xla: Callable[..., dict[str, Any]]) -> None:
    found = run_xla("jobs/chips.py")
    for name, kind in (("neuron", "NeuronThroughXLA"), ("tpu", "TPUThroughXLA")):
        assert found[name] == {"name": name, "device": "xla", "distributed": "xla", "class": kind}
    assert "native TorchNeuron is not loaded" in found["native"]
    neuron, cpu = found["losses"]
    assert neuron == pytest.approx(cpu, rel=1e-5)
    assert found["trace"] == ["traced", False, {"inline_weights_to_neff": True}]
    assert not found["extracting"]
