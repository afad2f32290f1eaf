"""Five front ends, one block: each computes it and shows it, and each one's step on two devices is right."""

from pathlib import Path

import numpy as np
import pytest
import torch

from fmlab import Ranks
from fmlab.frontends import IN_A_PROCESS, NAMES, Captured, capture, collectives, in_torch
from fmlab.frontends.spec import EPS, HEADS, LENGTH, ROWS, WIDTH, Arrays, batch, weights
from fmlab.lab.curriculum import environment_python
from fmlab.lab.front_ends import ENVIRONMENTS, placed_loss, see
from fmlab.models import GPT, GPTConfig
from fmlab.models.state import State


def python_of(name: str) -> Path | None:
    if name not in IN_A_PROCESS:
        return None
    folder = ENVIRONMENTS[name]
    python = environment_python(folder)
    if python is None:
        pytest.skip(f"there is no {folder} here; make lab{folder.removeprefix('.venv')} makes it")
    return python


@pytest.fixture(scope="module", params=NAMES)
def captured(request: pytest.FixtureRequest) -> Captured:
    return capture(request.param, python_of(request.param))


def test_the_plain_block_is_a_layer_of_our_gpt() -> None:
    config = GPTConfig(
        vocab_size=8, max_positions=LENGTH, num_layers=1, hidden_size=WIDTH, num_heads=HEADS, norm_eps=EPS
    )
    layer = GPT(config).blocks[1]
    layer.load_state_dict({name: torch.from_numpy(value) for name, value in weights().items()})
    x = torch.from_numpy(batch()[0])
    ours = layer(State(hidden=x)).hidden
    torch.testing.assert_close(in_torch.plain_block()(x), ours, rtol=0, atol=2e-6)


def test_each_front_end_computes_the_block_and_shows_every_operation(captured: Captured) -> None:
    expected, _ = in_torch.on_one_device()
    assert captured.output.shape == (ROWS, LENGTH, WIDTH)
    np.testing.assert_allclose(captured.output, expected, rtol=0, atol=3e-6)
    names = [node.name for node in captured.graph.nodes]
    assert len(set(names)) == len(names)
    for number, node in enumerate(captured.graph.nodes):
        assert set(node.inputs) <= set(names[:number]), node
    products = {"linear", "Linear", "matmul", "mm", "addmm", "dot_general", "BatchMatMulV2", "MatMul"}
    found = sum(count for op, count in captured.graph.counts.items() if op in products)
    assert found == 6, "four matrices, queries with keys, weights with values"
    assert sum("softmax" in op.lower() for op in captured.graph.counts) == (captured.name != "jax")


def test_only_torch_fx_does_not_know_shapes(captured: Captured) -> None:
    assert captured.graph.known_shapes == (0 if captured.name == "torch.fx" else 1)


def test_the_committed_captures_are_what_the_front_ends_see(captured: Captured) -> None:
    stored = see((captured.name,), committed=True)[captured.name]
    assert stored.graph.counts == captured.graph.counts
    assert stored.output_error < 3e-6
    if captured.updated:
        assert stored.step_error is not None
        assert stored.step_error < 1e-4
        assert stored.collectives == collectives(captured)


@pytest.mark.parametrize("captured", IN_A_PROCESS, indirect=True)
def test_each_step_on_two_devices_is_that_of_one(captured: Captured) -> None:
    same_weights(captured.updated)
    # JAX's compiler and TensorFlow's strategy put all gradients into one message (TensorFlow has an operation
    # on each device); torch_xla, told to compile quickly, sends each of the twelve alone.
    assert collectives(captured) == {"jax": 1, "tensorflow": 2, "xla": 12}[captured.name]


@pytest.mark.multirank
@pytest.mark.parametrize("how", ["wrap", "place"])
def test_pytorchs_step_on_two_ranks_is_that_of_one(ranks2: Ranks, how: str) -> None:
    for updated in ranks2.run(in_torch.data_parallel_step, how):
        same_weights(updated)


@pytest.mark.multirank
def test_torchs_mean_squared_error_of_placed_tensors_has_gradients_twice_too_large(ranks2: Ranks) -> None:
    """Its backward divides by the elements of a rank. If this fails, torch was mended: tell the chapter."""
    (loss, gradient), (torch_loss, torch_gradient) = (
        ranks2.run(placed_loss, own)[0] for own in (True, False)
    )
    assert torch_loss == pytest.approx(loss, rel=1e-6)
    assert torch_gradient / gradient == pytest.approx(2, rel=1e-4)


def same_weights(updated: Arrays) -> None:
    _, expected = in_torch.on_one_device()
    assert set(updated) == set(expected)
    before = weights()
    for name, value in expected.items():
        moved = np.abs(value - before[name]).max()
        assert np.abs(updated[name] - value).max() < 1e-4 * moved, name


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'keras' is unknown; there are: torch\.fx, torch\.export, xla"):
        capture("keras")
    with pytest.raises(ValueError, match="make lab-frontends"):
        capture("jax")
    with pytest.raises(RuntimeError, match="in_jax failed"):
        capture("jax", "/bin/false")
    with pytest.raises(ValueError, match="legal are 'wrap' and 'place'"):
        in_torch.data_parallel_step("mirror")
