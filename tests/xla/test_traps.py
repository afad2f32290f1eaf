"""What a user does in the wrong order is said, with what to do."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="module")
def found(run_xla: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    return run_xla("jobs/traps.py")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("backward first", "call get_backend('xla') before the first backward()"),
        ("device", "legal are CPU, TPU, NEURON and CUDA"),
        ("devices", "a TPU host has the devices it has"),
        ("none", "devices must be at least 1, got 0"),
    ],
)
def test_the_wrong_order_is_named(found: dict[str, Any], name: str, text: str) -> None:
    assert text in found[name]


def test_a_variable_that_comes_too_late_warns(found: dict[str, Any]) -> None:
    assert any("XLA_FLAGS was changed after torch_xla had been loaded" in text for text in found["warned"])


def test_auto_takes_the_cpu_itself_where_torch_xla_has_only_the_cpu(found: dict[str, Any]) -> None:
    assert found["auto"] == "cpu"
